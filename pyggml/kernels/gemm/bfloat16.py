"""bfloat16 in LLVM's vectors: rounding to it, and the inner product of pairs.

dot_pairs, dot_widened_pairs   sums + the two products of each pair, by the CPU or in float32
multiply_matrices              sums (2, 2) + the products of two rows and two columns (NEON)
convert_bf16, to_bf16          float32 to the nearest bfloat16, by the CPU or in integers
make_round                     intrinsics that round rows of numbers
make_pair                      one that makes pairs of two rows of bfloat16
make_rounded_words             words of a row of numbers, each of two, rounded

A bfloat16 is the upper half of a float32. A pair of them, neighbours along the depth of a product,
fills a word of 32 bits.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from pyggml.jit import cgutils, instruction, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import (
    I16,
    I32,
    I64,
    alternate,
    at,
    concatenate,
    declare_intrinsic,
    every,
    fma,
    load,
    store,
)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no annotations
    """LLVM's bfloat, which llvmlite lacks."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


# -- inner products -------------------------------------------------------------------------------


def dot_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums + both products of each pair, by AVX512-BF16's VDPBF16PS or NEON's BFDOT."""
    vector = sums.type
    pairs = ir.VectorType(_BFloat(), 2 * vector.count)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * vector.count}"
    if CHOSEN.neon:
        name = f"llvm.aarch64.neon.bfdot.v{vector.count}f32.v{pairs.count}bf16"
    dot = declare_intrinsic(builder, name, vector, [vector, pairs, pairs])
    return builder.call(dot, [sums, builder.bitcast(b, pairs), builder.bitcast(a, pairs)])


def multiply_matrices(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums (2, 2) + a (2, 4) · b (2, 4)ᵀ of bfloat16, by NEON's BFMMLA."""
    vector, numbers = sums.type, ir.VectorType(_BFloat(), 8)
    name = "llvm.aarch64.neon.bfmmla"
    multiply = declare_intrinsic(builder, name, vector, [vector, numbers, numbers])
    return builder.call(multiply, [sums, builder.bitcast(a, numbers), builder.bitcast(b, numbers)])


def dot_widened_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """The same with float32 arithmetic, on any CPU."""
    vector = sums.type
    bits = ir.VectorType(I32, vector.count)
    shift, mask = every(bits, 16), every(bits, 0xFFFF0000)
    a_bits, b_bits = builder.bitcast(a, bits), builder.bitcast(b, bits)
    for take in (lambda x: builder.shl(x, shift), lambda x: builder.and_(x, mask)):
        x, y = (builder.bitcast(take(v), vector) for v in (a_bits, b_bits))
        sums = fma(builder, x, y, sums)
    return sums


# -- rounding -------------------------------------------------------------------------------------


def to_bf16(builder: Any, x: Any) -> Any:
    """x rounded to the nearest bfloat16 (ties to even), as int16."""
    words, shorts = ir.VectorType(I32, x.type.count), ir.VectorType(I16, x.type.count)
    bits = builder.bitcast(x, words)
    odd = builder.and_(builder.lshr(bits, every(words, 16)), every(words, 1))
    rounded = builder.add(builder.add(bits, every(words, 0x7FFF)), odd)
    quiet = builder.or_(bits, every(words, 0x400000))  # NaN stays NaN
    chosen = builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, every(words, 16)), shorts)


def convert_bf16(builder: Any, x: Any) -> Any:
    """The same by one instruction, of AVX512-BF16, where denormal numbers become zero, or NEON."""
    numbers = ir.VectorType(_BFloat(), x.type.count)
    if CHOSEN.neon:
        return builder.bitcast(builder.fptrunc(x, numbers), ir.VectorType(I16, x.type.count))
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * x.type.count}"
    rounded = builder.call(declare_intrinsic(builder, name, numbers, [x.type]), [x])
    return builder.bitcast(rounded, ir.VectorType(I16, x.type.count))


def make_round(lanes: int, bf16: bool = False) -> tuple[Any, Any]:
    """Rounding to bfloat16, both (…addresses, n) for n numbers in whole vectors.

    round_row(to, of, n)      n numbers in a row as n / 2 pairs
    round_two(to, a, b, n)    n pairs (a_i, b_i)

    bf16 says that the CPU has an instruction for it.
    """
    narrow = convert_bf16 if bf16 else to_bf16

    @instruction(types.void(*(types.intp,) * 3))
    def round_row(builder: Any, to: Any, of: Any, n: Any) -> None:
        with _vectors(builder, n, lanes) as (i, _):
            numbers = _load_rounded(builder, i, of, lanes, narrow)
            store(builder, numbers, at(builder, to, builder.lshr(i, ir.Constant(I64, 1))))

    @instruction(types.void(*(types.intp,) * 4))
    def round_two(builder: Any, to: Any, a: Any, b: Any, n: Any) -> None:
        with _vectors(builder, n, lanes) as (i, _):
            first, second = (_load_rounded(builder, i, x, lanes, narrow) for x in (a, b))
            store(builder, alternate(builder, first, second), at(builder, to, i))

    return round_row, round_two


def make_pair(lanes: int) -> Any:
    """pair_two(to, a, b, n): n pairs (a_i, b_i) of rows of bfloat16, in whole vectors."""

    @instruction(types.void(*(types.intp,) * 4))
    def pair_two(builder: Any, to: Any, a: Any, b: Any, n: Any) -> None:
        shorts, words = ir.VectorType(I16, lanes), ir.VectorType(I32, lanes)
        with _vectors(builder, n, lanes) as (i, _):
            start = builder.lshr(i, ir.Constant(I64, 1))  # lanes is even, so whole words
            low, high = (
                builder.zext(load(builder, at(builder, row, start), shorts), words)
                for row in (a, b)
            )
            high = builder.shl(high, every(words, 16))
            store(builder, builder.or_(low, high), at(builder, to, i))

    return pair_two


def make_rounded_words(bf16: bool) -> Callable[..., Any]:
    """words(builder, pointer, vector): the next numbers of a row, rounded, as words of pairs."""
    narrow = convert_bf16 if bf16 else to_bf16

    def words(builder: Any, pointer: Any, vector: Any) -> Any:
        n = vector.count
        after = builder.gep(pointer, [ir.Constant(I64, n)])
        both = [narrow(builder, load(builder, each, vector)) for each in (pointer, after)]
        return builder.bitcast(concatenate(builder, both), vector)

    return words


def _load_rounded(builder: Any, i: Any, of: Any, lanes: int, narrow: Any) -> Any:
    """A vector of numbers from number i of the array at an address, rounded."""
    vector = ir.VectorType(ir.FloatType(), lanes)
    return narrow(builder, load(builder, at(builder, of, i), vector))


def _vectors(builder: Any, n: Any, lanes: int) -> Any:
    """A loop over i of 0, lanes, … below n."""
    return cgutils.for_range_slice(builder, n.type(0), n, n.type(lanes))
