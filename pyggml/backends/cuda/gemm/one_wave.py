"""Products of some hundred rows by cublasLt, in tiles of which each multiprocessor takes one.

cuBLAS makes such tiles clusters of blocks, shares their sums among more blocks, or takes smaller
ones, of which those of two products have no room side by side. So on an H200 a step of 1 × 128
takes 6.08 ms by its choice and 5.79 in these tiles, 28 layers whose x has 2,048 columns. Of 256 and
512 rows cuBLAS's choice is the faster one in a step, though such tiles are by themselves.

What is chosen follows from the sizes alone, so that each process has the same bits.
"""

from functools import cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.runtime.capability import own_of
from pyggml.backends.cuda.runtime.driver import CudaSupportError, address, cuda

_TILES = {(32, 64): 12, (96, 64): 27}  # sizes: cublasLtMatmulTile_t
_FEWEST_ROWS, _MOST_ROWS = 96, 128
_FULL, _HALF = 0.9, 0.45  # of the multiprocessors, that have a tile: of the smallest fewer have
_NEAR = 8  # numbers that rows begin at multiples of
_LONG = 4  # times a tile's numbers: longer sums are better shared
_ALGORITHM, _CAPABILITY = 66, 9  # its kernels for Hopper
_COMPUTE_32F, _R_32F = 68, 0
_TRANSA, _TRANSB = 3, 4  # cublasLtMatmulDescAttributes_t
# cublasLtMatmulAlgoConfigAttributes_t with their types and values: no sums are shared, the kernel
# chooses its stages, and a block is a cluster by itself
_TILE = 1, np.uint32
_SET = (2, np.int32, 1), (5, np.uint32, 0), (6, np.uint32, 35), (8, np.uint16, 2)


class GemmForm(NamedTuple):
    """A product as gemm_ex takes it, without its memory: columns come first."""

    operations: tuple[int, int]
    sizes: tuple[int, int, int]  # m, n, k
    kinds: tuple[int, int]  # of the factors, and of the result
    steps: tuple[int, int, int]  # of the factors and the result


def tile_of(m: int, n: int, k: int, n_multiprocessors: int) -> int | None:
    """The smallest tile of which there are no more than multiprocessors; None if many of these have
    none, sums are long, or rows fewer or more."""
    if not _FEWEST_ROWS <= n <= _MOST_ROWS:
        return None
    least = _HALF
    for (rows, columns), tile in _TILES.items():
        n_tiles = ceil(m / rows) * ceil(n / columns)
        if n_tiles <= n_multiprocessors:
            is_full = n_tiles >= least * n_multiprocessors
            return tile if is_full and k <= _LONG * rows * columns else None
        least = _FULL
    return None


class OneWave:
    """Takes what gemm_ex takes, and multiplies in such tiles."""

    def __init__(self, form: GemmForm, algorithm: np.ndarray, workspace: Any, stream: Any) -> None:
        self._of_product, *self._layouts = _descriptors(form)
        self._algorithm, self._stream = algorithm, int(stream.handle)
        self._workspace = address(workspace), workspace.size

    def __call__(self, handle: int, *arguments: Any) -> None:
        *_, alpha, a, _, _, b, _, _, beta, c, _, _, _, _ = arguments
        of_a, of_b, of_c = self._layouts
        _library().matmul(
            handle, self._of_product, alpha, a, of_a, b, of_b, beta, c, of_c, c, of_c,
            self._algorithm.ctypes.data, *self._workspace, self._stream,
        )  # fmt: skip


def _n_multiprocessors() -> int:
    """Of this card, 0 if it is none that such kernels are for."""
    try:
        card = cuda.get_current_device()
    except CudaSupportError:
        return 0
    return card.MULTIPROCESSOR_COUNT if own_of(card)[0] == _CAPABILITY else 0


def _library() -> Any:
    from nvmath.bindings import cublasLt

    return cublasLt


@cache
def algorithm_of(handle: int, form: GemmForm) -> np.ndarray | None:
    """cublasLt's for such tiles; None if cuBLAS is to choose."""
    tile = tile_of(*form.sizes, _n_multiprocessors())
    if tile is None or any(step % _NEAR for step in form.steps):
        return None
    library, (kind, of_result) = _library(), form.kinds
    algorithm = np.zeros(1, library.matmul_algo_dtype)
    result = np.zeros(1, library.matmul_heuristic_result_dtype)
    at, (of_product, of_a, of_b, of_c) = algorithm.ctypes.data, _descriptors(form)
    try:
        library.matmul_algo_init(
            handle, _COMPUTE_32F, _R_32F, kind, kind, of_result, of_result, _ALGORITHM, at
        )
        for attribute, number, value in ((*_TILE, tile), *_SET):
            one = np.array([value], number)
            library.matmul_algo_config_set_attribute(at, attribute, one.ctypes.data, one.nbytes)
        library.matmul_algo_check(
            handle, of_product, of_a, of_b, of_c, of_c, at, result.ctypes.data
        )
    except library.cuBLASLtError:  # another version has no such kernel
        return None
    return algorithm


@cache
def _descriptors(form: GemmForm) -> tuple[int, int, int, int]:
    """cublasLt's of the product, its factors and its result."""
    library, (turned_a, turned_b), (m, n, k) = _library(), form.operations, form.sizes
    of_product = library.matmul_desc_create(_COMPUTE_32F, _R_32F)
    for attribute, turned in ((_TRANSA, turned_a), (_TRANSB, turned_b)):
        value = np.array([turned], np.int32)
        library.matmul_desc_set_attribute(of_product, attribute, value.ctypes.data, value.nbytes)
    sizes = (k, m) if turned_a else (m, k), (n, k) if turned_b else (k, n), (m, n)
    kinds = form.kinds[0], form.kinds[0], form.kinds[1]
    of_each = zip(kinds, sizes, form.steps, strict=True)
    of_a, of_b, of_c = (library.matrix_layout_create(kind, *ab, step) for kind, ab, step in of_each)
    return of_product, of_a, of_b, of_c
