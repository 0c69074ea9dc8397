"""Softmax of rows, a workgroup for each: see pyggml/ops/attention/softmax.py."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, Shaders, per_element, whole
from pyggml.graph.tensor import MAX_AXES, Shape
from pyggml.ops.attention.positions import score_tables

NOTHING = -3e38  # stands for −inf, which shaders may do without
_SCORE = """
fn score(row: u32, j: u32) -> f32 {
    let at = row * N + j;
    if (!MASKED) { return max(x_at(at) * SCALE, NOTHING); }
    let b = row / (HEADS * QUERIES);
    let h = row / QUERIES % HEADS;
    let of_mask = (b % MASKS0 * MASKS1 + h % MASKS1) * QUERIES + row % QUERIES;
    return max(x_at(at) * SCALE + mask_at(of_mask * N + j) * slopes_at(h), NOTHING);
}
"""
_SOFT_MAX = _SCORE + whole("""
    if (group >= ROWS) { return; }
    let sink = max(sinks_at(group / QUERIES % HEADS), NOTHING);
    var most = sink;
    for (var j = me; j < N; j += 256u) { most = max(most, score(group, j)); }
    let top = highest(me, most);
    var mine = 0.0;
    for (var j = me; j < N; j += 256u) {
        let z = score(group, j);
        mine += select(0.0, exp(z - top), z > NOTHING);
    }
    let away = select(0.0, exp(sink - top), sink > NOTHING);
    let total = summed(me, mine) + away;
    let share = select(0.0, 1.0 / total, total > 0.0);
    for (var j = me; j < N; j += 256u) {
        let z = score(group, j);
        put_y(group * N + j, select(0.0, exp(z - top), z > NOTHING) * share);
    }
    if (me == 0u) { put_lost(group, away * share); }
""")


def _four(shape: Shape) -> Shape:
    return (1,) * (MAX_AXES - len(shape)) + shape


def _soft_max(site: ShaderSite) -> Sequence[Dispatch]:
    x, *extras = site.node.src
    p = site.node.params
    _, heads, queries, n = _four(x.shape)
    masked = bool(p["masked"])
    masks = _four(extras[0].shape) if masked else (1, 1, 1, 1)
    rows = x.n_elements // n
    constants = {
        "N": n, "ROWS": rows, "HEADS": heads, "QUERIES": queries, "MASKED": masked,
        "MASKS0": masks[0], "MASKS1": masks[1], "SCALE": float(p["scale"]), "NOTHING": NOTHING,
    }  # fmt: skip
    some = {"y": site.out, "x": site.src[0]}
    tables = score_tables(p, site.src[1:], heads, site.constant, NOTHING)
    some |= zip(("mask", "slopes", "sinks"), tables, strict=True)
    some["lost"] = site.saved[0] if site.saved else site.scratch
    return [site.shaders.dispatch(_SOFT_MAX, some, rows, constants)]


_CAUSAL = """
    let i = group * 256u + me;
    if (i < TOTAL) {
        put_y(i, select(bitcast<f32>(FILL), x_at(i), i % N <= N_PAST + i / N % ROWS));
    }
"""


def _causal(fill: float) -> Callable[[ShaderSite], Sequence[Dispatch]]:
    bits = int(np.float32(fill).view(np.uint32))

    def bind(site: ShaderSite) -> Sequence[Dispatch]:
        *_, rows, n = site.node.shape
        constants = {"TOTAL": prod(site.node.shape), "N": n, "ROWS": rows, "FILL": bits}
        constants["N_PAST"] = int(site.node.params["n_past"])
        views = {"y": site.out, "x": site.src[0]}
        return [site.shaders.dispatch(_CAUSAL, views, per_element(constants["TOTAL"]), constants)]

    return bind


def _scratch(node: object, shaders: Shaders) -> int:
    """Bytes of the sinks' shares; nothing reads them if there are no sinks."""
    return 4


declare("soft_max", ShaderKernel(_soft_max, scratch=_scratch))
declare("diag_mask_inf", ShaderKernel(_causal(-np.inf)))
declare("diag_mask_zero", ShaderKernel(_causal(0.0)))
