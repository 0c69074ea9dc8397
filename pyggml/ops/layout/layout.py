"""Copies, and views with other axes.

cont, dup   a gapless copy                          cpy   a gapless copy of another type
reshape     a view: other axes, the same order      permute, transpose   a view: axes reordered
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, F32, DType, dtype
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NO_SETTINGS, Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import JIT, kernel
from pyggml.jit.frames import Bool, Floats1, Frame, Shorts1
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.kernel import Site, as_four, cpu_kernel
from pyggml.ops.strips import LENGTH
from pyggml.quants.bits import bf16_to_float, f16_to_float, float_to_bf16, float_to_f16


def cont(x: Tensor) -> Tensor:
    """x without gaps: x itself if it has none, else a copy (ggml's CONT)."""
    return x if x.is_contiguous else CONT(x)


def dup(x: Tensor) -> Tensor:
    """A gapless copy of x of any type (ggml's DUP)."""
    return DUP(x)


def cpy(x: Tensor, to: DType) -> Tensor:
    """x (F32, F16 or BF16) as another of these types, ties rounded to even (ggml's CPY)."""
    return CPY(x, to=to.name)


def reshape(x: Tensor, shape: Shape) -> Tensor:
    """x with other axes, its elements in the same order (ggml's RESHAPE). One axis may be -1.

    The result is a view of x, or of a copy if x has gaps. A quantised x is cut between blocks.
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


# -- cont, dup ----------------------------------------------------------------------------------


def _copy_run(site: Site) -> Call:
    """NumPy's strided copy. On rows without gaps no kernel is faster (0.3 ns a float, measured)."""
    return Call(np.copyto, site.out, site.src[0])


def _copy_spec(x: Tensor) -> Spec:
    return Spec(x.shape, x.dtype)


def _same_ref(x: np.ndarray, **_: Any) -> np.ndarray:
    return x.copy()


def _same_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy"""
    return (dy,)


def _copy_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (2, 1, 3, 4), (7,)]:
        yield Sample((rng.standard_normal(shape),))


CONT = op(
    name="cont",
    ggml=GGMLOp.CONT,
    spec=_copy_spec,
    ref=_same_ref,
    grad=_same_grad,
    samples=_copy_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    strided=True,
)
cpu_kernel(CONT, _copy_run)
DUP = op(
    name="dup",
    ggml=GGMLOp.DUP,
    spec=_copy_spec,
    ref=_same_ref,
    grad=_same_grad,
    samples=_copy_samples,
    refuses=NO_SETTINGS,
    memory=Memory.FRESH,
    strided=True,
)
cpu_kernel(DUP, _copy_run)

# -- cpy ----------------------------------------------------------------------------------------


_FLOATS = (F32, F16, BF16)
_BITS = {2: np.uint16, 4: np.uint32}


@kernel
def _read(bits, kind):
    if kind == 0:
        return np.uint32(bits).view(np.float32)
    if kind == 1:
        return f16_to_float(np.uint16(bits))
    return bf16_to_float(np.uint16(bits))


@kernel
def _write(f, kind):
    if kind == 0:
        return np.float32(f).view(np.uint32)
    return np.uint32(float_to_f16(f) if kind == 1 else float_to_bf16(f))


@kernel
def _cpy(out, x, to, of):
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            for k in range(out.shape[2]):
                for c in range(out.shape[3]):
                    out[i, j, k, c] = _write(_read(x[i, j, k, c], of), to)


class Rounding(Frame):
    """float32 to bfloat16, or back."""

    narrow: Shorts1  # bits of bfloat16
    wide: Floats1
    narrows: Bool  # whether `narrow` is written, else `wide`


@task_code(Rounding)
def _strip_task(f, task, thread):
    """One strip of float32 rounded to bfloat16, or of bfloat16 made float32."""
    narrow, wide = f.narrow, f.wide
    first, last = task * LENGTH, min((task + 1) * LENGTH, wide.size)
    short, long = narrow[first:last], wide[first:last]
    if f.narrows:
        for i in range(long.size):
            short[i] = float_to_bf16(long[i])
    else:
        for i in range(long.size):
            long[i] = bf16_to_float(short[i])


def _cpy_run(site: Site) -> Call:
    x, to, of = site.src[0], site.node.dtype, site.node.src[0].dtype
    if JIT and {to, of} == {F32, BF16} and x.flags.c_contiguous:
        narrow, wide = (site.out, x) if to is BF16 else (x, site.out)
        f = Rounding(narrow=narrow.reshape(-1), wide=wide.reshape(-1), narrows=to is BF16)
        return Call(launch, stage(_strip_task, f, -(-wide.size // LENGTH)))
    arrays = (as_four(a.view(_BITS[a.itemsize])) for a in (site.out, x))
    return Call(_cpy, *arrays, _FLOATS.index(to), _FLOATS.index(of))


def _cpy_spec(x: Tensor, to: str) -> Spec:
    wanted = dtype(to)
    if x.dtype not in _FLOATS or wanted not in _FLOATS:
        raise ShapeError(f"cpy: x is {x!r} and goes to {to}, wanted F32, F16 or BF16 for both")
    return Spec(x.shape, wanted)


def _cpy_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), "F32"), ((3, 8), "F16"), ((2, 3, 5), "BF16"), ((7,), "F16")]
    for shape, to in [*cases, ((2, LENGTH // 2 + 1), "BF16")]:
        yield Sample((rng.standard_normal(shape),), {"to": to})


CPY = op(
    name="cpy",
    ggml=GGMLOp.CPY,
    spec=_cpy_spec,
    ref=_same_ref,
    grad=_same_grad,
    samples=_cpy_samples,
    refuses={"to": ("Q8_0", "I32")},
    memory=Memory.FRESH,
    strided=True,
)
cpu_kernel(CPY, _cpy_run)

# -- reshape ------------------------------------------------------------------------------------


def _reshape_spec(x: Tensor, shape: Shape) -> Spec:
    fits = len(shape) <= 4 and min(shape, default=0) >= 0 and prod(shape) == x.n_elements
    if not fits:
        raise ShapeError(
            f"reshape: x is {x!r} of {x.n_elements} elements, wanted {list(shape)}"
            " (at most 4 axes, as many elements)"
        )
    if x.dtype.quantised and (not shape or shape[-1] % x.dtype.block):
        raise ShapeError(
            f"reshape: x is {x!r}, wanted a last axis of whole blocks, not {list(shape)}"
        )
    return Spec(shape, x.dtype)


def _reshape_ref(x: np.ndarray, shape: Shape) -> np.ndarray:
    return x.reshape(shape)


def _reshape_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy, in x's shape"""
    return (reshape(dy, node.src[0].shape),)


def _reshape_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, new in [((1, 1), ()), ((3, 8), (2, 3, 4)), ((2, 3, 4, 5), (6, 20)), ((6,), (2, 3))]:
        yield Sample((rng.standard_normal(shape),), {"shape": new})


RESHAPE = op(
    name="reshape",
    ggml=GGMLOp.RESHAPE,
    spec=_reshape_spec,
    ref=_reshape_ref,
    grad=_reshape_grad,
    samples=_reshape_samples,
    refuses={"shape": ((9999,), (-1, -5), (1,) * 5)},
    memory=Memory.VIEW,
)

# -- permute, transpose -------------------------------------------------------------------------


def _permuted_spec(x: Tensor, axes: Shape) -> Spec:
    return Spec(tuple(x.shape[a] for a in axes), x.dtype, tuple(x.strides[a] for a in axes))


def _permute_spec(x: Tensor, axes: Shape) -> Spec:
    n = len(x.shape)
    if sorted(axes) != list(range(n)) or n == 0:
        raise ShapeError(f"permute: x is {x!r}, wanted axes 0 to {n - 1} once each, not {axes}")
    if x.dtype.quantised and axes[-1] != n - 1:
        raise ShapeError(f"permute: x is {x!r}, whose blocks lie along the last axis, not {axes}")
    return _permuted_spec(x, axes)


def _permute_ref(x: np.ndarray, axes: Shape) -> np.ndarray:
    return np.transpose(x, axes)


def _permute_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy with its axes in the old order"""
    axes = node.params["axes"]
    return (permute(dy, tuple(axes.index(a) for a in range(len(axes)))),)


def _permute_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), (1, 0)), ((2, 3, 4), (2, 0, 1)), ((2, 3, 4, 5), (0, 2, 3, 1)), ((5,), (0,))]
    cases.append(((3, 1, 4, 2), tuple(rng.permutation(4).tolist())))
    for shape, axes in cases:
        yield Sample((rng.standard_normal(shape),), {"axes": axes})


PERMUTE = op(
    name="permute",
    ggml=GGMLOp.PERMUTE,
    spec=_permute_spec,
    ref=_permute_ref,
    grad=_permute_grad,
    samples=_permute_samples,
    refuses={"axes": ((0, 0), (1, 2), (-1, 0))},
    memory=Memory.VIEW,
    strided=True,
)


def _transpose_spec(x: Tensor) -> Spec:
    n = len(x.shape)
    if n < 2 or x.dtype.quantised:
        raise ShapeError(f"transpose: x is {x!r}, wanted two or more axes and no blocks")
    return _permuted_spec(x, (*range(n - 2), n - 1, n - 2))


def _transpose_ref(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)


def _transpose_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dyᵀ"""
    return (transpose(dy),)


def _transpose_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (3, 8), (2, 3, 5), (2, 1, 3, 4)]:
        yield Sample((rng.standard_normal(shape),))


TRANSPOSE = op(
    name="transpose",
    ggml=GGMLOp.TRANSPOSE,
    spec=_transpose_spec,
    ref=_transpose_ref,
    grad=_transpose_grad,
    samples=_transpose_samples,
    refuses=NO_SETTINGS,
    memory=Memory.VIEW,
    strided=True,
)
