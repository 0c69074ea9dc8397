"""Products with one weight per expert: row (t, u) with expert ids[t, u]; see ops/experts.

Each thread finds its row's expert by itself, so that the ids never leave the device. A row of an id
that is no expert is left 0, and the fault is noted. Weights that no binding holds are taken some
rows at a time.
"""

from collections.abc import Sequence
from functools import partial

from pyggml.backends.webgpu.ops.rows import parts_of
from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers, unread
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, per_element, whole
from pyggml.backends.webgpu.wgsl.weights import QUAD, weight_source
from pyggml.graph.dtypes import BF16, F16, F32, DType

_LANES = 32  # threads that share a sum
_PLAIN = (F32, F16, BF16)
# The rows of all experts stand one after the other; this dispatch has HERE of them.
_EXPERT = """
fn is_known(expert: i32) -> bool {
    let known = expert >= 0 && u32(expert) < EXPERTS;
    if (!known) { put_fault(0u, i32(NO_EXPERT)); }
    return known;
}
fn is_here(row: u32) -> bool { return row >= FIRST && row - FIRST < HERE; }
var<workgroup> parts: array<f32, 256>;
"""
# y[r, n] = x[r] · w[ids[r], n]: 32 threads for each number. K counts units of a row of w.
_FORWARD = whole(f"""
    let i = group * {256 // _LANES}u + me / {_LANES}u;
    let lane = me % {_LANES}u;
    var total = 0.0;
    var mine = false;
    if (i < ROWS * N) {{
        let expert = ids_at(i / N);
        let known = is_known(expert);
        let row = u32(expert) * N + i % N;
        mine = select(FIRST == 0u, is_here(row), known);
        if (known && mine) {{
            let start = i / N / SHARED * K;
            for (var k = lane; k < K; k += {_LANES}u) {{
                total += along(w_of(row - FIRST, k), start + k);
            }}
        }}
    }}
    parts[me] = total;
    workgroupBarrier();
    for (var n = {_LANES // 2}u; n > 0u; n = n / 2u) {{
        if (lane < n) {{ parts[me] += parts[me + n]; }}
        workgroupBarrier();
    }}
    if (lane == 0u && mine) {{ put_y(i, parts[me]); }}
""")
# dx[r, k] = Σ_n dy[r, n] · w[ids[r], n, k]: a thread for each unit.
_BACKWARD = whole("""
    let i = group * 256u + me;
    if (i < ROWS * K) {
        let expert = ids_at(i / K);
        var total = Unit(0.0);
        if (FIRST > 0u) { total = unit_of_y(i); }
        if (is_known(expert)) {
            for (var n = 0u; n < N; n++) {
                let row = u32(expert) * N + n;
                if (is_here(row)) { total += x_at(i / K * N + n) * w_of(row - FIRST, i % K); }
            }
        }
        put_unit(i, total);
    }
""")
# Units of a plain type are numbers, those of a packed one four.
_ONE = """
alias Unit = f32;
fn w_of(row: u32, k: u32) -> f32 { return w_at(row * K + k); }
fn along(w: f32, i: u32) -> f32 { return w * x_at(i); }
fn unit_of_y(i: u32) -> f32 { return y_at(i); }
fn put_unit(i: u32, v: f32) { put_y(i, v); }
"""
_FOUR = """
alias Unit = vec4<f32>;
fn w_of(row: u32, k: u32) -> vec4<f32> {
    return weights((row * (K / BLOCK) + k / BLOCK) * SIZE, k % BLOCK * 4u);
}
fn along(w: vec4<f32>, i: u32) -> f32 {
    return dot(w, vec4(x_at(4u * i), x_at(4u * i + 1u), x_at(4u * i + 2u), x_at(4u * i + 3u)));
}
fn unit_of_y(i: u32) -> vec4<f32> {
    return vec4(y_at(4u * i), y_at(4u * i + 1u), y_at(4u * i + 2u), y_at(4u * i + 3u));
}
fn put_unit(i: u32, v: vec4<f32>) {
    for (var c = 0u; c < 4u; c++) { put_y(4u * i + c, v[c]); }
}
"""


def _units(dtype: DType) -> tuple[str, int]:
    """WGSL: the functions of a unit; and its numbers."""
    if dtype in _PLAIN:
        return _ONE, 1
    size = f"{dtype.block_bytes}u"
    four = _FOUR.replace("BLOCK", f"{dtype.block // QUAD}u").replace("SIZE", size)
    return weight_source(dtype.name) + four, QUAD


def _no_expert(site: ShaderSite, n: int) -> tuple[BufferRange, int]:
    assert site.node.op is not None
    return site.fault(f"{site.node.op.name}: an id is not one of {n} experts")


def _product(body: str, of_units: bool, site: ShaderSite) -> Sequence[Dispatch]:
    """of_units: a thread has a unit of y, else 32 threads a number."""
    w, x, ids = site.node.src
    cell, no_expert = _no_expert(site, w.shape[0])
    functions, unit = _units(w.dtype)
    text, calls, total = _EXPERT + functions + body, [], site.node.n_elements
    groups = per_element(total // unit if of_units else total * _LANES)
    for first, n, rows_of_w in parts_of(w, site.src[0], site.shaders.limit):
        constants = {
            "ROWS": ids.n_elements, "N": w.shape[1], "K": w.shape[2] // unit,
            "EXPERTS": w.shape[0], "FIRST": first, "HERE": n, "NO_EXPERT": no_expert,
            "SHARED": max(1, ids.n_elements // (x.shape[0] * x.shape[1])),
        }  # fmt: skip
        matrix = numbers(rows_of_w, w.dtype) if w.dtype in _PLAIN else rows_of_w
        views = {"y": site.out, "w": matrix, "x": site.src[1], "ids": site.src[2], "fault": cell}
        calls.append(site.shaders.dispatch(text, views, groups, constants))
    return calls


# dw[e, n, k] = Σ dy[r, n] · x[r, k] over the rows r of expert e: a thread for each number.
_SUMS = """
    let expert = i32(i / (N * K));
    var total = 0.0;
    for (var row = 0u; row < ROWS; row++) {
        let of_row = ids_at(row);
        if (of_row == expert) {
            total += dy_at(row * N + i / K % N) * x_at(row / SHARED * K + i % K);
        }
        if (of_row < 0 || u32(of_row) >= EXPERTS) { put_fault(0u, i32(NO_EXPERT)); }
    }
    put_y(i, total);
"""


def _out_prod_id(site: ShaderSite) -> Sequence[Dispatch]:
    x, _, ids = site.node.src
    n_experts, n, k = site.node.shape
    cell, no_expert = _no_expert(site, n_experts)
    constants = {"EXPERTS": n_experts, "N": n, "K": k, "ROWS": ids.n_elements}
    constants |= {"SHARED": max(1, ids.n_elements // (x.shape[0] * x.shape[1]))}
    return site.each(_SUMS, "x dy ids", {**constants, "NO_EXPERT": no_expert}, fault=cell)


_ADD = """
    let expert = ids_at(i / N);
    if (expert >= 0 && u32(expert) < EXPERTS) {
        put_y(i, x_at(i) + b_at(u32(expert) * N + i % N));
    } else {
        put_y(i, 0.0);
        put_fault(0u, i32(NO_EXPERT));
    }
"""


def _add_id(site: ShaderSite) -> Sequence[Dispatch]:
    n_experts, n = site.node.src[1].shape
    cell, no_expert = _no_expert(site, n_experts)
    constants = {"N": n, "EXPERTS": n_experts, "NO_EXPERT": no_expert}
    return site.each(_ADD, "x b ids", constants, fault=cell)


for _name, _body, _of_units in (
    ("mul_mat_id", _FORWARD, False), ("mul_mat_id_back", _BACKWARD, True),
):  # fmt: skip
    _bind = partial(_product, _body, _of_units)
    declare(_name, _bind, lambda node: unread(node.src[0]), tiled=(0,))
declare("out_prod_id", _out_prod_id)
declare("add_id", _add_id)
