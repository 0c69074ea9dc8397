"""The table of paths: the first that takes a product computes it.

Measured on an H100 (benchmarks/device.py, rows `product`): up to 8 rows of A the packed weights are
read once, at the speed of the memory; above, cuBLAS is ahead of our own tensor-core kernel at every
shape, which serves where nvmath-python is not installed.
"""

from __future__ import annotations

from pyggml.backends.cuda.gemm.cublas import CUBLAS
from pyggml.backends.cuda.gemm.dots import DOTS
from pyggml.backends.cuda.gemm.problem import Path, Problem
from pyggml.backends.cuda.gemm.simt import SIMT
from pyggml.backends.cuda.gemm.tensor import TENSOR
from pyggml.backends.cuda.gemm.thin import NARROW, TALL

PATHS: tuple[Path, ...] = (DOTS, NARROW, TALL, CUBLAS, TENSOR, SIMT)


def path_of(p: Problem) -> Path:
    """The path that computes a product."""
    return next(path for path in PATHS if path.takes(p))
