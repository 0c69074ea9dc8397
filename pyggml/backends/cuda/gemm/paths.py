"""The table of paths: the first that takes a product computes it.

Microseconds on an H100, a Q8_0 matrix of 6144 × 2048, by rows of A (`benchmarks/device.py --rows
product`). cuBLAS's and the tensor cores' have the unpacking in them. Few rows: half of the time of
two such matrices in one launch, a norm before them.

    rows            1       8     128     512    8192
    few rows        8
    dots           22     101
    cublas         27      26      28      44     350
    tensor         82      82      86     156    1594
    simt          339     340     684    2163

Packed tiles: two such matrices in Q4_K in one launch, a norm before them, took 16 µs for 8 rows of
A, 18 for 16 and 23 for 32, on an H200 (`device.py`'s time_by_op).
"""

from pyggml.backends.cuda.gemm.cublas import CUBLAS
from pyggml.backends.cuda.gemm.dots import DOTS, DOTS_OF_FEW
from pyggml.backends.cuda.gemm.few_rows import FEW_ROWS
from pyggml.backends.cuda.gemm.packed_tiles import PACKED_TILES
from pyggml.backends.cuda.gemm.problem import CudaProblem, CudaProductPath
from pyggml.backends.cuda.gemm.simt import SIMT
from pyggml.backends.cuda.gemm.tensor import TENSOR

PATHS: tuple[CudaProductPath, ...] = (
    FEW_ROWS, DOTS_OF_FEW, PACKED_TILES, CUBLAS, DOTS, TENSOR, SIMT,
)  # fmt: skip


def path_of(p: CudaProblem) -> CudaProductPath:
    """The path that computes a product."""
    return next(path for path in PATHS if path.takes(p))
