"""Normalisation of rows, a workgroup for each: see pyggml/ops/norm.py and norm_mul.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyggml.backends.webgpu.kernel import Kernel, Site
from pyggml.backends.webgpu.shader import MAIN, Dispatch
from pyggml.backends.webgpu.table import declare

# Sums over a workgroup of 256 threads.
SUMS = """
var<workgroup> parts: array<f32, 256>;
fn summed(me: u32, mine: f32) -> f32 {
    parts[me] = mine;
    workgroupBarrier();
    for (var n = 128u; n > 0u; n = n / 2u) {
        if (me < n) { parts[me] += parts[me + n]; }
        workgroupBarrier();
    }
    let total = parts[0];
    workgroupBarrier();
    return total;
}
"""
_ROW = """
    if (group >= ROWS) { return; }
    let first = group * N;
    var squares = 0.0;
    for (var j = me; j < N; j += 256u) { let v = x_at(first + j); squares += v * v; }
    let r = 1.0 / sqrt(summed(me, squares) / f32(N) + p_eps);
"""
_FORWARD = "for (var j = me; j < N; j += 256u) { put_y(first + j, x_at(first + j) * r * WEIGHT); }"
_BACK = """
    var along = 0.0;
    for (var j = me; j < N; j += 256u) { along += x_at(first + j) * WEIGHT * dy_at(first + j); }
    let back = r * r * r * summed(me, along) / f32(N);
    for (var j = me; j < N; j += 256u) {
        put_y(first + j, r * WEIGHT * dy_at(first + j) - back * x_at(first + j));
    }
"""


def with_sums(body: str) -> str:
    """A whole shader that may call `summed(me, mine)`, whose uniform control flow is the body's."""
    return SUMS + MAIN.replace("BODY", body)


def _by_row(body: str, names: Sequence[str]) -> Callable[[Site], Sequence[Dispatch]]:
    """y from rows of x and what else is named; `w` is a row that all share."""
    text = with_sums(_ROW + body.replace("WEIGHT", "w_at(j)" if "w" in names else "1.0"))

    def bind(site: Site) -> Sequence[Dispatch]:
        n = site.node.shape[-1]
        rows = site.node.n_elements // n
        views = {"y": site.out, **dict(zip(names, site.src, strict=True))}
        constants = {"N": n, "ROWS": rows, "p_eps": float(site.node.params["eps"])}
        return [site.shaders.dispatch(text, views, rows, constants)]

    return bind


declare("rms_norm", Kernel(_by_row(_FORWARD, ("x",))))
declare("rms_norm_back", Kernel(_by_row(_BACK, ("x", "dy"))))
declare("rms_norm_mul", Kernel(_by_row(_FORWARD, ("x", "w"))))
declare("rms_norm_mul_back", Kernel(_by_row(_BACK, ("x", "w", "dy"))))
