"""Register-tiled code that Numba's own loops do not reach, as LLVM vector instructions.

tile_product   C[mr, panel] (+)= Σ_k a[k, mr] ⊗ b[k, panel]: mr·nv vector sums stay in registers
dot_tile       out[mr, mr] = x[mr, k] · a[mr, k]ᵀ: no side needs packing
round_row      float32 to bfloat16, and round_two, which pairs two rows
transpose      a lanes × lanes block of float32
call_block     calls a `block_code` function through its address

The vectors are LLVM's own types, so the same text becomes AVX-512, AVX2, NEON or SSE code; only the
numbers in pyggml.gemm.isa differ. Pointers are integers: nothing is checked, the callers must.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pyggml._jit import cgutils, intrinsic, types

_F32 = ir.FloatType()
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR_LOAD_ALIGNMENT = 4  # a float's; unaligned vector loads cost nothing extra within a line


def _at(builder: Any, base: Any, element: Any, n: int = 0) -> Any:
    """Pointer to float32 number `element` + n of the array that starts at integer address base."""
    start = builder.inttoptr(base, _F32.as_pointer())
    index = builder.add(element, ir.Constant(_I64, n)) if n else element
    return builder.gep(start, [index])


def _load(builder: Any, pointer: Any, vector: Any) -> Any:
    loaded = builder.load(builder.bitcast(pointer, vector.as_pointer()))
    loaded.align = _VECTOR_LOAD_ALIGNMENT
    return loaded


def _store(builder: Any, value: Any, pointer: Any) -> None:
    stored = builder.store(value, builder.bitcast(pointer, value.type.as_pointer()))
    stored.align = _VECTOR_LOAD_ALIGNMENT


def _broadcast(builder: Any, scalar: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    every = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(one, undefined, every)


def _declared(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """The module's declaration of one of LLVM's own functions."""
    module = builder.module
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


def _fma(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """a·b + sums, float32."""
    vector = sums.type
    fma = _declared(builder, f"llvm.fmuladd.v{vector.count}f32", vector, [vector] * 3)
    return builder.call(fma, [a, b, sums])


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
    dot = _declared(builder, name, vector, [vector, pairs, pairs])
    return builder.call(dot, [sums, builder.bitcast(b, pairs), builder.bitcast(a, pairs)])


def _widened_pairs(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """The same with float32 arithmetic, on any CPU: a bfloat16 is the upper half of a float32."""
    vector = sums.type
    bits = ir.VectorType(_I32, vector.count)
    shift, mask = _all(bits, 16), _all(bits, 0xFFFF0000)
    a_bits, b_bits = builder.bitcast(a, bits), builder.bitcast(b, bits)
    for take in (lambda x: builder.shl(x, shift), lambda x: builder.and_(x, mask)):
        x, y = (builder.bitcast(take(v), vector) for v in (a_bits, b_bits))
        sums = _fma(builder, x, y, sums)
    return sums


def _all(vector: Any, value: float) -> Any:
    return ir.Constant(vector, [value] * vector.count)


def make_tile_product(mr: int, nv: int, lanes: int, pairs: bool, bf16: bool = False) -> Any:
    """The microkernel for one register tile: (a, b, ldb, c, ldc, k, accumulate) -> None.

    a is (k, mr) without gaps, b is (k, nv·lanes) with rows ldb floats apart, c is (mr, nv·lanes)
    with rows ldc apart; a, b, c are addresses. C is overwritten unless accumulate is non-zero.
    With `pairs`, a and b hold two bfloat16 in place of each float; bf16 says that the CPU has
    AVX512-BF16.
    """
    multiply = (_dpbf16 if bf16 else _widened_pairs) if pairs else _fma

    @intrinsic
    def tile_product(
        typing: Any, a: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, acc: Any
    ) -> Any:
        signature = types.void(*(types.intp,) * 7)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile_product(builder, arguments, multiply, (mr, nv), ir.VectorType(_F32, lanes))
            return context.get_dummy_value()

        return signature, codegen

    return tile_product


_Tile = tuple[int, int]  # mr, nv


def _emit_tile_product(
    builder: Any, arguments: Any, multiply: Any, tile: _Tile, vector: Any
) -> None:
    a, b, ldb, c, ldc, k, accumulate = arguments
    mr, nv = tile
    sums = _emit_depth_loop(builder, a, b, ldb, k, multiply, tile, vector)
    add, store = builder.append_basic_block("add"), builder.append_basic_block("store")
    done = builder.append_basic_block("done")
    wanted = builder.icmp_signed("!=", accumulate, ir.Constant(_I64, 0))
    builder.cbranch(wanted, add, store)
    for block, with_old in ((add, True), (store, False)):
        builder.position_at_end(block)
        for i in range(mr):
            row = builder.mul(ldc, ir.Constant(_I64, i))
            for j in range(nv):
                target = _at(builder, c, row, j * vector.count)
                value = sums[i][j]
                if with_old:
                    value = builder.fadd(_load(builder, target, vector), value)
                _store(builder, value, target)
        builder.branch(done)
    builder.position_at_end(done)


def _emit_depth_loop(
    builder: Any, a: Any, b: Any, ldb: Any, k: Any, multiply: Any, tile: _Tile, vector: Any
) -> list[list[Any]]:
    """The loop over k with all sums in registers; returns them."""
    mr, nv = tile
    entry = builder.block
    loop, after = builder.append_basic_block("depth"), builder.append_basic_block("after")
    zero = ir.Constant(_I64, 0)
    builder.branch(loop)
    builder.position_at_end(loop)
    step = builder.phi(_I64)
    step.add_incoming(zero, entry)
    sums = [[builder.phi(vector) for _ in range(nv)] for _ in range(mr)]
    for row in sums:
        for phi in row:
            phi.add_incoming(ir.Constant(vector, [0.0] * vector.count), entry)
    b_row = builder.mul(step, ldb)
    columns = [_load(builder, _at(builder, b, b_row, j * vector.count), vector) for j in range(nv)]
    a_row = builder.mul(step, ir.Constant(_I64, mr))
    news = []
    for i in range(mr):
        scalar = _broadcast(builder, builder.load(_at(builder, a, a_row, i)), vector)
        news.append([multiply(builder, scalar, columns[j], sums[i][j]) for j in range(nv)])
    following = builder.add(step, ir.Constant(_I64, 1))
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
    vector = ir.VectorType(_F32, lanes)

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
        for total in row:
            builder.store(_all(vector, 0.0), total)
    with cgutils.for_range_slice(builder, k.type(0), k, k.type(vector.count)) as (i, _):
        at = [builder.add(i, builder.mul(lda, ir.Constant(_I64, j))) for j in range(mr)]
        columns = [_load(builder, _at(builder, a, place), vector) for place in at]
        for n, row in enumerate(sums):
            place = builder.add(i, builder.mul(ldx, ir.Constant(_I64, n)))
            values = _load(builder, _at(builder, x, place), vector)
            for column, total in zip(columns, row, strict=True):
                builder.store(_fma(builder, values, column, builder.load(total)), total)
    name = f"llvm.vector.reduce.fadd.v{vector.count}f32"
    add = _declared(builder, name, _F32, [_F32, vector])
    for n, row in enumerate(sums):
        for j, total in enumerate(row):
            start = [ir.Constant(_F32, 0.0), builder.load(total)]
            value = builder.call(add, start, fastmath=("reassoc",))
            builder.store(value, _at(builder, out, ir.Constant(_I64, n * mr + j)))


def make_transpose(lanes: int) -> Any:
    """(dst, ld_dst, src, ld_src) -> None: dst[j, i] = src[i, j] for a lanes × lanes block.

    log2(lanes) rounds; each interleaves vector i with vector i + lanes/2 (a perfect shuffle).
    """

    @intrinsic
    def transpose(typing: Any, dst: Any, ld_dst: Any, src: Any, ld_src: Any) -> Any:
        signature = types.void(*(types.intp,) * 4)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, ld_to, source, ld_source = arguments
            vector, index = ir.VectorType(_F32, lanes), ir.VectorType(_I32, lanes)
            half = lanes // 2
            low = ir.Constant(index, [x for i in range(half) for x in (i, i + lanes)])
            high = ir.Constant(index, [x for i in range(half, lanes) for x in (i, i + lanes)])
            rows = []
            for i in range(lanes):
                offset = builder.mul(ld_source, ir.Constant(_I64, i))
                rows.append(_load(builder, _at(builder, source, offset), vector))
            for _ in range(lanes.bit_length() - 1):
                pairs = [(rows[i], rows[i + half]) for i in range(half)]
                rows = [builder.shuffle_vector(x, y, m) for x, y in pairs for m in (low, high)]
            for i, row in enumerate(rows):
                _store(builder, row, _at(builder, to, builder.mul(ld_to, ir.Constant(_I64, i))))
            return context.get_dummy_value()

        return signature, codegen

    return transpose


def _to_bf16(builder: Any, x: Any) -> Any:
    """x rounded to the nearest bfloat16 (ties to even), as int16."""
    bits, halves = ir.VectorType(_I32, x.type.count), ir.VectorType(_I16, x.type.count)
    raw = builder.bitcast(x, bits)
    odd = builder.and_(builder.lshr(raw, _all(bits, 16)), _all(bits, 1))
    rounded = builder.add(builder.add(raw, _all(bits, 0x7FFF)), odd)
    quiet = builder.or_(raw, _all(bits, 0x400000))  # NaN stays NaN
    chosen = builder.select(builder.fcmp_unordered("uno", x, x), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, _all(bits, 16)), halves)


def _cvtneps2bf16(builder: Any, x: Any) -> Any:
    """The same by one instruction of AVX512-BF16; denormal numbers become zero."""
    halves = ir.VectorType(_BFloat(), x.type.count)
    name = f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * x.type.count}"
    rounded = builder.call(_declared(builder, name, halves, [x.type]), [x])
    return builder.bitcast(rounded, ir.VectorType(_I16, x.type.count))


def make_round(lanes: int, bf16: bool = False) -> tuple[Any, Any]:
    """Rounding to bfloat16, both (…addresses, n) for n numbers in whole vectors.

    round_row(to, of, n)      n numbers in a row as n / 2 pairs
    round_two(to, a, b, n)    n pairs (a_i, b_i)
    """
    vector = ir.VectorType(_F32, lanes)
    beside = ir.Constant(
        ir.VectorType(_I32, 2 * lanes), [x for i in range(lanes) for x in (i, lanes + i)]
    )
    to_bf16 = _cvtneps2bf16 if bf16 else _to_bf16

    def row(builder: Any, i: Any, to: Any, of: Any) -> None:
        half = to_bf16(builder, _load(builder, _at(builder, of, i), vector))
        _store(builder, half, _at(builder, to, builder.lshr(i, ir.Constant(_I64, 1))))

    def two(builder: Any, i: Any, to: Any, a: Any, b: Any) -> None:
        low, high = (to_bf16(builder, _load(builder, _at(builder, x, i), vector)) for x in (a, b))
        _store(builder, builder.shuffle_vector(low, high, beside), _at(builder, to, i))

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
        kind = ir.FunctionType(ir.VoidType(), [_F32.as_pointer(), _I8.as_pointer(), _I64])
        function = builder.inttoptr(address, kind.as_pointer())
        d = builder.inttoptr(dst, _F32.as_pointer())
        s = builder.inttoptr(src, _I8.as_pointer())
        builder.call(function, [d, s, n_blocks])
        return context.get_dummy_value()

    return signature, codegen
