"""The same numbers elsewhere, or seen otherwise: only cont, dup and cpy move anything.

cont, dup   a gapless copy                        cpy   a gapless copy of another type
reshape     other axes over the same order        permute, transpose   the axes in another order
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from pyggml._jit import kernel, parallel, prange
from pyggml.dtypes import BF16, F16, F32, I32, DType, dtype
from pyggml.errors import ShapeError
from pyggml.ggml_enums import GGMLOp
from pyggml.quants.bits import bfloat_to_float, float_to_half, half_to_float
from pyggml.tensor import (
    PLAIN,
    STRIDED,
    Call,
    Memory,
    NoGrad,
    Sample,
    Shape,
    Site,
    Spec,
    Tensor,
    as_four,
    op,
)


def cont(x: Tensor) -> Tensor:
    """x without gaps: x itself if it has none, else a copy (ggml's CONT)."""
    return x if x.is_contiguous else CONT(x)


def dup(x: Tensor) -> Tensor:
    """A gapless copy of x of any type (ggml's DUP)."""
    return DUP(x)


def cpy(x: Tensor, to: DType) -> Tensor:
    """x as F32, F16 or BF16, rounded to nearest, ties to even; x is one of those (ggml's CPY)."""
    return CPY(x, to=to.name)


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """x with other axes over the same elements in the same order; one of them may be -1.

    A view, of a copy if x has gaps. A quantised x keeps its last axis (ggml's RESHAPE).
    """
    shape = tuple(shape)
    if shape.count(-1) == 1:
        known = -prod(shape)
        shape = tuple(x.n_elements // known if n == -1 and known else n for n in shape)
    return RESHAPE(x, shape=shape)


def permute(x: Tensor, axes: Shape) -> Tensor:
    """A view of x whose axis i is x's axis axes[i], as np.transpose (ggml's PERMUTE)."""
    return PERMUTE(x, axes=tuple(axes))


def transpose(x: Tensor) -> Tensor:
    """A view of x with its last two axes exchanged (ggml's TRANSPOSE)."""
    return TRANSPOSE(x)


def no_kernel(site: Site) -> Call:
    """The `run` of ops with Memory.VIEW."""
    raise AssertionError(f"{site.node!r} is a view: nothing runs")


# -- cont, dup ----------------------------------------------------------------------------------

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@parallel
def _copy(out, x):
    n1, n2 = out.shape[1], out.shape[2]
    for r in prange(out.shape[0] * n1 * n2):
        i, j, k = r // (n1 * n2), r // n2 % n1, r % n2
        for c in range(out.shape[3]):
            out[i, j, k, c] = x[i, j, k, c]


def _copy_run(site: Site) -> Call:
    """Bits are copied, so that types of one width share a kernel."""
    bits = _BITS[site.out.itemsize]
    return _copy, (as_four(site.out.view(bits)), as_four(site.src[0].view(bits)))


def _copy_spec(x: Tensor) -> Spec:
    return Spec(x.shape, x.dtype)


def _same_ref(x: np.ndarray, **_: Any) -> np.ndarray:
    return x.copy()


def _same_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (dy,)


def _copy_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (2, 1, 3, 4), (7,)]:
        yield Sample((rng.standard_normal(shape),))


CONT = op(
    name="cont",
    ggml=GGMLOp.CONT,
    spec=_copy_spec,
    run=_copy_run,
    ref=_same_ref,
    grad=_same_grad,
    samples=_copy_samples,
    memory=Memory.FRESH,
    needs=STRIDED,
)
DUP = op(
    name="dup",
    ggml=GGMLOp.DUP,
    spec=_copy_spec,
    run=_copy_run,
    ref=_same_ref,
    grad=_same_grad,
    samples=_copy_samples,
    memory=Memory.FRESH,
    needs=STRIDED,
)

# -- cpy ----------------------------------------------------------------------------------------


@kernel
def float_to_bfloat(f):
    """The bits (uint16) of the bfloat nearest to f, ties to even; NaN stays NaN."""
    u = np.float32(f).view(np.uint32)
    if u & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16((u >> np.uint32(16)) | np.uint32(64))
    odd = (u >> np.uint32(16)) & np.uint32(1)
    return np.uint16((u + np.uint32(0x7FFF) + odd) >> np.uint32(16))
