"""Copies of another type, and copies into a tensor that is there.

cpy        x as another type: floats rounded or widened, rows quantised or unpacked, whole numbers
cpy_into   the same, written over a tensor's numbers, such as a part of a cache

F32 goes to and from every type; two others meet in F32, as in ggml.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F16, F32, I32, DType, dtype
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import Memory, Sample, Spec, op
from pyggml.graph.tensor import Shape, Tensor, leaf, zeros
from pyggml.jit import JIT, kernel
from pyggml.jit.frames import Bool, Floats1, Frame, Shorts1
from pyggml.jit.tasks import SHARE, launch, pieces, stage, task_code
from pyggml.kernels.kernel import Site, as_four, cpu_kernel
from pyggml.ops.layout.layout import dup, reshape
from pyggml.quants import QUANTS, NoPack, dequantize, quantize
from pyggml.quants.bits import bf16_to_float, f16_to_float, float_to_bf16, float_to_f16


def cpy(x: Tensor, to: DType | Tensor) -> Tensor:
    """x as another type; or written over a tensor `to` of as many elements (ggml's CPY).

    Types are F32, F16, BF16, I32 and all quantised ones; those that pack by importance alone are
    read only. Floats are rounded, ties to even; F32 becomes I32 without its fraction; rows are
    quantised with ggml's bytes. A copy's gradient is that of its numbers unrounded.

    With a tensor, the result is a view of its memory, which may have gaps; nodes that need the new
    numbers read the result. Raises ShapeError for other types or sizes; the kernel PyggmlError for
    numbers that the type cannot hold.
    """
    if isinstance(to, Tensor):
        if x.n_elements != to.n_elements:
            raise ShapeError(f"cpy: {x!r} goes into {to!r}, wanted as many elements")
        x = x if x.shape == to.shape else reshape(x, to.shape)
        return CPY_INTO(to, _half_way(x, to.dtype))
    if x.dtype is to and to not in _FLOATS:
        return dup(x)
    return CPY(_half_way(x, to), to=to.name)


def _half_way(x: Tensor, to: DType) -> Tensor:
    """x as F32 if it meets the type there."""
    pair = {x.dtype, to}
    return x if F32 in pair or len(pair) == 1 or pair <= {*_FLOATS} else CPY(x, to="F32")


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
    first, last = task * SHARE, min((task + 1) * SHARE, wide.size)
    short, long = narrow[first:last], wide[first:last]
    if f.narrows:
        for i in range(long.size):
            short[i] = float_to_bf16(long[i])
    else:
        for i in range(long.size):
            long[i] = bf16_to_float(short[i])


def _quantise(out: np.ndarray, x: np.ndarray, name: str) -> None:
    out[...] = quantize(x, name)


def _unpack(out: np.ndarray, x: np.ndarray, name: str) -> None:
    out[...] = dequantize(x, name)


def _without_fraction(out: np.ndarray, x: np.ndarray) -> None:
    if not (np.abs(x) < 2.0**31).all():
        raise PyggmlError(f"cpy: {x[~(np.abs(x) < 2.0**31)][0]} is no whole number of 32 bits")
    np.copyto(out, x, casting="unsafe")


def _cpy_run(site: Site) -> Call:
    out, x, to, of = site.out, site.src[-1], site.node.dtype, site.node.src[-1].dtype
    if to in _FLOATS and of in _FLOATS:
        return _floats(out, x, to, of)
    if to is of or of is I32:
        return Call(np.copyto, out, x)
    if to is I32:
        return Call(_without_fraction, out, x)
    return Call(_quantise, out, x, to.name) if to.quantised else Call(_unpack, out, x, of.name)


def _floats(out: np.ndarray, x: np.ndarray, to: DType, of: DType) -> Call:
    gapless = x.flags.c_contiguous and out.flags.c_contiguous
    if JIT and {to, of} == {F32, BF16} and gapless:
        narrow, wide = (out, x) if to is BF16 else (x, out)
        narrow, wide = narrow.reshape(-1), wide.reshape(-1)
        f = Rounding(narrow=narrow, wide=wide, narrows=to is BF16)
        short, long = pieces(narrow, SHARE, to is F32), pieces(wide, SHARE, to is BF16)
        return Call(launch, stage(_strip_task, f, -(-wide.size // SHARE), short, long))
    arrays = (as_four(a.view(_BITS[a.itemsize])) for a in (out, x))
    return Call(_cpy, *arrays, _FLOATS.index(to), _FLOATS.index(of))


def _check_types(name: str, x: Tensor, to: DType) -> None:
    """ShapeError unless one is F32 and the other a type to go to or from, or both are floats."""
    pair = {x.dtype, to}
    supported = all(t in (*_FLOATS, I32) or (t.quantised and t.name in QUANTS) for t in pair)
    if not supported or not (F32 in pair or len(pair) == 1 or pair <= {*_FLOATS}):
        raise ShapeError(f"{name}: x is {x!r} and goes to {to}, wanted F32 and another type")
    pack = QUANTS[to.name].pack if to.quantised else None
    if isinstance(pack, NoPack) and x.dtype is not to:
        raise ShapeError(f"{name}: {x!r} does not go to {to}: {pack.reason}")
    if to.quantised and (not x.shape or x.shape[-1] % to.block):
        raise ShapeError(f"{name}: a row of {x!r} is no whole number of {to}'s {to.block}")


def _ref(x: np.ndarray, to: DType) -> np.ndarray:
    return np.trunc(x).astype(np.int32) if to is I32 else x.astype(np.float64)


# -- cpy ----------------------------------------------------------------------------------------


def _cpy_spec(x: Tensor, to: str) -> Spec:
    _check_types("cpy", x, dtype(to))
    return Spec(x.shape, dtype(to))


def _cpy_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy"""
    return (None if I32 in (node.dtype, node.src[0].dtype) else dy,)


def _cpy_samples(rng: np.random.Generator) -> Iterator[Sample]:
    cases = [((1, 1), "F32"), ((3, 8), "F16"), ((2, 3, 5), "BF16"), ((7,), "F16")]
    cases += [((2, SHARE // 2 + 1), "BF16"), ((2, 3, 64), "Q8_0"), ((2, 256), "Q4_K")]
    for shape, to in [*cases, ((3, 32), "Q4_0")]:
        yield Sample((rng.standard_normal(shape),), {"to": to})
    whole = rng.integers(-99, 99, (3, 5))
    yield Sample((whole.astype(np.int32),), {"to": "F32"})
    yield Sample((whole + rng.uniform(0.1, 0.9, (3, 5)),), {"to": "I32"})
    for name in ("Q5_0", "Q6_K"):
        yield Sample((packed_leaf(rng, (2, 3, 256), name),), {"to": "F32"})


def packed_leaf(rng: np.random.Generator, shape: Shape, name: str) -> Tensor:
    """For samples: a leaf of random numbers of this type."""
    return leaf_of(rng.standard_normal(shape), name)


def leaf_of(numbers: Any, name: str) -> Tensor:
    """A leaf of this type with the numbers of an array, as near as it has them."""
    packed, kind = quantize(np.asarray(numbers, np.float32), name), dtype(name)
    return leaf(packed.view(kind.numpy), dtype=kind)


CPY = op(
    name="cpy",
    ggml=GGMLOp.CPY,
    spec=_cpy_spec,
    ref=lambda x, to: _ref(x, dtype(to)),
    grad=_cpy_grad,
    samples=_cpy_samples,
    refuses={"to": ("I8", "IQ2_XXS", "Q8_K")},
    strided=True,
)
cpu_kernel(CPY, _cpy_run)

# -- cpy_into -----------------------------------------------------------------------------------


def _into_spec(dst: Tensor, x: Tensor) -> Spec:
    if dst.shape != x.shape:
        raise ShapeError(f"cpy: {x!r} goes into {dst!r}, wanted its shape")
    _check_types("cpy", x, dst.dtype)
    return Spec(dst.shape, dst.dtype, dst.strides)


def _into_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """ddst = 0, dx = dy"""
    if I32 in (node.dtype, node.src[1].dtype):
        return None, None
    return zeros(node.shape, F32), dy


def _into_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape, kind in (
        ((1, 1), F32),
        ((3, 8), F16),
        ((2, 3, 5), BF16),
        ((4, 2, 32), dtype("Q5_1")),
    ):
        yield Sample((zeros(shape, kind), rng.standard_normal(shape)))
        yield Sample((rng.standard_normal(shape), rng.standard_normal(shape)))
    yield Sample((np.zeros((3, 5), np.int32), rng.uniform(-9, 9, (3, 5))))
    yield Sample((rng.standard_normal((2, 32)), packed_leaf(rng, (2, 32), "Q4_1")))
    wide = np.zeros((3, 4, 8), np.float16)
    yield Sample((leaf(wide[:, 1:3]), rng.standard_normal((3, 2, 8))))  # heads of a cache


CPY_INTO = op(
    name="cpy_into",
    ggml=GGMLOp.CPY,
    spec=_into_spec,
    ref=lambda dst, x: _ref(x, I32 if dst.dtype.kind == "i" else F32),
    grad=_into_grad,
    samples=_into_samples,
    memory=Memory.ALIAS,
    strided=True,
)
cpu_kernel(CPY_INTO, _cpy_run)
