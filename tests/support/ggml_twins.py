"""How ggml builds each op of the registry, and which ops it has not, with the reason.

A builder gets the context, ggml's tensors of the op's sources, and its settings by name. It returns
ggml's result, followed by those of `saved` if ggml has them, or None for what ggml has not.
"""

from collections.abc import Callable, Mapping
from ctypes import c_int, c_int64
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from ggml_cpu import Long, longs, numbers, sizes
from ggml_recurrences import (
    gated_delta_net,
    gated_linear_attn,
    rwkv_wkv6,
    rwkv_wkv7,
    ssm_conv,
    ssm_scan,
)

from pyggml.formulas.formula import GRADIENT
from pyggml.graph.dtypes import BF16, DTYPES, F32
from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLUnaryOp
from pyggml.graph.op import Memory, Sample
from pyggml.ops import OPS, conv_transpose_1d, conv_transpose_2d, rope, rope_apply_back, rope_table
from pyggml.ops.attention.positions import FOUR_POSITIONS

# The limits of tests/test-backend-ops.cpp, of Σ (found − wanted)² / Σ wanted²: in general, and
# where ggml itself computes with rounded sources.
EXACT, IN_F16, ROUNDED = 1e-7, 1e-6, 5e-4


@dataclass(frozen=True)
class Builder:
    """What pyggml makes of several ops and ggml has as one, with an op's fields for drawing."""

    name: str
    call: Callable[..., Any]
    samples: Callable[..., Any]
    covers: tuple[str, ...]  # ops of the registry that ggml has not by themselves
    memory: Memory = Memory.FRESH
    changes: tuple[int, ...] = ()

    def __call__(self, *src, **params):
        return self.call(*src, **params)


@dataclass(frozen=True)
class Twin:
    """The same in ggml.

    fixed     settings that ggml has not, and what they are there
    strided   whether ggml takes sources with gaps; the others are copied first
    arranged  what both results go through before they are compared
    """

    build: Callable[..., Any]
    limit: float = EXACT
    fixed: Mapping[str, Any] = field(default_factory=dict)
    strided: bool = False
    arranged: Callable[[np.ndarray], np.ndarray] = np.asarray


# -- elements, rows and matrices ----------------------------------------------------------------


def called(name):
    """ggml's function of this name takes the sources and then the settings, in the same order."""
    return lambda g, *src, **settings: getattr(g, name)(*src, *settings.values())


def unary(number):
    return lambda g, x: g.unary(x, number)


def glu(number):
    return lambda g, gate, up: g.glu_split(gate, up, number)


def inner(g, axis):
    """The node's axis, counted from the innermost as in ggml."""
    return len(g.node.shape) - 1 - axis


def rows(g, x):
    return g.reshape(x, -1, x.contents.ne[0])


def arange(g, start, stop, step):
    return g.arange(start, stop, step) if start < stop else None


def without_mask(name):
    return lambda g, a, b, mask=None: None if mask else getattr(g, name)(a, b)


def out_prod(g, a, b):
    """ggml's CPU takes no BF16, and repeats nothing but F32."""
    ours, other = g.node.src
    repeated = ours.shape[:-2] != other.shape[:-2]
    alone = ours.dtype is BF16 or (repeated and ours.dtype is not F32)
    return None if alone else g.out_prod(a, b)


def swiglu_oai(g, gate, up, alpha, limit):
    return g.swiglu_oai(gate, up, alpha, limit)


def swiglu_clamp(g, gate, up, limit):
    return g.swiglu_clamp(gate, up, limit)


def xielu(g, x, a_n, a_p, beta, eps):
    """Its alphas are kept before softplus, ln(e^a − 1) of what it becomes."""
    before = [float(np.log(np.expm1(a))) for a in (a_n - beta, a_p)]
    return g.xielu(x, *before, beta, eps)


def tri(g, x, kind):
    return g.tri(x, ("upper_diag", "upper", "lower_diag", "lower").index(kind))


def gradient_first(name):
    return lambda g, x, dy, **settings: getattr(g, name)(dy, x, *settings.values())


# -- memory -------------------------------------------------------------------------------------


def narrow(g, x, axis, start, size):
    ne, nb, dim = [*x.contents.ne], x.contents.nb, inner(g, axis)
    ne[dim] = size
    return g.view_4d(x, *map(Long, (*ne, *nb[1:], start * nb[dim])))


def permute(g, x, axes):
    to = {
        3 - a: 3 - i
        for i, a in enumerate((*range(4 - len(axes)), *(4 - len(axes) + a for a in axes)))
    }
    return g.permute(x, *(to[i] for i in range(4)))


def window(g, x, shape, strides, offset):
    """ggml's nb1, nb2, nb3 and offset of a window in elements, None if its rows have gaps."""
    if strides and strides[-1] != 1 and shape[-1] > 1:
        return None
    nb = [4 * s for s in reversed(strides)][1:]
    while len(nb) < 3:
        nb.append((nb[-1] if nb else 4) * sizes(shape)[len(nb)])
    return [Long(n) for n in (*nb, 4 * offset)]


def view(g, x, shape, strides, offset):
    at = window(g, x, shape, strides, offset)
    return at and g.view_4d(x, *longs(shape), *at)


def written(name):
    """Where rows of the window lie on one another, ggml adds the last alone."""

    def build(g, a, b, strides, offset):
        shape = g.node.src[1].shape
        at = window(g, a, shape, strides, offset)
        spans = sorted(zip(strides, shape, strict=True))
        if any(s < m * k for (s, _), (m, k) in zip(spans[1:], spans, strict=False)):
            return None
        return at and getattr(g, name)(a, b, *at)

    return build


def pad(g, x, widths, circular):
    """Where more is put before an axis than it has, ggml's circle reads before x."""
    if circular and any(
        before > n for (before, _), n in zip(widths, g.node.src[0].shape, strict=True)
    ):
        return None
    ends = [n for pair in sizes(widths)[: len(widths)] for n in pair]
    ends += [0] * (8 - len(ends))
    return (g.pad_ext_circular if circular else g.pad_ext)(x, *ends)


def roll(g, x, shifts):
    ne = x.contents.ne
    return g.roll(
        x,
        *(s % n for s, n in zip(sizes(shifts)[: len(shifts)], ne, strict=False)),
        *[0] * (4 - len(shifts)),
    )


def upscale(g, x, sizes, mode, align_corners, antialias):
    number = ("nearest", "bilinear", "bicubic").index(mode) | align_corners << 8 | antialias << 9
    return g.interpolate(x, *longs(sizes), number)


def get_rows(g, table, ids):
    batch = g.node.src[0].shape[:-2]
    if g.node.src[1].shape[: len(batch)] != batch:
        return None
    return g.get_rows(table, g.reshape(ids, *batch, -1))


def get_rows_back(g, dy, ids, n_rows, batch):
    n = dy.contents.ne[0]
    return (
        None if batch else g.get_rows_back(rows(g, dy), g.reshape(ids, -1), g.new(F32, (n_rows, n)))
    )


def set_rows(g, dst, src, ids):
    if g.node.dtype.name == "IQ4_NL":  # ggml looks less long for the scale than its quantize does
        return None
    d, _, i = (t.shape for t in g.node.src)
    batch, row = d[: len(i) - 1], prod(d[len(i) :])
    dst = g.reshape_4d(dst, *longs((*batch, d[len(batch)], row)))
    return g.set_rows(dst, g.reshape(src, *batch, i[-1], row), ids)


# -- images -------------------------------------------------------------------------------------


def geometry(stride, padding, dilation):
    return [pair[i] for pair in (stride, padding, dilation) for i in (1, 0)]


def conv_2d_direct(g, w, x, stride, padding, dilation, groups):
    if groups == 1:
        return g.conv_2d_direct(w, x, *geometry(stride, padding, dilation))
    if groups == x.contents.ne[2] == w.contents.ne[3]:
        return g.conv_2d_dw_direct(w, x, *geometry(stride, padding, dilation))
    return None


def transposed_1d(g, w, x, stride):
    """ggml's x has no batches."""
    if x.contents.ne[2] * x.contents.ne[3] > 1:
        return None
    return g.conv_transpose_1d(w, x, stride, 0, 1)


def conv_transpose_2d_samples(rng):
    for n_in, n_out, kernel, image, stride in [
        (1, 1, (1, 1), (1, 1), 1),
        (3, 4, (2, 3), (5, 6), 1),
        (2, 3, (3, 2), (4, 7), 2),
        (4, 2, (4, 4), (3, 3), 3),
    ]:
        arrays = rng.standard_normal((n_in, n_out, *kernel)), rng.standard_normal((1, n_in, *image))
        yield Sample(arrays, {"stride": stride})


def conv_transpose_1d_samples(rng):
    for sample in conv_transpose_2d_samples(rng):
        yield Sample(tuple(a[:, :, 0] for a in sample.arrays), sample.params)


def im2col(g, x, size, stride, padding, dilation):
    w = g.new(F32, (1, x.contents.ne[2], *size))
    return g.im2col(w, x, *geometry(stride, padding, dilation), True, F32.number)


def im2col_back(g, dy, of, size, stride, padding, dilation):
    w, shape = g.new(F32, (1, of[1], *size)), (c_int64 * 4)(*sizes(of))
    return g.im2col_back(dy, w, shape, *geometry(stride, padding, dilation), True)


def pool(number):
    def build(g, x, size, stride, padding, whole=True):
        if not whole:
            flat = size[0] == stride[0] == x.contents.ne[1] == 1
            return g.pool_1d(x, number, size[1], stride[1], padding[1]) if flat else None
        return g.pool_2d(x, number, *size[::-1], *stride[::-1], *map(float, padding[::-1]))

    return build


# -- softmax, attention, positions --------------------------------------------------------------


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


def turned(back):
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


def turned_back(dy, positions, *factors, mode, offset=0, **settings):
    return rope_apply_back(dy, rope_table(positions, *factors, mode=mode, **settings), mode, offset)


# -- losses and optimisers ----------------------------------------------------------------------


def cross_entropy_loss_back(g, d, logits, labels, mask=None):
    """ggml takes the sum of a row's labels for 1."""
    return (
        None
        if mask or not np.allclose(numbers(labels).sum(-1), 1)
        else g.cross_entropy_loss_back(d, logits, labels)
    )


def stepped(name):
    def build(g, p, *rest):
        g.change("set_param", p)
        return getattr(g, name)(p, *rest)

    return build


# -- all ------------------------------------------------------------------------------------------


def words(text):
    return text.split()


SAME = words("""
    add sub add1 mul div sqr sqrt log sin cos sum sum_rows mean cumsum diag mul_mat
    mul_mat_id add_id clamp rms_norm norm l2_norm group_norm diag_mask_inf diag_mask_zero fill
    timestep_embedding pad_reflect_1d
""")
LOOKED_UP = words("gelu gelu_quick geglu geglu_quick")  # in ggml's tables of F16

TWINS = {
    **{name: Twin(called(name)) for name in SAME},
    **{name: Twin(unary(op.ggml)) for name, op in OPS.items() if isinstance(op.ggml, GGMLUnaryOp)},
    **{name: Twin(glu(op.ggml)) for name, op in OPS.items() if isinstance(op.ggml, GGMLGLUOp)},
    **{name: Twin(called(name), strided=True) for name in ("cont", "dup", "transpose")},
    "scale": Twin(called("scale_bias")),
    "xielu": Twin(xielu),
    "arange": Twin(arange),
    "leaky_relu": Twin(lambda g, x, slope: g.leaky_relu(x, slope, False)),
    "swiglu_oai": Twin(swiglu_oai),
    "swiglu_clamp": Twin(swiglu_clamp),
    "silu_back": Twin(gradient_first("silu_back")),
    "rms_norm_back": Twin(gradient_first("rms_norm_back")),
    "out_prod": Twin(out_prod),
    "argmax": Twin(lambda g, x: g.argmax(rows(g, x))),
    "argsort": Twin(lambda g, x, descending: g.argsort(x, int(descending))),
    "top_k": Twin(called("top_k"), arranged=lambda ids: np.sort(ids, -1)),
    "count_equal": Twin(without_mask("count_equal")),
    "repeat": Twin(lambda g, x, shape: g.repeat_4d(x, *longs(shape))),
    "repeat_back": Twin(lambda g, x, shape: g.repeat_back(x, g.new(F32, shape))),
    "concat": Twin(lambda g, a, b, axis: g.concat(a, b, inner(g, axis))),
    "cpy": Twin(lambda g, x, to: g.cast(x, DTYPES[to].number)),
    "cpy_into": Twin(lambda g, to, x: g.cpy(x, to)),
    "reshape": Twin(lambda g, x, shape: g.reshape_4d(x, *longs(shape))),
    "permute": Twin(permute, strided=True),
    "narrow": Twin(narrow),
    "view": Twin(view),
    "acc": Twin(written("acc")),
    "set": Twin(written("set")),
    "get_rows": Twin(get_rows),
    "get_rows_back": Twin(get_rows_back),
    "set_rows": Twin(set_rows),
    "tri": Twin(tri),
    "solve_tri": Twin(lambda g, a, b: g.solve_tri(a, b, True, True, False)),
    "pad": Twin(pad),
    "roll": Twin(roll),
    "upscale": Twin(upscale),
    "conv_2d_direct": Twin(conv_2d_direct),
    "im2col": Twin(im2col),
    "im2col_back": Twin(im2col_back),
    "pool_max": Twin(pool(0)),
    "pool_avg": Twin(pool(1)),
    "soft_max": Twin(soft_max),
    "soft_max_back": Twin(lambda g, dy, y, scale: g.soft_max_ext_back(dy, y, scale, 0.0)),
    "flash_attn_ext": Twin(flash_attn_ext, ROUNDED),
    "ssm_conv": Twin(ssm_conv),
    "ssm_scan": Twin(ssm_scan),
    "rwkv_wkv6": Twin(rwkv_wkv6),
    "rwkv_wkv7": Twin(rwkv_wkv7),
    "gated_linear_attn": Twin(gated_linear_attn),
    "gated_delta_net": Twin(gated_delta_net),
    "cross_entropy_loss": Twin(without_mask("cross_entropy_loss")),
    "cross_entropy_loss_back": Twin(cross_entropy_loss_back),
    "opt_step_adamw": Twin(stepped("opt_step_adamw")),
    "opt_step_sgd": Twin(stepped("opt_step_sgd")),
}
HALVES_REFUSED = {  # by ggml's CPU, of ops that take halves here
    "F16": words("rms_norm norm l2_norm group_norm soft_max scale swiglu_oai"),
    "BF16": words("""
        rms_norm norm l2_norm group_norm soft_max scale swiglu_oai swiglu_clamp clamp leaky_relu
    """),
}

TWINS |= {name: replace(TWINS[name], limit=IN_F16) for name in LOOKED_UP}

_MATRIX, _TURNS, _BACK = ("conv_transpose_2d",), ("rope_table", "rope_apply"), ("rope_apply_back",)
BUILT = (
    (
        Builder("conv_transpose_1d", conv_transpose_1d, conv_transpose_1d_samples, _MATRIX),
        Twin(transposed_1d),
    ),
    (
        Builder("conv_transpose_2d", conv_transpose_2d, conv_transpose_2d_samples, _MATRIX),
        Twin(called("conv_transpose_2d_p0")),
    ),
    (Builder("rope", rope, rope_samples, _TURNS), Twin(turned(""))),
    (Builder("rope_back", turned_back, rope_samples, _BACK), Twin(turned("_back"))),
)

# Ops whose gradient ggml has for all sources and samples; of others it aborts on some.
GRADIENTS = words("""
    add mul sqr sqrt log sin cos sum sum_rows mean repeat_back rms_norm scale cont reshape
    diag_mask_inf diag_mask_zero im2col pool_max abs neg relu silu exp expm1 softplus swiglu
""")

# Of the registry, but not in ggml.
WITHOUT = {
    "a gradient that ggml has not": """swiglu_back cumsum_back mul_mat_id_back out_prod_id
        conv_2d_back_w pool_avg_back upscale_back pad_back pad_reflect_1d_back roll_back solve_tri_t
        diag_back view_back narrow_back norm_back l2_norm_back group_norm_back rms_norm_mul_back
        rms_norm_mul_back_w gated_delta_net_back ssm_conv_back ssm_scan_back wkv_back""",
    "ggml's function for it aborts": "flash_attn_back",
    "ggml searches the windows again, pyggml has kept where each maximum was": "pool_max_back",
    "ggml has the order of its graph for it": "after",
    "several nodes in ggml": "mul_mat_add out_prod_add rms_norm_mul clip_norm",
    "LoRA's update within a product": """mul_mat_low_rank out_prod_low_rank
        out_prod_low_rank_add""",
    "ggml draws no random numbers": "dropout uniform_noise",
    "a loss of this trainer": """linear_cross_entropy linear_cross_entropy_by_row
        cross_entropy_rows cross_entropy_rows_back cross_entropy_by_row""",
    "a step of generation within the graph": """likeliest advance window_span chunk_span
        log_temperature""",
    "ggml has no Lion": "opt_step_lion",
    "ggml stops a gradient by its flags": "detach",
}
WITHOUT = {name: reason for reason, names in WITHOUT.items() for name in words(names)}
WITHOUT |= {
    name: "a gradient that follows from a formula"
    for name, op in OPS.items()
    if op.formula and GRADIENT in op.formula.sources and name not in TWINS
}
