"""The order of numbers, and what is made of positions: argsort, top_k, spans, temperatures."""

from collections.abc import Sequence
from functools import partial

from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch

# Each number counts those before it: that is its rank. n² comparisons of a row.
_BEFORE = """
fn is_nan(v: f32) -> bool { return (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u; }
fn comes_before(a: f32, i: u32, b: f32, j: u32) -> bool {  // equal ones keep their order, NaN last
    if (a == b || (is_nan(a) && is_nan(b))) { return i < j; }
    if (is_nan(a) || is_nan(b)) { return is_nan(b); }
    return (a < b) != FALLING;
}
"""
_RANKED = """
    let first = i / N * N;
    let mine = x_at(i);
    var rank = 0u;
    for (var j = 0u; j < N; j++) {
        if (comes_before(x_at(first + j), j, mine, i - first)) { rank++; }
    }
    if (rank < KEPT) { put_y(i / N * KEPT + rank, i32(i - first)); }
"""


def _rank(site: ShaderSite) -> Sequence[Dispatch]:
    """argsort keeps all numbers of a row, top_k the k largest."""
    (x,), p = site.node.src, site.node.params
    n = x.shape[-1]
    constants = {"N": n, "KEPT": int(p.get("k", n)), "FALLING": bool(p.get("descending", True))}
    return site.each(_RANKED, "x", constants, x.n_elements, _BEFORE)


_SPAN = """
    let end = x_at(2u * i + 1u);
    put_y(2u * i, max(x_at(2u * i), LEAST));
    put_y(2u * i + 1u, end);
"""


def _span(least: str, setting: str, names: str, site: ShaderSite) -> Sequence[Dispatch]:
    """least: the first key that a window shows, of this SIZE"""
    size = min(site.node.params[setting], 2**31 - 1)
    return site.each(_SPAN.replace("LEAST", least), names, {"SIZE": size}, site.node.shape[0])


_TEMPERATURE = "put_y(i, 1.0 + STRENGTH * log(1.0 + f32((u32(x_at(i)) + FIRST) / EVERY)));"


def _log_temperature(site: ShaderSite) -> Sequence[Dispatch]:
    p = site.node.params
    constants = {"STRENGTH": float(p["strength"]), "EVERY": int(p["every"])}
    return site.each(_TEMPERATURE, "x", {**constants, "FIRST": int(p["first"])})


declare("argsort", _rank)
declare("top_k", _rank)
declare("window_span", partial(_span, "end - i32(SIZE)", "window", "x"))
declare("chunk_span", partial(_span, "end - 1 - p_at(i) % i32(SIZE)", "size", "x p"))
declare("log_temperature", _log_temperature)
