"""Register-tiled code that Numba's own loops do not reach, as LLVM vector instructions.

tile_product   C[mr, panel] (+)= Σ_k a[k, mr] ⊗ b[k, panel]: mr·nv vector sums stay in registers;
               strided_product takes a as it lies
dot_tile       out[mr, mr] = x[mr, k] · a[mr, k]ᵀ: no side needs packing
round_row      float32 to bfloat16, and round_two, which pairs two rows
transpose      a lanes × lanes block of float32
call_block     calls a `block_code` function through its address; fetch brings near what it reads

The vectors are LLVM's own types, so the same text becomes AVX-512, AVX2, NEON or SSE code; only the
numbers in pyggml._isa differ.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pyggml._jit import cgutils, intrinsic, types
from pyggml._llvm import (
    F32,
    I8,
    I16,
    I32,
    I64,
    at,
    broadcast,
    declared,
    every,
    fma,
    load,
    prefetch,
    store,
    total,
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


def _dpbf16(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """sums + both products of each pair of bfloat16, by AVX512-BF16's VDPBF16PS."""
    vector = sums.type
    pairs = ir.VectorType(_BFloat(), 2 * vector.count)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * vector.count}"
    dot = declared(builder, name, vector, [vector, pairs, pairs])
    return builder.call(dot, [sums, builder.bitcast(b, pairs), builder.bitcast(a, pairs)])


def _widened_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """The same with float32 arithmetic, on any CPU: a bfloat16 is the upper half of a float32."""
    vector = sums.type
    bits = ir.VectorType(I32, vector.count)
    shift, mask = every(bits, 16), every(bits, 0xFFFF0000)
    a_bits, b_bits = builder.bitcast(a, bits), builder.bitcast(b, bits)
    for take in (lambda x: builder.shl(x, shift), lambda x: builder.and_(x, mask)):
        x, y = (builder.bitcast(take(v), vector) for v in (a_bits, b_bits))
        sums = fma(builder, x, y, sums)
    return sums


def make_tile_product(mr: int, nv: int, lanes: int, pairs: bool, bf16: bool = False) -> Any:
    """The microkernel for one register tile: (a, b, ldb, c, ldc, k, accumulate) -> None.

    a is (k, mr) without gaps, b is (k, nv·lanes) with rows ldb floats apart, c is (mr, nv·lanes)
    with rows ldc apart; a, b, c are addresses. C is overwritten unless accumulate is non-zero.
    With `pairs`, a and b hold two bfloat16 in place of each float; bf16 says that the CPU has
    AVX512-BF16.
    """
    multiply = (_dpbf16 if bf16 else _widened_pairs) if pairs else fma

    @intrinsic
    def tile_product(
        typing: Any, a: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, acc: Any
    ) -> Any:
        signature = types.void(*(types.intp,) * 7)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, *others = arguments
            side = a, ir.Constant(I64, 1), ir.Constant(I64, mr)
            _emit_tile_product(builder, side, others, multiply, (mr, nv), lanes)
            return context.get_dummy_value()

        return signature, codegen

    return tile_product


def make_strided_product(mr: int, nv: int, lanes: int, pairs: bool, bf16: bool = False) -> Any:
    """The same with a's steps from row to row and along k: (a, row_step, step, b, …) -> None."""
    multiply = (_dpbf16 if bf16 else _widened_pairs) if pairs else fma

    @intrinsic
    def strided_product(
        typing: Any, a: Any, row_step: Any, step: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any,
        acc: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(*(types.intp,) * 9)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            side, others = arguments[:3], arguments[3:]
            _emit_tile_product(builder, side, others, multiply, (mr, nv), lanes)
            return context.get_dummy_value()

        return signature, codegen

    return strided_product


_Tile = tuple[int, int]  # mr, nv


def _emit_tile_product(
    builder: Any, side: Any, others: Any, multiply: Any, tile: _Tile, lanes: int
) -> None:
    """side is a and its steps from row to row and along k."""
    b, ldb, c, ldc, k, accumulate = others
    mr, nv = tile
    vector = ir.VectorType(F32, lanes)
    sums = _emit_depth_loop(builder, side, b, ldb, k, multiply, tile, vector)
    summed, plain = builder.append_basic_block("add"), builder.append_basic_block("store")
    done = builder.append_basic_block("done")
    wanted = builder.icmp_signed("!=", accumulate, ir.Constant(I64, 0))
    builder.cbranch(wanted, summed, plain)
    for block, with_old in ((summed, True), (plain, False)):
        builder.position_at_end(block)
        for i in range(mr):
            row = builder.mul(ldc, ir.Constant(I64, i))
            for j in range(nv):
                target = at(builder, c, row, j * vector.count)
                value = sums[i][j]
                if with_old:
                    value = builder.fadd(load(builder, target, vector), value)
                store(builder, value, target)
        builder.branch(done)
    builder.position_at_end(done)


def _emit_depth_loop(
    builder: Any, side: Any, b: Any, ldb: Any, k: Any, multiply: Any, tile: _Tile, vector: Any
) -> list[list[Any]]:
    """The loop over k with all sums in registers; returns them."""
    (a, row_step, a_step), (mr, nv) = side, tile
    entry = builder.block
    loop, after = builder.append_basic_block("depth"), builder.append_basic_block("after")
    zero = ir.Constant(I64, 0)
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(I64)
    step.add_incoming(zero, entry)
    sums = [[builder.phi(vector) for _ in range(nv)] for _ in range(mr)]
    for row in sums:
        for phi in row:
            phi.add_incoming(ir.Constant(vector, [0.0] * vector.count), entry)
    b_row = builder.mul(step, ldb)
    columns = [load(builder, at(builder, b, b_row, j * vector.count), vector) for j in range(nv)]
    a_start = builder.mul(step, a_step)
    news = []
    for i in range(mr):
        place = builder.add(a_start, builder.mul(row_step, ir.Constant(I64, i)))
        scalar = broadcast(builder, builder.load(at(builder, a, place)), vector)
        news.append([multiply(builder, scalar, columns[j], sums[i][j]) for j in range(nv)])
    following = builder.add(step, ir.Constant(I64, 1))
    step.add_incoming(following, loop)
    for row, new in zip(sums, news, strict=True):
        for phi, value in zip(row, new, strict=True):
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, after)
    builder.position_at_end(after)
    return news


def make_dot_tile(mr: int, lanes: int) -> Any:
    """(whole, out, x, ldx, a, lda, k) -> None: out[i, j] = Σ_k x[i, k] a[j, k], j < mr.

    i < mr where `whole`, else i is 0 alone; out has rows of mr; addresses; k in whole vectors.
    """
    vector = ir.VectorType(F32, lanes)

    @intrinsic
    def dot_tile(
        typing: Any, whole: Any, out: Any, x: Any, ldx: Any, a: Any, lda: Any, k: Any
    ) -> Any:
        signature = types.void(types.boolean, *(types.intp,) * 6)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            with builder.if_else(arguments[0]) as (many, one):
                with many:
                    _emit_dot_tile(builder, arguments[1:], mr, mr, vector)
                with one:
                    _emit_dot_tile(builder, arguments[1:], 1, mr, vector)
            return context.get_dummy_value()

        return signature, codegen

    return dot_tile


def _emit_dot_tile(builder: Any, arguments: Any, rows: int, mr: int, vector: Any) -> None:
    """`rows` rows of a dot tile."""
    out, x, ldx, a, lda, k = arguments
    sums = [[cgutils.alloca_once(builder, vector) for _ in range(mr)] for _ in range(rows)]
    for row in sums:
        for one in row:
            builder.store(every(vector, 0.0), one)
    with cgutils.for_range_slice(builder, k.type(0), k, k.type(vector.count)) as (i, _):
        places = [builder.add(i, builder.mul(lda, ir.Constant(I64, j))) for j in range(mr)]
        columns = [load(builder, at(builder, a, place), vector) for place in places]
        for n, row in enumerate(sums):
            place = builder.add(i, builder.mul(ldx, ir.Constant(I64, n)))
            values = load(builder, at(builder, x, place), vector)
            for column, one in zip(columns, row, strict=True):
                builder.store(fma(builder, values, column, builder.load(one)), one)
    for n, row in enumerate(sums):
        for j, one in enumerate(row):
            value = total(builder, builder.load(one))
            store(builder, value, at(builder, out, ir.Constant(I64, n * mr + j)))


def make_transpose(lanes: int) -> Any:
    """(dst, ld_dst, src, ld_src) -> None: dst[j, i] = src[i, j] for a lanes × lanes block.

    log2(lanes) rounds; each interleaves vector i with vector i + lanes/2 (a perfect shuffle).
    """

    @intrinsic
    def transpose(typing: Any, dst: Any, ld_dst: Any, src: Any, ld_src: Any) -> Any:
        signature = types.void(*(types.intp,) * 4)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, ld_to, source, ld_source = arguments
            vector, index = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
            half = lanes // 2
            low = ir.Constant(index, [x for i in range(half) for x in (i, i + lanes)])
            high = ir.Constant(index, [x for i in range(half, lanes) for x in (i, i + lanes)])
            rows = []
            for i in range(lanes):
                offset = builder.mul(ld_source, ir.Constant(I64, i))
                rows.append(load(builder, at(builder, source, offset), vector))
            for _ in range(lanes.bit_length() - 1):
                pairs = [(rows[i], rows[i + half]) for i in range(half)]
                rows = [builder.shuffle_vector(x, y, m) for x, y in pairs for m in (low, high)]
            for i, row in enumerate(rows):
                store(builder, row, at(builder, to, builder.mul(ld_to, ir.Constant(I64, i))))
            return context.get_dummy_value()

        return signature, codegen

    return transpose


def to_bf16(builder: Any, x: Any) -> Any:
    """x rounded to the nearest bfloat16 (ties to even), as int16."""
    bits, halves = ir.VectorType(I32, x.type.count), ir.VectorType(I16, x.type.count)
    raw = builder.bitcast(x, bits)
    odd = builder.and_(builder.lshr(raw, every(bits, 16)), every(bits, 1))
    rounded = builder.add(builder.add(raw, every(bits, 0x7FFF)), odd)
    quiet = builder.or_(raw, every(bits, 0x400000))  # NaN stays NaN
    chosen = builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, every(bits, 16)), halves)


def cvtneps2bf16(builder: Any, x: Any) -> Any:
    """The same by one instruction of AVX512-BF16; denormal numbers become zero."""
    halves = ir.VectorType(_BFloat(), x.type.count)
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * x.type.count}"
    rounded = builder.call(declared(builder, name, halves, [x.type]), [x])
    return builder.bitcast(rounded, ir.VectorType(I16, x.type.count))


def make_round(lanes: int, bf16: bool = False) -> tuple[Any, Any]:
    """Rounding to bfloat16, both (…addresses, n) for n numbers in whole vectors.

    round_row(to, of, n)      n numbers in a row as n / 2 pairs
    round_two(to, a, b, n)    n pairs (a_i, b_i)
    """
    vector = ir.VectorType(F32, lanes)
    beside = ir.Constant(
        ir.VectorType(I32, 2 * lanes), [x for i in range(lanes) for x in (i, lanes + i)]
    )
    narrow = cvtneps2bf16 if bf16 else to_bf16

    def row(builder: Any, i: Any, to: Any, of: Any) -> None:
        half = narrow(builder, load(builder, at(builder, of, i), vector))
        store(builder, half, at(builder, to, builder.lshr(i, ir.Constant(I64, 1))))

    def two(builder: Any, i: Any, to: Any, a: Any, b: Any) -> None:
        low, high = (narrow(builder, load(builder, at(builder, x, i), vector)) for x in (a, b))
        store(builder, builder.shuffle_vector(low, high, beside), at(builder, to, i))

    @intrinsic
    def round_row(typing: Any, to: Any, of: Any, n: Any) -> Any:
        return types.void(*(types.intp,) * 3), _for_vectors(row, lanes)

    @intrinsic
    def round_two(typing: Any, to: Any, a: Any, b: Any, n: Any) -> Any:
        return types.void(*(types.intp,) * 4), _for_vectors(two, lanes)

    return round_row, round_two


def _for_vectors(body: Any, lanes: int) -> Any:
    """Code for: body(builder, i, addresses…) for i in 0, lanes, … below the last argument."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *addresses, n = arguments
        with cgutils.for_range_slice(builder, n.type(0), n, n.type(lanes)) as (i, _):
            body(builder, i, *addresses)
        return context.get_dummy_value()

    return codegen


@intrinsic
def call_block(typing: Any, code: Any, dst: Any, src: Any, n_blocks: Any) -> Any:
    """Call the `block_code` function at address `code` with two addresses and a count."""
    signature = types.void(*(types.intp,) * 4)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, dst, src, n_blocks = arguments
        kind = ir.FunctionType(ir.VoidType(), [F32.as_pointer(), I8.as_pointer(), I64])
        function = builder.inttoptr(address, kind.as_pointer())
        d = builder.inttoptr(dst, F32.as_pointer())
        s = builder.inttoptr(src, I8.as_pointer())
        builder.call(function, [d, s, n_blocks])
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def fetch(typing: Any, source: Any, n_bytes: Any) -> Any:
    """Have n_bytes from this address on, which need not exist, brought near."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, n_bytes = arguments
        step = ir.Constant(I64, 64)
        with cgutils.for_range_slice(builder, step.type(0), n_bytes, step) as (i, _):
            place = builder.inttoptr(builder.add(source, i), I8.as_pointer())
            prefetch(builder, place)
        return context.get_dummy_value()

    return types.void(source, n_bytes), codegen
