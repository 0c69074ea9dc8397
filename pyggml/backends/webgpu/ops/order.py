"""The order of numbers, and what is made of positions: argsort, top_k, spans, temperatures."""

from collections.abc import Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, per_element, whole

# Each number counts those before it: that is its rank. n² comparisons of a row.
_RANKED = """
fn is_nan(v: f32) -> bool { return (bitcast<u32>(v) & 0x7fffffffu) > 0x7f800000u; }
fn comes_before(a: f32, i: u32, b: f32, j: u32) -> bool {  // equal ones keep their order, NaN last
    if (a == b || (is_nan(a) && is_nan(b))) { return i < j; }
    if (is_nan(a) || is_nan(b)) { return is_nan(b); }
    return (a < b) != FALLING;
}
""" + whole(
    """
    let i = group * 256u + me;
    if (i < TOTAL) {
        let first = i / N * N;
        let mine = x_at(i);
        var rank = 0u;
        for (var j = 0u; j < N; j++) {
            if (comes_before(x_at(first + j), j, mine, i - first)) { rank++; }
        }
        if (rank < KEPT) { put_y(i / N * KEPT + rank, i32(i - first)); }
    }
"""
)


def _rank(site: ShaderSite) -> Sequence[Dispatch]:
    """argsort keeps all numbers of a row, top_k the k largest."""
    (x,), p = site.node.src, site.node.params
    n = x.shape[-1]
    constants = {"TOTAL": x.n_elements, "N": n, "KEPT": int(p.get("k", n))}
    constants |= {"FALLING": bool(p.get("descending", True))}
    views = {"y": site.out, "x": site.src[0]}
    return [site.shaders.dispatch(_RANKED, views, per_element(x.n_elements), constants)]


_SPAN = """
    let t = group * 256u + me;
    if (t < T) {
        let end = x_at(2u * t + 1u);
        put_y(2u * t, max(x_at(2u * t), end - i32(WINDOW)));
        put_y(2u * t + 1u, end);
    }
"""


def _window_span(site: ShaderSite) -> Sequence[Dispatch]:
    n, window = site.node.shape[0], min(site.node.params["window"], 2**31 - 1)
    views = {"y": site.out, "x": site.src[0]}
    return [site.shaders.dispatch(_SPAN, views, per_element(n), {"T": n, "WINDOW": window})]


_CHUNK = """
    let t = group * 256u + me;
    if (t < T) {
        let end = x_at(2u * t + 1u);
        put_y(2u * t, max(x_at(2u * t), end - 1 - p_at(t) % i32(SIZE)));
        put_y(2u * t + 1u, end);
    }
"""


def _chunk_span(site: ShaderSite) -> Sequence[Dispatch]:
    n, size = site.node.shape[0], min(site.node.params["size"], 2**31 - 1)
    views = {"y": site.out, "x": site.src[0], "p": site.src[1]}
    return [site.shaders.dispatch(_CHUNK, views, per_element(n), {"T": n, "SIZE": size})]


_TEMPERATURE = """
    let i = group * 256u + me;
    if (i < N) { put_y(i, 1.0 + STRENGTH * log(1.0 + f32((u32(x_at(i)) + FIRST) / EVERY))); }
"""


def _log_temperature(site: ShaderSite) -> Sequence[Dispatch]:
    n, p = site.node.n_elements, site.node.params
    constants = {"N": n, "STRENGTH": float(p["strength"]), "EVERY": int(p["every"])}
    constants |= {"FIRST": int(p["first"])}
    views = {"y": site.out, "x": site.src[0]}
    return [site.shaders.dispatch(_TEMPERATURE, views, per_element(n), constants)]


declare("argsort", ShaderKernel(_rank))
declare("top_k", ShaderKernel(_rank))
declare("window_span", ShaderKernel(_window_span))
declare("chunk_span", ShaderKernel(_chunk_span))
declare("log_temperature", ShaderKernel(_log_temperature))
