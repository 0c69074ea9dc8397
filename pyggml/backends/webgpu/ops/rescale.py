"""Scales of packed weights: changed, and the slopes along them; see ops/product/rescale.py.

A thread makes a word of the changed blocks. A thread sums up the slopes of a block, for one scale
after the other, and of a product some rows of dw at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from pyggml.backends.kit.products import factor_of, gaps_in
from pyggml.backends.webgpu.ops.layout import TO_F16
from pyggml.backends.webgpu.ops.products import (
    ShaderOperands,
    ShaderProblem,
    multiply,
    scratch_bytes,
)
from pyggml.backends.webgpu.ops.rows import no_such_row
from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import LINE, WORD, BufferRange, Dispatch, Shaders
from pyggml.backends.webgpu.wgsl.weights import weight_source
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.graph.tensor import Tensor
from pyggml.quants.scales import scale_places
from pyggml.sizes import round_up

_TILE_BYTES = 16 << 20  # of dw that is there at a time, if a binding may be so large

_RESCALE = """
    var bits = 0u;
    for (var c = 0u; c < 4u; c++) {
        let byte = 4u * i + c;
        if (byte < N_BYTES) { bits |= changed(byte) << (8u * c); }
    }
    put_y(i, bits);
"""
_SUMS = """
    let row = ROW;
    var total = 0.0;
    if (row < 0 || u32(row) >= N_ROWS) {
        FAULT
    } else {
        let at = (u32(row) * BLOCKS + i % BLOCKS) * BLOCK_BYTES;
        for (var j = 0u; j < BLOCK; j += 4u) {
            let e = i * BLOCK + j;
            let four = vec4(dw_at(e), dw_at(e + 1u), dw_at(e + 2u), dw_at(e + 3u));
            total += dot(weights(at, j), four);
        }
    }
    put_y(i * N_SCALES + K, total);
"""


@cache
def _rescale_functions(name: str) -> str:
    """changed(i): byte i of the blocks, with its block's scales changed."""
    size, lines = DTYPES[name].block_bytes, []
    places = scale_places(name).tolist()
    for k, place in enumerate(places):
        nibbles = [
            f"(((w_at(at + {byte}u) >> {first}u) & 15u) << {4 * i}u)"
            for i, (byte, first) in enumerate(place)
        ]
        lines.append(f"""fn scale{k}(at: u32) -> u32 {{
    let u = u_at(at / {size}u * {len(places)}u + {k}u);
    return to_f16(unpack2x16float({" | ".join(nibbles)}).x * (1.0 + u));
}}""")
    lines += ["fn changed(i: u32) -> u32 {", f"    let o = i % {size}u;", "    var byte = w_at(i);"]
    for k, place in enumerate(places):
        for i, (byte, first) in enumerate(place):
            nibble = f"(((scale{k}(i - o) >> {4 * i}u) & 15u) << {first}u)"
            mask = f"{255 & ~(15 << first)}u"
            lines.append(f"    if (o == {byte}u) {{ byte = (byte & {mask}) | {nibble}; }}")
    return "\n".join([TO_F16, *lines, "    return byte;", "}", ""])


def _bind_rescale(site: ShaderSite) -> Sequence[Dispatch]:
    n_bytes, functions = site.src[0].n_bytes, _rescale_functions(site.node.dtype.name)
    n = -(-n_bytes // WORD)
    words = replace(site.out.of("u32"), n_bytes=n * WORD)
    return site.each(_RESCALE, "w u", {"N_BYTES": n_bytes}, n, functions, y=words)


def _sums(
    site: ShaderSite,
    n_rows: int,
    memory: dict[str, BufferRange],
    fault: int | None = None,
) -> Iterator[Dispatch]:
    """Dispatches that put the sums of slopes along n_rows rows; memory: y, w, dw and, with the
    fault of those that are no rows, ids and fault."""
    w = site.node.src[0]
    dtype, n_scales = w.dtype, len(scale_places(w.dtype.name))
    n = memory["dw"].n_bytes // (F32.block_bytes * dtype.block)
    row = "i32(i / BLOCKS)" if fault is None else "ids_at(i / BLOCKS)"
    noted = "" if fault is None else "put_fault(0u, i32(NO_ROW));"
    body = _SUMS.replace("ROW;", f"{row};").replace("FAULT", noted)
    constants = {
        "BLOCKS": w.shape[-1] // dtype.block, "BLOCK": dtype.block, "N_ROWS": n_rows,
        "BLOCK_BYTES": dtype.block_bytes, "N_SCALES": n_scales, "NO_ROW": fault or 0,
    }  # fmt: skip
    for k in range(n_scales):
        functions = weight_source(dtype.name, k)
        yield site.shaders.each(body, n, memory, {**constants, "K": k}, functions)


def _bind_back(site: ShaderSite) -> Sequence[Dispatch]:
    w = site.node.src[0]
    n_rows = w.n_elements // w.shape[-1]
    return [*_sums(site, n_rows, {"y": site.out, "w": site.src[0], "dw": site.src[1]})]


def _bind_rows(site: ShaderSite) -> Sequence[Dispatch]:
    w, dy, ids = site.src
    n_rows = site.node.src[0].shape[0]
    cell, fault = no_such_row(site, n_rows)
    memory = {"y": site.out, "w": w, "dw": dy, "ids": ids, "fault": cell}
    return [*_sums(site, n_rows, memory, fault)]


# -- of a product -------------------------------------------------------------------------------


def _tiles(node: Tensor, shaders: Shaders) -> list[tuple[int, ShaderProblem]]:
    """(first row of dw, the product of so many rows) of each tile."""
    w, x, dy = node.src
    n, k = w.shape
    of_dy, of_x = (factor_of(t, (1, 1), True) for t in (dy, x))
    product = ShaderProblem(n, k, x.shape[0], of_dy, of_x)
    step = max(1, min(n, min(shaders.limit, _TILE_BYTES) // (F32.block_bytes * max(k, 1))))
    return [(first, replace(product, m=min(step, n - first))) for first in range(0, n, step)]


def _tile_bytes(tiles: Sequence[tuple[int, ShaderProblem]]) -> int:
    return round_up(max((F32.block_bytes * p.m * p.n for _, p in tiles), default=0), LINE)


def _scratch(node: Tensor, shaders: Shaders) -> int:
    tiles = _tiles(node, shaders)
    return _tile_bytes(tiles) + max((scratch_bytes(p, shaders) for _, p in tiles), default=0)


def _bind_product(site: ShaderSite) -> Sequence[Dispatch]:
    (w, x, dy), matrix, calls = site.src, site.node.src[0], list[Dispatch]()
    tiles = _tiles(site.node, site.shaders)
    own, row_bytes = _tile_bytes(tiles), matrix.dtype.row_bytes(matrix.shape[1])
    rest = replace(site.scratch, start=site.scratch.start + own, n_bytes=site.scratch.n_bytes - own)
    of_row = site.node.n_elements // matrix.shape[0]
    for first, p in tiles:
        tile, skipped = site.scratch.part(0, p.m * p.n), F32.block_bytes * first * p.a.row
        a = replace(dy, start=dy.start + skipped, n_bytes=dy.n_bytes - skipped)
        calls += multiply(p, ShaderOperands(tile, a, x, rest), site.shaders)
        packed = replace(w, start=w.start + first * row_bytes, n_bytes=p.m * row_bytes)
        out = site.out.part(first * of_row, p.m * of_row)
        calls += _sums(site, p.m, {"y": out, "w": packed, "dw": tile})
    return calls


declare("rescale", _bind_rescale, mixed=(0, 2))
declare("rescale_back", _bind_back, mixed=(0,))
declare("rescale_back_rows", _bind_rows, mixed=(0,))
declare(
    "rescale_back_out_prod",
    _bind_product,
    lacks=lambda node: gaps_in(node.src[0]),
    scratch=_scratch,
    mixed=(0,),
)
