"""Helpers to emit LLVM vector code; used wherever kernels are written in LLVM's vectors.

Addresses are integers and nothing is checked: callers must. LLVM splits vectors that exceed a
register, so their width affects speed only.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from pyggml.jit.isa import CHOSEN

_X86 = CHOSEN.byte_pairs or CHOSEN.vnni
_REGISTER = 4 * CHOSEN.lanes  # bytes
F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
_VECTOR_LOAD_ALIGNMENT = 4  # a float's; unaligned vector loads cost nothing extra within a line
_F16_ALIGNMENT = 2


def at(builder: Any, base: Any, element: Any, n: int = 0) -> Any:
    """Pointer to float32 number element + n of the array at integer address `base`."""
    start = builder.inttoptr(base, F32.as_pointer())
    index = builder.add(element, ir.Constant(I64, n)) if n else element
    return builder.gep(start, [index])


def load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = _F16_ALIGNMENT if vector.element == ir.HalfType() else _VECTOR_LOAD_ALIGNMENT
    return loaded


def prefetch(builder: Any, pointer: Any, first: bool = False) -> None:
    """Prefetch the cache line at this address, which may be invalid: to the L2 cache for reading,
    or with `first` to the L1 cache for writing."""
    byte = I8.as_pointer()
    fetch = declare_intrinsic(builder, "llvm.prefetch.p0i8", ir.VoidType(), [byte, I32, I32, I32])
    write, near, data = (ir.Constant(I32, n) for n in ((1, 3, 1) if first else (0, 2, 1)))
    builder.call(fetch, [builder.bitcast(pointer, byte), write, near, data])


def store(builder: Any, value: Any, pointer: Any) -> None:
    stored = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    stored.align = _VECTOR_LOAD_ALIGNMENT


def broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    """A vector with this scalar (a value of LLVM's) in every lane."""
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, every(ir.VectorType(I32, vector.count), 0))


def declare_intrinsic(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The declaration of an LLVM intrinsic in the builder's module."""
    module = builder.module
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


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
        even, odd = (
            ir.Constant(ir.VectorType(I32, n), [2 * i + first for i in range(n)])
            for first in (0, 1)
        )
        vectors = [
            add(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in pairs
        ]
        lanes //= 2
    return concatenate(builder, vectors)


def concatenate(builder: Any, vectors: list[Any]) -> Any:
    """The lanes of 2^k vectors, one after the other."""
    while len(vectors) > 1:
        n = 2 * vectors[0].type.count
        order = ir.Constant(ir.VectorType(I32, n), [*range(n)])
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [builder.shuffle_vector(a, b, order) for a, b in pairs]
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


def by_quads(builder: Any, u: Any, s: Any, sums: Any, vnni: bool) -> Any:
    """sums_i + Σ_{j < 4} u_{4i+j} · s_{4i+j}: int32 sums, unsigned bytes u, signed bytes s.

    With vnni: one VPDPBUSD (AVX512-VNNI).
    """
    n = sums.type.count
    quads = ir.VectorType(I8, 4 * n)
    u, s = builder.bitcast(u, quads), builder.bitcast(s, quads)
    if vnni:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * n}"
        return builder.call(
            declare_intrinsic(builder, name, sums.type, [sums.type, quads, quads]), [sums, u, s]
        )
    wide = ir.VectorType(I32, 4 * n)
    products = builder.mul(builder.zext(u, wide), builder.sext(s, wide))
    for i in range(4):
        mask = ir.Constant(sums.type, [4 * lane + i for lane in range(n)])
        sums = builder.add(sums, builder.shuffle_vector(products, products, mask))
    return sums


def quads(builder: Any, u: Any, s: Any, sums: Any) -> Any:
    """by_quads of any number of bytes, u at most 128: registers one by one, on x86 without VNNI by
    VPMADDUBSW and VPMADDWD."""

    def one(u: Any, s: Any, sums: Any) -> Any:
        if not CHOSEN.byte_pairs:
            return by_quads(builder, u, s, sums, CHOSEN.vnni)
        pairs = ir.VectorType(I16, 2 * sums.type.count)
        ubsw, wd = _PAIR_NAMES[4 * sums.type.count]
        multiply = declare_intrinsic(builder, ubsw, pairs, [u.type, s.type])
        add = declare_intrinsic(builder, wd, sums.type, [pairs, pairs])
        two = builder.call(multiply, [u, s])
        return builder.add(sums, builder.call(add, [two, every(pairs, 1)]))

    return by_registers(builder, one, u, s, sums)


_PAIR_NAMES = {
    16: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    32: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    64: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}


def signed_quads(builder: Any, q: Any, s: Any, sums: Any) -> Any:
    """The same of signed q, by |q| and s with the sign of q; s is above −128."""
    zero = every(q.type, 0)
    is_below = builder.icmp_signed("<", q, zero)
    size = builder.select(is_below, builder.neg(q), q)
    if _REGISTER > 32:
        return quads(builder, size, builder.select(is_below, builder.neg(s), s), sums)

    def sign(s: Any, q: Any) -> Any:
        name = "llvm.x86.avx2.psign.b"
        return builder.call(declare_intrinsic(builder, name, q.type, [q.type, q.type]), [s, q])

    return quads(builder, size, by_registers(builder, sign, s, q), sums)


def lookup16(builder: Any, indices: Any, table: Sequence[int]) -> Any:
    """table[i] of bytes i below 16, by a shuffle of bytes; where there is none, each bit of the
    index halves the remaining table."""

    def one(indices: Any) -> Any:
        n = indices.type.count
        name = _SHUFFLES.get(n) if _X86 else None
        if name:
            shuffle = declare_intrinsic(builder, name, indices.type, [indices.type] * 2)
            rows = ir.Constant(indices.type, [*table] * (n // 16))
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


def by_registers(builder: Any, emit: Callable[..., Any], *vectors: Any) -> Any:
    """emit(*vectors); vectors of more bytes than a register are cut in halves until they fit."""
    n = vectors[0].type.count
    if n <= _REGISTER:
        return emit(*vectors)
    halves = []
    for half in range(2):
        parts = []
        for v in vectors:
            size = v.type.count // 2
            mask = ir.Constant(ir.VectorType(I32, size), [*range(half * size, (half + 1) * size)])
            parts.append(builder.shuffle_vector(v, v, mask))
        halves.append(by_registers(builder, emit, *parts))
    return concatenate(builder, halves)
