"""Helpers to emit LLVM vector code; used wherever kernels are written in LLVM's vectors.

Addresses are integers and nothing is checked: callers must. LLVM splits vectors that exceed a
register, so their width affects speed only.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core.typing import Signature
from numba.extending import intrinsic

from pyggml.jit.isa import CHOSEN

_X86 = CHOSEN.byte_pairs or CHOSEN.vnni
_REGISTER = 4 * CHOSEN.lanes  # bytes
# Signed weights are multiplied as q + OFFSET: x86 wants one factor unsigned.
OFFSET = 0 if CHOSEN.neon else 128
_TAKES_BYTES = llvm_version_info[0] >= 22  # VPDPBUSD's intrinsic: words of four before
F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
_VECTOR_LOAD_ALIGNMENT = 4  # a float's; unaligned vector loads cost nothing extra within a line
_F16_ALIGNMENT = 2


def instruction(
    signature: Signature | Callable[..., Signature], n_constants: int = 0
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: kernels may call a function whose code emit(builder, *arguments) writes, which
    returns a value, or None if there is none.

    signature     in Numba's types, or a function of the types of the arguments
    n_constants   the first arguments, numbers that calls write down: emit gets them as they are
    """

    def declare(emit: Callable[..., Any]) -> Any:
        @wraps(emit)
        def typing(_: Any, *kinds: Any) -> Any:
            constants = [kind.literal_value for kind in kinds[:n_constants]]

            def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                result = emit(builder, *constants, *arguments[n_constants:])
                return context.get_dummy_value() if result is None else result

            own = kinds[n_constants:]
            of = signature if isinstance(signature, Signature) else signature(*own)
            return of.return_type(*kinds[:n_constants], *of.args), codegen

        return intrinsic(prefer_literal=n_constants > 0)(typing)

    return declare


def at(builder: Any, base: Any, element: Any, n: int = 0) -> Any:
    """Pointer to float32 number element + n of the array at integer address `base`."""
    start = builder.inttoptr(base, F32.as_pointer())
    index = builder.add(element, ir.Constant(I64, n)) if n else element
    return builder.gep(start, [index])


def load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = _F16_ALIGNMENT if vector.element == ir.HalfType() else _VECTOR_LOAD_ALIGNMENT
    return loaded


def prefetch(builder: Any, pointer: Any, first: bool = False, cache: int = 2) -> None:
    """Prefetch the cache line at this address, which may be invalid: to the L2 cache for reading,
    or to another one, as LLVM numbers them; or with `first` to the L1 cache for writing."""
    byte = I8.as_pointer()
    fetch = declare_intrinsic(builder, "llvm.prefetch.p0i8", ir.VoidType(), [byte, I32, I32, I32])
    write, near, data = (ir.Constant(I32, n) for n in ((1, 3, 1) if first else (0, cache, 1)))
    builder.call(fetch, [builder.bitcast(pointer, byte), write, near, data])


def store(builder: Any, value: Any, pointer: Any) -> None:
    stored = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    stored.align = _VECTOR_LOAD_ALIGNMENT


def shuffle(builder: Any, order: Iterable[int], one: Any, other: Any = None) -> Any:
    """The lanes with these numbers of a vector, or of two, one after the other."""
    lanes = [int(i) for i in order]
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(one, one if other is None else other, mask)


def alternate(builder: Any, one: Any, other: Any) -> Any:
    """The lanes of two vectors in turns."""
    n = one.type.count
    return shuffle(builder, (x for i in range(n) for x in (i, n + i)), one, other)


def broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector with this scalar (a value of LLVM's) in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, every(ir.VectorType(I32, vector.count), 0))


def each_in_all_lanes(builder: Any, base: Any, first: Any, n: int) -> Callable[[int, Any], Any]:
    """A function of (i, vector): word first + i of the n at integer address `base`, in every lane.

    NEON multiplies by one lane of a register as well as by all, so there four are loaded at once.
    """
    four, loaded = ir.VectorType(F32, 4), dict[int, Any]()

    def word(i: int, vector: Any) -> Any:
        if not CHOSEN.neon or i >= n // 4 * 4:
            here = builder.bitcast(at(builder, base, first, i), vector.element.as_pointer())
            return broadcast(builder, builder.load(here), vector)
        if i // 4 not in loaded:
            loaded[i // 4] = load(builder, at(builder, base, first, i // 4 * 4), four)
        words = builder.bitcast(loaded[i // 4], ir.VectorType(vector.element, 4))
        return builder.shuffle_vector(words, words, every(ir.VectorType(I32, vector.count), i % 4))

    return word


def declare_intrinsic(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The declaration of an LLVM intrinsic in the builder's module."""
    module = builder.module
    declared = module.globals.get(name)
    return declared or ir.Function(module, ir.FunctionType(result, arguments), name)


def total(builder: Any, values: Any) -> Any:
    """The sum of a float32 vector's lanes."""
    name = f"llvm.vector.reduce.fadd.v{values.type.count}f32"
    add = declare_intrinsic(builder, name, F32, [F32, values.type])
    return builder.call(add, [ir.Constant(F32, 0.0), values], fastmath=("reassoc",))


def totals(builder: Any, vectors: list[Any], add: Callable[..., Any] | None = None) -> Any:
    """The sums of the lanes of 2^k vectors, float32 unless `add` is another addition, as one vector
    of 2^k sums."""
    add, lanes = add or builder.fadd, vectors[0].type.count  # partial sums left for each vector
    while lanes > 1:
        pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
        n = vectors[0].type.count if len(vectors) > 1 else vectors[0].type.count // 2
        even, odd = (range(first, 2 * n, 2) for first in (0, 1))
        vectors = [add(shuffle(builder, even, *two), shuffle(builder, odd, *two)) for two in pairs]
        lanes //= 2
    return concatenate(builder, vectors)


def concatenate(builder: Any, vectors: list[Any]) -> Any:
    """The lanes of 2^k vectors, one after the other."""
    while len(vectors) > 1:
        order = range(2 * vectors[0].type.count)
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [shuffle(builder, order, *two) for two in pairs]
    return vectors[0]


def fma(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """a·b + sums, float32."""
    vector = sums.type
    name = f"llvm.fmuladd.v{vector.count}f32"
    return builder.call(declare_intrinsic(builder, name, vector, [vector] * 3), [a, b, sums])


def from_f16(builder: Any, f16: Any, floats: Any) -> Any:
    """float16 → float32, for a scalar or a vector; `floats` is the type of the result.

    Without the instruction LLVM would call a function of libgcc, which a process may lack.
    """
    if CHOSEN.f16:
        return builder.fpext(f16, floats)
    count = getattr(floats, "count", 0)
    short, word = (ir.VectorType(i, count) if count else i for i in (I16, I32))

    def number(kind: Any, value: float) -> Any:
        return every(kind, value) if count else ir.Constant(kind, value)

    bits = builder.zext(builder.bitcast(f16, short), word)
    sign = builder.shl(builder.and_(bits, number(word, 0x8000)), number(word, 16))
    size = builder.shl(builder.and_(bits, number(word, 0x7FFF)), number(word, 13))
    scaled = builder.fmul(builder.bitcast(size, floats), number(floats, 2.0**112))  # 127 − 15
    finite = builder.icmp_unsigned("<", size, number(word, 0x1F << 23))
    endless = builder.or_(size, number(word, 0xFF << 23))
    bits = builder.select(finite, builder.bitcast(scaled, word), endless)
    return builder.bitcast(builder.or_(bits, sign), floats)


def every(vector: Any, value: float) -> Any:
    """A vector with this Python number in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def by_quads(builder: Any, u: Any, s: Any, sums: Any) -> Any:
    """sums_i + Σ_{j < 4} u_{4i+j} · s_{4i+j}: int32 sums, signed bytes s above −128, bytes u, which
    are unsigned, but signed on NEON (see OFFSET).

    One VPDPBUSD (VNNI), or one SDOT (NEON's dotprod) a register.
    """
    n = sums.type.count
    quads = ir.VectorType(I8, 4 * n)
    u, s = builder.bitcast(u, quads), builder.bitcast(s, quads)
    if CHOSEN.neon:
        return by_registers(builder, _signed_four, u, s, sums)
    if CHOSEN.vnni:
        return by_registers(builder, _unsigned_four, u, s, sums)
    wide = ir.VectorType(I32, 4 * n)
    products = builder.mul(builder.zext(u, wide), builder.sext(s, wide))
    for i in range(4):
        sums = builder.add(sums, shuffle(builder, range(i, 4 * n, 4), products))
    return sums


def _unsigned_four(builder: Any, u: Any, s: Any, sums: Any) -> Any:
    """by_quads of one register of x86: AVX512-VNNI's VPDPBUSD or AVX-VNNI's, which LLVM chooses."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.type.count}"
    kind = u.type if _TAKES_BYTES else sums.type
    add = declare_intrinsic(builder, name, sums.type, [sums.type, kind, kind])
    return builder.call(add, [sums, builder.bitcast(u, kind), builder.bitcast(s, kind)])


def _signed_four(builder: Any, q: Any, s: Any, sums: Any) -> Any:
    """by_quads of one register of NEON. Without SDOT products of 16 bits are added in pairs, and
    these in pairs: SMULL, SMULL2, ADDP, SADALP."""
    if CHOSEN.sdot:
        return _four(builder, "sdot", q, s, sums)
    n = sums.type.count
    wide, pairs = (ir.VectorType(I16, size * n) for size in (4, 2))
    products = builder.mul(builder.sext(q, wide), builder.sext(s, wide))
    halves = [shuffle(builder, half, products) for half in (range(2 * n), range(2 * n, 4 * n))]
    neon = "llvm.aarch64.neon"
    add = declare_intrinsic(builder, f"{neon}.addp.v{2 * n}i16", pairs, [pairs, pairs])
    widen = f"{neon}.saddlp.v{n}i32.v{2 * n}i16"
    widen = declare_intrinsic(builder, widen, sums.type, [pairs])
    return builder.add(sums, builder.call(widen, [builder.call(add, halves)]))


def _four(builder: Any, name: str, a: Any, b: Any, sums: Any) -> Any:
    """An instruction of NEON that adds products of bytes to a register of 32-bit sums."""
    kinds = [sums.type, a.type, b.type]
    name = f"llvm.aarch64.neon.{name}.v{sums.type.count}i32.v{a.type.count}i8"
    return builder.call(declare_intrinsic(builder, name, sums.type, kinds), [sums, a, b])


def multiply_bytes(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums (2, 2) + a (2, 8) · b (2, 8)ᵀ of signed bytes: SMMLA (NEON's i8mm)."""
    numbers = ir.VectorType(I8, 16)
    a, b = builder.bitcast(a, numbers), builder.bitcast(b, numbers)
    return _four(builder, "smmla", a, b, sums)


def quads(builder: Any, u: Any, s: Any, sums: Any) -> Any:
    """by_quads of any number of unsigned bytes u up to MOST_UNSIGNED: registers one by one, on x86
    without VNNI by VPMADDUBSW and VPMADDWD, on NEON with i8mm by USDOT."""

    def one(builder: Any, u: Any, s: Any, sums: Any) -> Any:
        if CHOSEN.i8mm:
            return _four(builder, "usdot", u, s, sums)
        if not CHOSEN.byte_pairs:
            return by_quads(builder, u, s, sums)
        return builder.add(sums, widened_pairs(builder, sixteen_bit_sums(builder, u, s, None)))

    return by_registers(builder, one, u, s, sums)


def sixteen_bit_sums(builder: Any, u: Any, s: Any, sums: Any | None) -> Any:
    """sums_i + Σ_{j < 2} u_{2i+j} · s_{2i+j} in 16 bits, which must hold it; a register of x86."""
    pairs = ir.VectorType(I16, u.type.count // 2)
    name, _ = _PAIR_NAMES[u.type.count]
    two = builder.call(declare_intrinsic(builder, name, pairs, [u.type, s.type]), [u, s])
    return builder.add(sums, two) if sums else two


def widened_pairs(builder: Any, sums: Any) -> Any:
    """The sums of neighbours of a register of 16-bit numbers, in 32 bits."""
    words = ir.VectorType(I32, sums.type.count // 2)
    _, name = _PAIR_NAMES[2 * sums.type.count]
    add = declare_intrinsic(builder, name, words, [sums.type, sums.type])
    return builder.call(add, [sums, every(sums.type, 1)])


def in_order(builder: Any, vectors: list[Any]) -> list[Any]:
    """The vectors, at most 12 registers of x86, through an empty line of assembly: LLVM computes
    all of them before what is made of them. Where registers are few, it would else take a tile row
    by row, and spill what all rows share."""
    kind, n = vectors[0].type, len(vectors)
    names = ",".join(["=x"] * n + [str(i) for i in range(n)])
    form = ir.FunctionType(ir.LiteralStructType([kind] * n), [kind] * n)
    all_of_them = builder.asm(form, "", names, vectors, side_effect=False)
    return [builder.extract_value(all_of_them, i) for i in range(n)]


# Sums of pairs have 16 bits. NEON's SDOT multiplies signed bytes alone; USDOT could take more, but
# no type's weights are cheaper to read so.
MOST_UNSIGNED = 128 if CHOSEN.byte_pairs else 127 if CHOSEN.neon else 255

_PAIR_NAMES = {
    16: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    32: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    64: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}


def signed_quads(builder: Any, q: Any, s: Any, sums: Any) -> Any:
    """The same of signed q, on x86 by |q| and s with the sign of q; s is above −128."""
    if CHOSEN.neon:
        return by_quads(builder, q, s, sums)
    zero = every(q.type, 0)
    is_below = builder.icmp_signed("<", q, zero)
    size = builder.select(is_below, builder.neg(q), q)
    if _REGISTER > 32:
        return quads(builder, size, builder.select(is_below, builder.neg(s), s), sums)

    def sign(builder: Any, s: Any, q: Any) -> Any:
        name = "llvm.x86.avx2.psign.b"
        return builder.call(declare_intrinsic(builder, name, q.type, [q.type, q.type]), [s, q])

    return quads(builder, size, by_registers(builder, sign, s, q), sums)


def lookup16(builder: Any, indices: Any, table: Sequence[int]) -> Any:
    """table[i] of bytes i below 16, by a shuffle of bytes; where there is none, each bit of the
    index halves the remaining table."""

    def one(builder: Any, indices: Any) -> Any:
        n = indices.type.count
        name = f"llvm.aarch64.neon.tbl1.v{n}i8" if CHOSEN.neon else _SHUFFLES.get(n)
        if name and (_X86 or CHOSEN.neon):
            rows = ir.Constant(ir.VectorType(I8, max(n, 16)), [*table] * max(n // 16, 1))
            shuffle = declare_intrinsic(builder, name, indices.type, [rows.type, indices.type])
            return builder.call(shuffle, [rows, indices])
        left = [every(indices.type, v) for v in table]
        for bit in range(4):
            masked = builder.and_(indices, every(indices.type, 1 << bit))
            is_set = builder.icmp_unsigned("!=", masked, every(indices.type, 0))
            pairs = zip(left[::2], left[1::2], strict=True)
            left = [builder.select(is_set, odd, even) for even, odd in pairs]
        return left[0]

    return by_registers(builder, one, indices)


_SHUFFLES = {
    16: "llvm.x86.ssse3.pshuf.b.128",
    32: "llvm.x86.avx2.pshuf.b",
    64: "llvm.x86.avx512.pshuf.b.512",
}


def where_set(builder: Any, bits: Any, value: int) -> Any:
    """Bytes: `value` where a bit of an integer is 1, else 0; lowest bit first."""
    n = bits.type.width
    kind = ir.VectorType(I8, n)
    if CHOSEN.neon and n % 8 == 0:
        few = builder.bitcast(bits, ir.VectorType(I8, n // 8))
        eight = shuffle(builder, (i // 8 for i in range(n)), few)
        return by_registers(builder, partial(_own_bits, value=value), eight)
    is_set = builder.bitcast(bits, ir.VectorType(ir.IntType(1), n))
    return builder.select(is_set, every(kind, value), every(kind, 0))


def _own_bits(builder: Any, eight: Any, value: int) -> Any:
    """where_set of bytes that lie eight times each. NEON has no register of bits: each lane moves
    its own to where `value` has one, or tests it."""
    kind, n = eight.type, eight.type.count
    if value.bit_count() == 1:
        shifts = ir.Constant(kind, [value.bit_length() - 1 - i % 8 for i in range(n)])
        name = f"llvm.aarch64.neon.ushl.v{n}i8"
        shift = declare_intrinsic(builder, name, kind, [kind, kind])
        return builder.and_(builder.call(shift, [eight, shifts]), every(kind, value))
    masked = builder.and_(eight, ir.Constant(kind, [1 << i % 8 for i in range(n)]))
    is_set = builder.sext(builder.icmp_unsigned("!=", masked, every(kind, 0)), kind)
    return builder.and_(is_set, every(kind, value))


def by_registers(builder: Any, emit: Callable[..., Any], *vectors: Any) -> Any:
    """emit(builder, *vectors); vectors of more bytes than a register are halved until they fit."""
    n = vectors[0].type.count
    if n <= _REGISTER:
        return emit(builder, *vectors)
    halves = []
    for half in range(2):
        parts = []
        for v in vectors:
            size = v.type.count // 2
            parts.append(shuffle(builder, range(half * size, (half + 1) * size), v))
        halves.append(by_registers(builder, emit, *parts))
    return concatenate(builder, halves)
