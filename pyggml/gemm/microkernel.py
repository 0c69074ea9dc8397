"""Register-tiled code that Numba's own loops do not reach, as LLVM vector instructions.

tile_product   C[mr, panel] (+)= Σ_k a[k, mr] ⊗ b[k, panel]: mr·nv vector sums stay in registers
transpose      a lanes × lanes block of float32
call_block     calls a `block_code` function through its address

The vectors are LLVM's own types, so the same text becomes AVX-512, AVX2, NEON or SSE code; only the
numbers in pyggml.gemm.isa differ. Pointers are integers: nothing is checked, the callers must.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from pyggml._jit import intrinsic, types

_F32 = ir.FloatType()
_I8 = ir.IntType(8)
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


def _fma(builder: Any, vector: Any) -> Any:
    name = f"llvm.fmuladd.v{vector.count}f32"
    signature = ir.FunctionType(vector, [vector] * 3)
    module = builder.module
    known = module.globals.get(name)
    return known or ir.Function(module, signature, name)


def make_tile_product(mr: int, nv: int, lanes: int) -> Any:
    """The microkernel for one register tile: (a, b, ldb, c, ldc, k, accumulate) -> None.

    a is (k, mr) without gaps, b is (k, nv·lanes) with rows ldb floats apart, c is (mr, nv·lanes)
    with rows ldc apart; a, b, c are addresses. C is overwritten unless accumulate is non-zero.
    """

    @intrinsic
    def tile_product(
        typing: Any, a: Any, b: Any, ldb: Any, c: Any, ldc: Any, k: Any, acc: Any
    ) -> Any:
        signature = types.void(*(types.intp,) * 7)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            _emit_tile_product(builder, arguments, (mr, nv), ir.VectorType(_F32, lanes))
            return context.get_dummy_value()

        return signature, codegen

    return tile_product


_Tile = tuple[int, int]  # mr, nv


def _emit_tile_product(builder: Any, arguments: Any, tile: _Tile, vector: Any) -> None:
    a, b, ldb, c, ldc, k, accumulate = arguments
    mr, nv = tile
    sums = _emit_depth_loop(builder, a, b, ldb, k, tile, vector)
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
    builder: Any, a: Any, b: Any, ldb: Any, k: Any, tile: _Tile, vector: Any
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
    fma = _fma(builder, vector)
    b_row = builder.mul(step, ldb)
    columns = [_load(builder, _at(builder, b, b_row, j * vector.count), vector) for j in range(nv)]
    a_row = builder.mul(step, ir.Constant(_I64, mr))
    news = []
    for i in range(mr):
        scalar = _broadcast(builder, builder.load(_at(builder, a, a_row, i)), vector)
        news.append([builder.call(fma, [scalar, columns[j], sums[i][j]]) for j in range(nv)])
    following = builder.add(step, ir.Constant(_I64, 1))
    step.add_incoming(following, loop)
    for row, new in zip(sums, news, strict=True):
        for phi, value in zip(row, new, strict=True):
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, k), loop, after)
    builder.position_at_end(after)
    return news


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
