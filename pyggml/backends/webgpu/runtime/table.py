"""The table of kernels, into which each file of ops/ enters its own."""

from pyggml.backends.kit.kernels import KernelTable
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel

_TABLE = KernelTable(ShaderKernel, "pyggml.backends.webgpu.ops")
declare, kernels = _TABLE.declare, _TABLE.kernels
