"""How ggml builds each op of the registry, and which ops it has not, with the reason.

A builder gets the context, ggml's tensors of the op's sources, and its settings by name. It returns
ggml's result, followed by those of `saved` if ggml has them, or None for what ggml has not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ggml_attention import flash_attn_ext, rope_samples, soft_max, turn, turn_back
from ggml_cpu import longs, numbers
from ggml_images import (
    conv_2d_direct,
    conv_transpose_1d_samples,
    conv_transpose_2d_samples,
    im2col,
    im2col_back,
    pool,
    transposed_1d,
)
from ggml_memory import (
    get_rows,
    get_rows_back,
    inner,
    narrow,
    pad,
    permute,
    roll,
    rows,
    set_rows,
    upscale,
    view,
    write_window,
)
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
from pyggml.graph.op import Memory
from pyggml.ops import OPS, conv_transpose_1d, conv_transpose_2d, rope

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
    "acc": Twin(write_window("acc")),
    "set": Twin(write_window("set")),
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
    (Builder("rope", rope, rope_samples, _TURNS), Twin(turn(""))),
    (Builder("rope_back", turn_back, rope_samples, _BACK), Twin(turn("_back"))),
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
    "several nodes in ggml": """mul_mat_add mul_mat_gated out_prod_add get_rows_back_add
        rms_norm_mul clip_norm clip_factor opt_step_adamw_clipped opt_step_lion_clipped
        opt_step_sgd_clipped""",
    "LoRA's update within a product": """mul_mat_low_rank out_prod_low_rank
        out_prod_low_rank_add""",
    "ggml trains no scales of blocks": """rescale rescale_back rescale_back_rows
        rescale_back_out_prod rescale_back_out_prod_id rescale_back_linear_cross_entropy""",
    "ggml draws no random numbers": "dropout uniform_noise",
    "a loss of this trainer": """linear_cross_entropy linear_cross_entropy_by_row
        linear_cross_entropy_back_w
        cross_entropy_rows cross_entropy_rows_back cross_entropy_by_row
        linear_soft_cross_entropy soft_cross_entropy""",
    "a step of generation within the graph": """likeliest advance window_span chunk_span
        log_temperature""",
    "ggml has no Lion": "opt_step_lion",
    "ggml fills a sum with zeros before": "accumulate",
    "ggml keeps moments in float32 alone": "opt_step_adamw_8bit",
    "ggml steps on float32 alone": """opt_step_adamw_half opt_step_adamw_8bit_half
        opt_step_lion_half opt_step_sgd_half""",
    "ggml stops a gradient by its flags": "detach",
}
WITHOUT = {name: reason for reason, names in WITHOUT.items() for name in words(names)}
WITHOUT |= {
    name: "a gradient that follows from a formula"
    for name, op in OPS.items()
    if op.formula and GRADIENT in op.formula.sources and name not in TWINS
}
