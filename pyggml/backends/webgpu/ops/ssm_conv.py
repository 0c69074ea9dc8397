"""The short causal convolution of Mamba, LFM2 and gated delta nets: see ops/recurrent/ssm_conv.py.

Row m of what a token may see is state m for m < BACK, else token m − BACK.
"""

from collections.abc import Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch

_KNOWN = """
fn known(m: u32, c: u32) -> f32 {
    if (m < BACK) { return state_at(m * C + c); }
    return x_at((m - BACK) * C + c);
}
"""
_FORWARD = """
    let c = i % C;
    if (i < T * C) {
        var total = 0.0;
        for (var back = 0u; back <= min(BACK, u32(positions_at(i / C))); back++) {
            total += w_at(c * (BACK + 1u) + BACK - back) * known(BACK + i / C - back, c);
        }
        put_y(i, total);
    }
    if (i < BACK * C) { put_last(i, known(T + i / C, c)); }
"""
# Each row m has reached the tokens m − BACK … m of its own sequence.
_BACK_X = """
    let m = i / C;
    let c = i % C;
    var total = 0.0;
    for (var back = 0u; back <= BACK; back++) {
        if (m + back >= BACK && m + back - BACK < T) {
            let t = m + back - BACK;
            if (i32(back) <= positions_at(t)) {
                total += w_at(c * (BACK + 1u) + BACK - back) * dy_at(t * C + c);
            }
        }
    }
    if (m < BACK) { put_dstate(i, total); } else { put_dx(i - BACK * C, total); }
"""
_BACK_W = """
    let c = i / (BACK + 1u);
    let back = BACK - i % (BACK + 1u);
    var total = 0.0;
    for (var t = 0u; t < T; t++) {
        if (i32(back) <= positions_at(t)) {
            total += dy_at(t * C + c) * known(BACK + t - back, c);
        }
    }
    put_dw(i, total);
"""


def _sizes(site: ShaderSite) -> dict[str, int | float]:
    (n_back, n_channels), n_tokens = site.node.src[0].shape, site.node.src[1].shape[0]
    return {"T": n_tokens, "C": n_channels, "BACK": n_back}


def _forward(site: ShaderSite) -> Sequence[Dispatch]:
    sizes, (last,) = _sizes(site), site.saved
    n = int(max(sizes["T"], sizes["BACK"]) * sizes["C"])
    return site.each(_FORWARD, "state x w positions", sizes, n, _KNOWN, last=last)


def _backward(site: ShaderSite) -> Sequence[Dispatch]:
    sizes, each = _sizes(site), site.shaders.each
    state, x, w, positions, dy = site.src
    dstate, dw = site.saved
    n = int((sizes["T"] + sizes["BACK"]) * sizes["C"])
    of_x = {"dx": site.out, "dstate": dstate, "w": w, "positions": positions, "dy": dy}
    of_w = {"dw": dw, "state": state, "x": x, "positions": positions, "dy": dy}
    return [
        each(_BACK_X, n, of_x, sizes),
        each(_BACK_W, site.node.src[2].n_elements, of_w, sizes, _KNOWN),
    ]


declare("ssm_conv", _forward)
declare("ssm_conv_back", _backward)
