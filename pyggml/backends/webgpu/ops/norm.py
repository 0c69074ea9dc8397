"""Normalisation of rows, a workgroup for each: see pyggml/ops/norm/norm.py and norm_mul.py."""

import re
from collections.abc import Callable, Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, whole

# y of rows of x and, if they are named, of w, a row that all share, and of dy.
_RMS = """
    let r = 1.0 / sqrt(squared(me, first, 0.0) / f32(N) + p_eps);
"""
_RMS_BACK = """
    var along = 0.0;
    for (var j = me; j < N; j += 256u) { along += x_at(first + j) * WEIGHT * dy_at(first + j); }
    let back = r * r * r * summed(me, along) / f32(N);
    EACH(r * WEIGHT * dy_at(first + j) - back * x_at(first + j))
"""
_L2 = """
    let length = sqrt(squared(me, first, 0.0));
    let r = 1.0 / max(length, p_eps);
"""
_L2_BACK = """
    var along = 0.0;
    for (var j = me; j < N; j += 256u) { along += x_at(first + j) * dy_at(first + j); }
    let back = select(0.0, summed(me, along) * r * r * r, length > p_eps);
    EACH(r * dy_at(first + j) - back * x_at(first + j))
"""
_CENTRED = """
    var all = 0.0;
    for (var j = me; j < N; j += 256u) { all += x_at(first + j); }
    let mean = summed(me, all) / f32(N);
    let r = 1.0 / sqrt(squared(me, first, mean) / f32(N) + p_eps);
"""
_CENTRED_BACK = """
    var mine = 0.0;
    var along = 0.0;
    for (var j = me; j < N; j += 256u) {
        mine += dy_at(first + j);
        along += dy_at(first + j) * (x_at(first + j) - mean);
    }
    let total = summed(me, mine) / f32(N);
    let back = summed(me, along) * r * r / f32(N);
    EACH(r * (dy_at(first + j) - total - (x_at(first + j) - mean) * back))
"""
_SQUARED = """
fn squared(me: u32, first: u32, mean: f32) -> f32 {  // Σ (x − mean)² of a row
    var mine = 0.0;
    for (var j = me; j < N; j += 256u) { let v = x_at(first + j) - mean; mine += v * v; }
    return summed(me, mine);
}
"""
_EACH = re.compile(r"EACH\((.*)\)\n")


def _by_row(body: str, names: Sequence[str]) -> Callable[[ShaderSite], Sequence[Dispatch]]:
    """y from rows of x and what else is named; `w` is a row that all share."""
    body = "if (group >= ROWS) { return; } let first = group * N;" + body
    body = _EACH.sub(r"for (var j = me; j < N; j += 256u) { put_y(first + j, \1); }\n", body)
    body = body.replace("WEIGHT", "w_at(j)" if "w" in names else "1.0")
    text = _SQUARED + whole(body)

    def bind(site: ShaderSite) -> Sequence[Dispatch]:
        n = site.node.shape[-1] if site.node.shape else 1
        rows = site.node.n_elements // n
        views = {"y": site.out, **dict(zip(names, site.src, strict=True))}
        constants = {"N": n, "ROWS": rows, "p_eps": float(site.node.params["eps"])}
        return [site.shaders.dispatch(text, views, rows, constants)]

    return bind


_TIMES_R = "EACH(x_at(first + j) * r * WEIGHT)\n"
for _name, _body, _sources in (
    ("rms_norm", _RMS + _TIMES_R, "x"),
    ("rms_norm_back", _RMS + _RMS_BACK, "x dy"),
    ("rms_norm_mul", _RMS + _TIMES_R, "x w"),
    ("rms_norm_mul_back", _RMS + _RMS_BACK, "x w dy"),
    ("l2_norm", _L2 + _TIMES_R, "x"),
    ("l2_norm_back", _L2 + _L2_BACK, "x dy"),
    ("norm", _CENTRED + "EACH((x_at(first + j) - mean) * r)\n", "x"),
    ("norm_back", _CENTRED + _CENTRED_BACK, "x dy"),
):
    declare(_name, ShaderKernel(_by_row(_body, _sources.split())))
