"""The softmax of rows of scores, forward and backward, in LLVM's vectors.

The formulas are those of pyggml.kernels.attention.softmax. There LLVM chooses the width of vectors;
here probabilities are rounded to bfloat16 while a row's vectors are in registers. Columns that a
query does not see do not count, whatever they hold.

row_top            the largest score
row_exponentials   e^(score − m) as bfloat16, and their sum
row_weights        the same in float32, in place
row_powers         the same where m may be any number near the largest score, or not even that
row_gradients      of two rows, P and dS as bfloat16, as rows and as pairs of rows
raise_maximum      what a higher maximum does to what was summed
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from llvmlite import ir

from pyggml.jit import cgutils, instruction, kernel, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    F32,
    I32,
    I64,
    alternate,
    at,
    broadcast,
    declare_intrinsic,
    every,
    fma,
    load,
    store,
    total,
)
from pyggml.jit.simd import exp32
from pyggml.kernels.attention.softmax import MASKED
from pyggml.kernels.gemm.bfloat16 import convert_bf16, to_bf16

LANES = 16
SCALES = CHOSEN.bf16 and not CHOSEN.neon  # AVX512-BF16, and no tiles
_narrow = convert_bf16 if CHOSEN.tiles or CHOSEN.bf16 else to_bf16
_FLOATS = ir.VectorType(F32, LANES)
_WORDS = ir.VectorType(I32, LANES)

# -- vectors --------------------------------------------------------------------------------------

# As in pyggml.jit.simd: ln 2 in two parts, and (e^r − 1 − r) / r² on |r| <= ln(2)/2.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_SERIES = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
_LOWEST = -87.3  # e^x is 0 below
_TO_INTEGER = 1.5 * 2.0**23  # a small number plus this has the nearest integer in its lowest bits


def _floats(value: float) -> Any:
    return every(_FLOATS, float(np.float32(value)))


def _exp(b: Any, x: Any) -> Any:
    """e^x for x up to about 0, at most 2 ulp; NaN stays NaN."""
    moved = fma(b, x, _floats(_LOG2_E), _floats(_TO_INTEGER))
    n = b.fsub(moved, _floats(_TO_INTEGER))
    r = fma(b, n, _floats(-_LN2_LOW), fma(b, n, _floats(-_LN2_HIGH), x))
    p = _floats(_SERIES[0])
    for factor in _SERIES[1:]:
        p = fma(b, p, r, _floats(factor))
    y = b.fadd(fma(b, p, b.fmul(r, r), r), _floats(1))
    power = b.shl(b.bitcast(moved, _WORDS), every(_WORDS, 23))
    y = b.bitcast(b.add(b.bitcast(y, _WORDS), power), _FLOATS)
    return b.select(b.fcmp_ordered("<", x, _floats(_LOWEST)), _floats(0), y)


# 2^r on |r| <= 1/2, the least relative error for r⁵ … r¹: 9.2e-8.
_POWER_SERIES = 0.001326472725, 0.009671512786, 0.05550733744, 0.2402224208, 0.6931469776


def _scaled_power(b: Any, x: Any) -> Any:
    """2^x for any x, at most 2 ulp, by AVX-512's VSCALEFPS; infinity where that is too large, and
    NaN stays NaN."""
    round_even = declare_intrinsic(b, f"llvm.roundeven.v{LANES}f32", _FLOATS, [_FLOATS])
    n = b.call(round_even, [x])
    r = b.fsub(x, n)
    p = _floats(_POWER_SERIES[0])
    for factor in (*_POWER_SERIES[1:], 1.0):
        p = fma(b, p, r, _floats(factor))
    all_lanes, to_nearest = ir.Constant(ir.IntType(16), -1), I32(4)
    arguments = [p, n, p, all_lanes, to_nearest]
    name = "llvm.x86.avx512.mask.scalef.ps.512"
    scalef = declare_intrinsic(b, name, _FLOATS, [a.type for a in arguments])
    return b.call(scalef, arguments)


# e^x = _power(x · _UNIT)
_UNIT, _power = (_LOG2_E, _scaled_power) if SCALES else (1.0, _exp)


def _in_units(b: Any, number: Any) -> Any:
    """A float32, in all lanes, for `_power`."""
    return broadcast(b, b.fmul(number, F32(float(np.float32(_UNIT)))), _FLOATS)


def _counting(b: Any, i: Any, start: Any, count: Any) -> Any:
    """Which columns of the vector at column i are among the `count` ones from `start` on."""
    order = ir.Constant(_WORDS, list(range(LANES)))
    column = b.add(broadcast(b, b.trunc(b.sub(i, start), I32), _WORDS), order)
    return b.icmp_unsigned("<", column, broadcast(b, b.trunc(count, I32), _WORDS))


@contextmanager
def _vectors(b: Any, n: Any) -> Iterator[Any]:
    """A loop over columns 0, LANES, … below n."""
    with cgutils.for_range_slice(b, I64(0), n, I64(LANES)) as (i, _):
        yield i


def _for_columns(
    b: Any, n: Any, columns: list[tuple[Any, Any]], emit: Callable[[Any, Callable[..., Any]], None]
) -> None:
    """emit(i, seen) for the vector at each column i below n; seen(x, row, other) is x where the
    columns of a row count, from `start` on `count` of them, else `other`. Mostly all do."""
    whole = ir.Constant(ir.IntType(1), 1)
    for start, count in columns:
        from_first = b.icmp_signed("<=", start, I64(0))
        to_last = b.icmp_signed(">=", b.add(start, count), n)
        whole = b.and_(whole, b.and_(from_first, to_last))
    with b.if_else(whole) as (then, otherwise):
        with then, _vectors(b, n) as i:
            emit(i, lambda x, row, other: x)
        with otherwise, _vectors(b, n) as i:
            counts = [_counting(b, i, *each) for each in columns]
            emit(i, lambda x, row, other: b.select(counts[row], x, _floats(other)))


# -- forward --------------------------------------------------------------------------------------


@instruction(types.float32(*(types.intp,) * 4, types.float32))
def row_top(b: Any, s: Any, n: Any, start: Any, count: Any, scale: Any) -> Any:
    """The largest of scale·s over the columns that count."""
    top = cgutils.alloca_once_value(b, _floats(float(MASKED)))
    factor = broadcast(b, scale, _FLOATS)

    def emit(i: Any, seen: Callable[..., Any]) -> None:
        x = seen(b.fmul(load(b, at(b, s, i), _FLOATS), factor), 0, float(MASKED))
        old = b.load(top)
        b.store(b.select(b.fcmp_ordered(">", x, old), x, old), top)

    _for_columns(b, n, [(start, count)], emit)
    name = f"llvm.vector.reduce.fmax.v{LANES}f32"
    return b.call(declare_intrinsic(b, name, F32, [_FLOATS]), [b.load(top)], fastmath=("nnan",))


@instruction(types.float32(*(types.intp,) * 5, types.float32, types.float32))
def row_exponentials(
    b: Any, to: Any, s: Any, n: Any, start: Any, count: Any, scale: Any, top: Any
) -> Any:
    """to = e^(scale·s − top) as bfloat16, 0 in columns that do not count; their sum."""
    added = cgutils.alloca_once_value(b, _floats(0))
    factor, less = broadcast(b, scale, _FLOATS), broadcast(b, b.fneg(top), _FLOATS)
    with _vectors(b, n) as i:
        e = _exp(b, fma(b, load(b, at(b, s, i), _FLOATS), factor, less))
        e = b.select(_counting(b, i, start, count), e, _floats(0))
        b.store(b.fadd(b.load(added), e), added)
        store(b, _narrow(b, e), at(b, to, b.lshr(i, I64(1))))
    return total(b, b.load(added))


@instruction(types.float32(*(types.intp,) * 3, types.float32, types.float32))
def row_weights(b: Any, s: Any, n: Any, count: Any, scale: Any, top: Any) -> Any:
    """s = e^(scale·s − top) in its first `count` columns, 0 in the others; their sum."""
    added = cgutils.alloca_once_value(b, _floats(0))
    factor, less = broadcast(b, scale, _FLOATS), broadcast(b, b.fneg(top), _FLOATS)

    def emit(i: Any, seen: Callable[..., Any]) -> None:
        e = seen(_exp(b, fma(b, load(b, at(b, s, i), _FLOATS), factor, less)), 0, 0)
        b.store(b.fadd(b.load(added), e), added)
        store(b, e, at(b, s, i))

    _for_columns(b, n, [(I64(0), count)], emit)
    return total(b, b.load(added))


_MOST = 2.0**30  # a sum in one lane; bfloat16 and float32 hold such numbers as exactly as others


@instruction(types.boolean(*(types.intp,) * 6, types.float32, types.float32))
def row_powers(
    b: Any, to: Any, s: Any, n: Any, start: Any, count: Any, sums: Any, scale: Any, near: Any
) -> Any:
    """to = e^(scale·s − near) as bfloat16, 0 in columns that do not count, added lane by lane to
    the vector at `sums`; or False, and nothing is added: `near` is too far below a score."""
    added = cgutils.alloca_once_value(b, _floats(0))
    factor, less = _in_units(b, scale), _in_units(b, b.fneg(near))

    def emit(i: Any, seen: Callable[..., Any]) -> None:
        e = _power(b, fma(b, load(b, at(b, s, i), _FLOATS), factor, less))
        e = seen(e, 0, 0)
        b.store(b.fadd(b.load(added), e), added)
        store(b, _narrow(b, e), at(b, to, b.lshr(i, I64(1))))

    _for_columns(b, n, [(start, count)], emit)
    new = b.load(added)
    mask = b.bitcast(b.fcmp_unordered(">", new, _floats(_MOST)), ir.IntType(LANES))
    ok = b.icmp_unsigned("==", mask, ir.Constant(ir.IntType(LANES), 0))
    old = load(b, at(b, sums, I64(0)), _FLOATS)
    store(b, b.select(ok, b.fadd(old, new), old), at(b, sums, I64(0)))
    return ok


@kernel
def raise_maximum(o, m, norm, i, top):
    """Row i's maximum becomes `top`."""
    factor = exp32(m[i] - top)
    norm[i] *= factor
    m[i] = top
    for j in range(o.shape[0]):
        o[j] *= factor


# -- backward -------------------------------------------------------------------------------------


_OF_TWO_ROWS = (
    types.UniTuple(types.int64, 4), types.UniTuple(types.float32, 4),
    types.UniTuple(types.int64, 2),
)  # fmt: skip


@instruction(types.void(*(types.intp,) * 6, *_OF_TWO_ROWS, types.float32))
def row_gradients(
    b: Any, s: Any, dp: Any, ds: Any, p_pairs: Any, ds_pairs: Any, n: Any, columns: Any,
    numbers: Any, strides: Any, scale: Any,
) -> None:  # fmt: skip
    """P = e^(scale·s − lse) and dS = P·(dp − δ) of two rows, 0 in columns that do not count.

    ds: rows of bfloat16; p_pairs, ds_pairs: a row of pairs, one of either row. columns: (start,
    count) of either row; numbers: (lse, δ) of either; strides: from row to row, floats of s and dp
    and bytes of ds.
    """
    columns, numbers = cgutils.unpack_tuple(b, columns), cgutils.unpack_tuple(b, numbers)
    ld_scores, ld_rounded = cgutils.unpack_tuple(b, strides)
    factor = _in_units(b, scale)
    less = [_in_units(b, b.fneg(lse)) for lse in numbers[::2]]
    means = [broadcast(b, delta, _FLOATS) for delta in numbers[1::2]]

    def emit(i: Any, seen: Callable[..., Any]) -> None:
        rounded = []
        for row in (0, 1):
            element = b.add(i, b.mul(ld_scores, I64(row)))
            score, gradient = (load(b, at(b, x, element), _FLOATS) for x in (s, dp))
            p = _power(b, fma(b, score, factor, less[row]))
            product = b.fmul(p, b.fsub(gradient, means[row]))
            rounded.append([_narrow(b, seen(x, row, 0)) for x in (p, product)])
            to = b.add(ds, b.mul(ld_rounded, I64(row)))
            store(b, rounded[row][1], at(b, to, b.lshr(i, I64(1))))
        for values, pairs in zip(zip(*rounded, strict=True), (p_pairs, ds_pairs), strict=True):
            store(b, alternate(b, *values), at(b, pairs, i))

    _for_columns(b, n, [(columns[0], columns[1]), (columns[2], columns[3])], emit)
