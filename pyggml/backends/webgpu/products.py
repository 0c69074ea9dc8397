"""Products: mul_mat, out_prod, and the two that add to what is there.

    C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]      mul_mat(w, x): A = x, B = w
                                                     out_prod(a, b): A = bᵀ, B = aᵀ

A packed B is unpacked as it is read. One that is larger than a binding is taken some rows at a
time: along n their products are parts of C, along k they add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pyggml.backends.factors import Factor, factor_of
from pyggml.backends.webgpu.kernel import Kernel, Site
from pyggml.backends.webgpu.shader import Dispatch, Shaders, View, per_element
from pyggml.backends.webgpu.table import declare
from pyggml.backends.webgpu.weights import TYPES, weight_source
from pyggml.dtypes import F32, DType
from pyggml.tensors import Tensor

TILE, SIDE, DEPTH = 64, 16, 16  # of C; threads along each side; of k at once
_EACH = TILE // SIDE  # numbers of a thread along each side
_MOST_TILES = 65535

_TILES = f"""
var<workgroup> left: array<f32, {DEPTH * TILE}>;
var<workgroup> right: array<f32, {DEPTH * TILE}>;
@compute @workgroup_size({SIDE * SIDE})
fn main(
    @builtin(local_invocation_index) me: u32,
    @builtin(workgroup_id) at: vec3<u32>,
) {{
    let x = me % {SIDE}u;
    let y = me / {SIDE}u;
    let first_n = at.x * {TILE}u + P[0].x * 0u;
    let first_m = at.y * {TILE}u;
    let outer = at.z / INNER;
    let inner = at.z % INNER;
    let a_start = outer / A_REPEAT0 * A_STEP0 + inner / A_REPEAT1 * A_STEP1;
    let b_start = outer / B_REPEAT0 * B_STEP0 + inner / B_REPEAT1 * B_STEP1;
    var sums: array<array<f32, {_EACH}>, {_EACH}>;
    for (var k = 0u; k < K; k += {DEPTH}u) {{
        for (var e = me; e < {DEPTH * TILE}u; e += {SIDE * SIDE}u) {{
            var i = e % {TILE}u;
            var j = e / {TILE}u;
            if (A_K == 1u) {{ i = e / {DEPTH}u; j = e % {DEPTH}u; }}
            let row = first_m + i;
            var value = 0.0;
            if (row < M && k + j < K) {{ value = a_at(a_start + row * A_ROW + (k + j) * A_K); }}
            left[j * {TILE}u + i] = value;
        }}
        for (var e = me; e < {DEPTH * TILE}u; e += {SIDE * SIDE}u) {{
            var i = e % {TILE}u;
            var j = e / {TILE}u;
            if (B_K == 1u) {{ i = e / {DEPTH}u; j = e % {DEPTH}u; }}
            let row = first_n + i;
            var value = 0.0;
            if (row < N && k + j < K) {{ value = b_of(b_start + row * B_ROW + (k + j) * B_K); }}
            right[j * {TILE}u + i] = value;
        }}
        workgroupBarrier();
        for (var kk = 0u; kk < {DEPTH}u; kk++) {{
            for (var i = 0u; i < {_EACH}u; i++) {{
                let l = left[kk * {TILE}u + y + i * {SIDE}u];
                for (var j = 0u; j < {_EACH}u; j++) {{
                    sums[i][j] += l * right[kk * {TILE}u + x + j * {SIDE}u];
                }}
            }}
        }}
        workgroupBarrier();
    }}
    for (var i = 0u; i < {_EACH}u; i++) {{
        for (var j = 0u; j < {_EACH}u; j++) {{
            let row = first_m + y + i * {SIDE}u;
            let column = first_n + x + j * {SIDE}u;
            if (row < M && column < N) {{
                let place = (at.z * M + row) * C_ROW + C_FIRST + column;
                var value = sums[i][j];
                if (ADDS) {{ value += c_at(place); }}
                put_c(place, value);
            }}
        }}
    }}
}}
"""
_COPY = "let i = group * 256u + me; if (i < N) { put_y(i, x_at(i)); }"


@dataclass(frozen=True, slots=True)
class Product:
    """Sizes and factors. c_row: numbers from row to row of C; c_first: C's first column."""

    m: int
    n: int
    k: int
    a: Factor
    b: Factor
    batches: tuple[int, int] = (1, 1)
    c_row: int = 0
    c_first: int = 0
    adds: bool = False


def multiplied(p: Product, c: View, a: View, b: View, shaders: Shaders) -> list[Dispatch]:
    """The dispatches of a product: one, or several if B is larger than a binding."""
    p = replace(p, c_row=p.c_row or p.n)
    if b.n_bytes <= shaders.limit:
        return [_dispatch(p, c, a, b, shaders)]
    return [
        _dispatch(part, c, of_a, of_b, shaders) for part, of_a, of_b in _parts(p, a, b, shaders)
    ]


def _parts(p: Product, a: View, b: View, shaders: Shaders) -> Iterator[tuple[Product, View, View]]:
    """The product of some rows of a single matrix B at a time."""
    n_columns = p.k if p.b.k == 1 else p.n
    n_rows, row_bytes = (p.n if p.b.k == 1 else p.k), p.b.dtype.row_bytes(n_columns)
    most = max(shaders.limit // row_bytes // DEPTH * DEPTH, 1)
    for first in range(0, n_rows, most):
        rows = min(most, n_rows - first)
        some = View(b.buffer, b.start + first * row_bytes, rows * row_bytes, b.kind)
        if p.b.k == 1:
            yield replace(p, n=rows, c_first=p.c_first + first), a, some
        else:
            here = View(a.buffer, a.start + 4 * first * p.a.k, a.n_bytes - 4 * first * p.a.k)
            yield replace(p, k=rows, adds=p.adds or first > 0), here, some


def _dispatch(p: Product, c: View, a: View, b: View, shaders: Shaders) -> Dispatch:
    packed = p.b.dtype is not F32
    constants = {
        "M": p.m, "N": p.n, "K": p.k, "INNER": p.batches[1], "C_ROW": p.c_row, "ADDS": p.adds,
        "C_FIRST": p.c_first,
    }  # fmt: skip
    for name, f in (("A", p.a), ("B", p.b)):
        constants |= {f"{name}_ROW": f.row, f"{name}_K": f.k}
        for i in (0, 1):
            constants |= {f"{name}_STEP{i}": f.batches[i], f"{name}_REPEAT{i}": f.repeats[i]}
    n_tiles = (-(-p.n // TILE), -(-p.m // TILE), p.batches[0] * p.batches[1])
    views = {"c": c.written(), "a": a, "w" if packed else "b": b}
    return shaders.dispatch(_element_of(p.b.dtype) + _TILES, views, n_tiles, constants)


def _element_of(dtype: DType) -> str:
    """The WGSL of `b_of(i)`, element i of B."""
    if dtype is F32:
        return "fn b_of(i: u32) -> f32 { return b_at(i); }"
    block, size = dtype.block, dtype.block_bytes
    if block == 1:
        block, size = 32, 32 * size  # a decoder of a plain type adds one weight, at lane 0
    return (
        weight_source(dtype.name)
        + f"\nfn b_of(i: u32) -> f32 {{ return weight(i / {block}u * {size}u, i % {block}u); }}"
    )


# -- ops ----------------------------------------------------------------------------------------


def _product(node: Tensor, adds: bool) -> Product:
    assert node.op is not None
    b, a = node.src[-2:]
    is_transposed = node.op.name.startswith("out_prod")
    outer, inner = (1,) * (4 - len(node.shape)) + node.shape[:-2]
    m, n = node.shape[-2:]
    k = a.shape[-2] if is_transposed else a.shape[-1]
    of_a, of_b = (factor_of(t, (outer, inner), is_transposed) for t in (a, b))
    return Product(m, n, k, of_a, of_b, (outer, inner), adds=adds)


def _bind(site: Site) -> Sequence[Dispatch]:
    b, a = site.src[-2:]
    return multiplied(_product(site.node, adds=False), site.out, a, b, site.shaders)


def _bind_added(site: Site) -> Sequence[Dispatch]:
    b, a = site.src[-2:]
    product = multiplied(_product(site.node, adds=True), site.out, a, b, site.shaders)
    first = site.src[0]
    if (first.buffer, first.start) == (site.out.buffer, site.out.start):
        return product
    n = site.node.n_elements
    views = {"y": site.out, "x": first}
    return [site.shaders.dispatch(_COPY, views, per_element(n), {"N": n}), *product]


def _lacks(node: Tensor) -> str | None:
    b, c = node.src[-2], node
    if b.dtype is not F32 and b.dtype.name not in TYPES:
        return f"{b.dtype} is unpacked by none of its shaders"
    if b.dtype is not F32 and not b.is_contiguous:
        return f"the rows of {b!r} have gaps between them"
    if any(t.dtype is not F32 for t in (*node.src[:-2], node.src[-1], c)):
        return "a factor of another type than F32"
    if -(-c.shape[-2] // TILE) > _MOST_TILES:
        return f"{c.shape[-2]:,} rows"
    return None


for _name in ("mul_mat", "out_prod"):
    declare(_name, Kernel(_bind, lacks=_lacks, tiled=(0,)))
for _name in ("mul_mat_add", "out_prod_add"):
    declare(_name, Kernel(_bind_added, lacks=_lacks, tiled=(1,)))
