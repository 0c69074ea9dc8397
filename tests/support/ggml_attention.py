"""How ggml builds softmax, attention and rotary positions, and samples of these."""

from ctypes import c_int

import numpy as np
from ggml_cpu import numbers

from pyggml.graph.op import Sample
from pyggml.ops import rope_apply_back, rope_table
from pyggml.ops.attention.positions import FOUR_POSITIONS


def soft_max(g, x, *extras, scale, max_bias, masked):
    mask, sinks = (*extras, None)[:2] if masked else (None, *extras, None)[:2]
    y = g.soft_max_ext(x, mask, scale, max_bias)
    if sinks:
        g.change("soft_max_add_sinks", y, sinks)
    return y


def flash_attn_ext(g, q, k, v, span, *extras, scale, cap, max_bias, masked, longest):
    """ggml has a mask in place of spans, whose F16 holds a distance for ALiBi too."""
    mask, sinks = (*extras, None)[:2] if masked else (None, *extras, None)[:2]
    span, j = numbers(span)[0, 0], np.arange(k.contents.ne[2])
    bias = numbers(mask)[0] if mask else (j - span[:, 1:] + 1) * (max_bias > 0)
    seen = (span[:, :1] <= j) & (j < span[:, 1:])
    mask = g.leaf(np.where(seen, bias, -np.inf).astype(np.float16))
    q, k, v = (g.permute(t, 0, 2, 1, 3) for t in (q, k, v))
    y = g.flash_attn_ext(q, k, v, mask, scale, max_bias, cap)
    if sinks:
        g.change("flash_attn_ext_add_sinks", y, sinks)
    return y


MODES = {"normal": 0, "neox": 2, "mrope": 8, "imrope": 40, "vision": 24}
FREQUENCIES = {
    "freq_base": 10000.0, "freq_scale": 1.0, "ext_factor": 0.0, "attn_factor": 1.0,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip


def turn(back):
    """Of rows of an odd length ggml copies what it does not turn by pairs, past their ends; its
    vision turns whole rows."""

    def build(g, x, positions, *factors, mode, n_dims, sections=(), offset=0, n_ctx_orig=0, **rest):
        width = x.contents.ne[0]
        if width % 2 or (mode == "vision" and width != 2 * n_dims):
            return None
        several = [(c_int * 4)(*sections)] if sections else []
        function = getattr(g, f"rope_{'multi' if sections else 'ext'}{back}")
        sources = x, g.reshape(positions, -1), *(factors or [None])
        frequencies = (FREQUENCIES | rest).values()
        y = function(*sources, n_dims, *several, MODES[mode], n_ctx_orig, *frequencies)
        if offset:
            g.change("rope_set_offset", y, offset)
        return y

    return build


def rope_samples(rng):
    """Every mode, with and without factors of frequencies, YaRN, and features that do not turn."""
    yarn = {"freq_scale": 0.25, "ext_factor": 1.0, "attn_factor": 1.1, "n_ctx_orig": 64}
    for mode in MODES:
        for n_heads, d, n_dims, settings in [
            (3, 32, 32, {}),
            (2, 48, 32, {"freq_base": 500.0, "freq_scale": 0.5}),
            (1, 64, 32, yarn),
        ]:
            four = mode in FOUR_POSITIONS
            positions = rng.integers(0, 99, (4, 5) if four else 5).astype(np.int32)
            sections = {"sections": (5, 6, 5, 0)} if four else {}
            if mode == "vision":
                n_dims, sections = d // 2, {"sections": (d // 4, d // 4, 0, 0)}
            arrays = rng.standard_normal((5, n_heads, d)), positions
            params = {"mode": mode, "n_dims": n_dims, **sections, **settings}
            yield Sample(arrays, params)
            yield Sample((*arrays, rng.uniform(0.9, 1.1, d)), params)
            if mode != "vision" and n_dims < d:
                yield Sample(arrays, params | {"offset": d - n_dims})


def turn_back(dy, positions, *factors, mode, offset=0, **settings):
    return rope_apply_back(dy, rope_table(positions, *factors, mode=mode, **settings), mode, offset)
