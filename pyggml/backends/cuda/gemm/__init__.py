"""Matrix products on the card, by the first path that takes them."""

from pyggml.backends.cuda.gemm.paths import PATHS, path_of
from pyggml.backends.cuda.gemm.problem import CudaOperands, CudaProblem, CudaProductPath
from pyggml.backends.kit.products import Factor

__all__ = ["PATHS", "CudaOperands", "CudaProblem", "CudaProductPath", "Factor", "path_of"]
