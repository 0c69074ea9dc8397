"""The table of kernels, into which each file of ops/, and attention/, enters its own."""

from pyggml.backends.cuda.runtime.kernel import CudaKernel
from pyggml.backends.kit.kernels import KernelTable

_TABLE = KernelTable(CudaKernel, "pyggml.backends.cuda.ops", "pyggml.backends.cuda.attention")
declare, kernels = _TABLE.declare, _TABLE.kernels
