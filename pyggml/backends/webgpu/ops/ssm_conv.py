"""The short causal convolution of Mamba, LFM2 and gated delta nets: see ops/recurrent/ssm_conv.py.

Row m of what a token may see is state m for m < BACK, else token m − BACK.
"""

from collections.abc import Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, per_element, whole

_KNOWN = """
fn known(m: u32, c: u32) -> f32 {
    if (m < BACK) { return state_at(m * C + c); }
    return x_at((m - BACK) * C + c);
}
"""
_FORWARD = _KNOWN + whole(
    """
    let i = group * 256u + me;
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
)
# Each row m has reached the tokens m − BACK … m of its own sequence.
_BACK_X = """
    let i = group * 256u + me;
    if (i < (BACK + T) * C) {
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
    }
"""
_BACK_W = _KNOWN + whole(
    """
    let i = group * 256u + me;
    if (i < (BACK + 1u) * C) {
        let c = i / (BACK + 1u);
        let back = BACK - i % (BACK + 1u);
        var total = 0.0;
        for (var t = 0u; t < T; t++) {
            if (i32(back) <= positions_at(t)) {
                total += dy_at(t * C + c) * known(BACK + t - back, c);
            }
        }
        put_dw(i, total);
    }
"""
)


def _sizes(site: ShaderSite) -> dict[str, int | float]:
    (n_back, n_channels), n_tokens = site.node.src[0].shape, site.node.src[1].shape[0]
    return {"T": n_tokens, "C": n_channels, "BACK": n_back}


def _forward(site: ShaderSite) -> Sequence[Dispatch]:
    sizes = _sizes(site)
    views = dict(zip(("state", "x", "w", "positions"), site.src, strict=True))
    views |= {"y": site.out, "last": site.saved[0]}
    n = int(max(sizes["T"], sizes["BACK"]) * sizes["C"])
    return [site.shaders.dispatch(_FORWARD, views, per_element(n), sizes)]


def _backward(site: ShaderSite) -> Sequence[Dispatch]:
    sizes, dispatch = _sizes(site), site.shaders.dispatch
    state, x, w, positions, dy = site.src
    dstate, dw = site.saved
    n = int((sizes["T"] + sizes["BACK"]) * sizes["C"])
    of_x = {"dx": site.out, "dstate": dstate, "w": w, "positions": positions, "dy": dy}
    of_w = {"dw": dw, "state": state, "x": x, "positions": positions, "dy": dy}
    return [
        dispatch(_BACK_X, of_x, per_element(n), sizes),
        dispatch(_BACK_W, of_w, per_element(site.node.src[2].n_elements), sizes),
    ]


declare("ssm_conv", ShaderKernel(_forward))
declare("ssm_conv_back", ShaderKernel(_backward))
