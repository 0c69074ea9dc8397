"""Every family of ops is imported here, so that OPS is complete; the builders are exported."""

from pyggml.graph.op import OPS
from pyggml.ops.activation.activation import (
    elu,
    gelu,
    gelu_back,
    gelu_erf,
    gelu_quick,
    hardsigmoid,
    hardswish,
    leaky_relu,
    relu,
    sigmoid,
    silu,
    silu_back,
    softplus,
    tanh,
    xielu,
)
from pyggml.ops.activation.glu import (
    geglu,
    geglu_erf,
    geglu_quick,
    reglu,
    swiglu,
    swiglu_back,
    swiglu_clamp,
    swiglu_oai,
)
from pyggml.ops.arithmetic.arith import add, add1, add_inplace, div, mul, neg, scale, sub
from pyggml.ops.arithmetic.dropout import dropout, uniform_noise
from pyggml.ops.arithmetic.reduce import (
    argmax,
    argsort,
    count_equal,
    cumsum,
    mean,
    sum_,
    sum_rows,
    top_k,
)
from pyggml.ops.arithmetic.temperature import log_temperature
from pyggml.ops.arithmetic.unary import (
    abs_,
    ceil,
    clamp,
    cos,
    exp,
    expm1,
    floor,
    log,
    round_,
    sgn,
    sin,
    sqr,
    sqrt,
    step,
    trunc,
)
from pyggml.ops.attention.attention import flash_attn_ext
from pyggml.ops.attention.mask import chunk_span, diag_mask_inf, diag_mask_zero, window_span
from pyggml.ops.attention.rope import rope, rope_apply, rope_apply_back
from pyggml.ops.attention.rope_table import rope_table
from pyggml.ops.attention.softmax import soft_max, soft_max_back
from pyggml.ops.experts import add_id, mul_mat_id, mul_mat_id_back, out_prod_id
from pyggml.ops.image.conv import conv_2d_direct, conv_2d_dw, conv_transpose_1d, conv_transpose_2d
from pyggml.ops.image.embedding import arange, timestep_embedding
from pyggml.ops.image.im2col import col2im_1d, conv_1d, conv_2d, im2col
from pyggml.ops.image.pool import pool_1d, pool_2d
from pyggml.ops.image.upscale import upscale
from pyggml.ops.layout.cpy import cpy
from pyggml.ops.layout.layout import cont, dup, permute, reshape, transpose
from pyggml.ops.layout.narrow import concat, halve, narrow, split
from pyggml.ops.layout.pad import pad, pad_reflect_1d, roll
from pyggml.ops.layout.repeat import repeat, repeat_back
from pyggml.ops.layout.rows import get_rows, get_rows_back
from pyggml.ops.layout.set_rows import set_rows
from pyggml.ops.layout.triangular import diag, fill, fill_inplace, solve_tri, tri
from pyggml.ops.layout.view import acc, after, detach, set_, view
from pyggml.ops.loss.head import (
    linear_cross_entropy,
    linear_cross_entropy_by_row,
    linear_soft_cross_entropy,
)
from pyggml.ops.loss.loss import (
    cross_entropy_by_row,
    cross_entropy_loss,
    cross_entropy_loss_back,
    cross_entropy_rows,
    cross_entropy_rows_back,
)
from pyggml.ops.loss.soft import soft_cross_entropy
from pyggml.ops.next_token import advance, likeliest
from pyggml.ops.norm.norm import (
    group_norm,
    group_norm_back,
    l2_norm,
    l2_norm_back,
    norm,
    norm_back,
    rms_norm,
    rms_norm_back,
)
from pyggml.ops.norm.norm_mul import rms_norm_mul, rms_norm_mul_back, rms_norm_mul_back_w
from pyggml.ops.optim import (
    accumulate,
    clip_factor,
    clip_norm,
    opt_step_adamw,
    opt_step_lion,
    opt_step_sgd,
)
from pyggml.ops.optim_8bit import opt_step_adamw_8bit
from pyggml.ops.optim_half import opt_step_half
from pyggml.ops.product.gated import mul_mat_gated
from pyggml.ops.product.low_rank import mul_mat_low_rank, out_prod_low_rank, out_prod_low_rank_add
from pyggml.ops.product.matmul import mul_mat, mul_mat_add, out_prod, out_prod_add
from pyggml.ops.product.rescale import rescale
from pyggml.ops.product.scale_slopes import (
    rescale_back,
    rescale_back_out_prod,
    rescale_back_out_prod_id,
    rescale_back_rows,
)
from pyggml.ops.recurrent.delta_net import gated_delta_net
from pyggml.ops.recurrent.ssm_conv import ssm_conv
from pyggml.ops.recurrent.ssm_scan import ssm_scan
from pyggml.ops.recurrent.wkv import gated_linear_attn, rwkv_wkv6, rwkv_wkv7

__all__ = [
    "OPS", "abs_", "acc", "accumulate", "add", "add1", "add_id", "add_inplace", "advance", "after",
    "arange", "argmax", "argsort", "ceil", "chunk_span", "clamp", "clip_factor", "clip_norm",
    "col2im_1d",
    "concat", "cont", "conv_1d", "conv_2d", "conv_2d_direct", "conv_2d_dw", "conv_transpose_1d",
    "conv_transpose_2d", "cos", "count_equal", "cpy", "cross_entropy_by_row", "cross_entropy_loss",
    "cross_entropy_loss_back", "cross_entropy_rows", "cross_entropy_rows_back", "cumsum", "detach",
    "diag", "diag_mask_inf", "diag_mask_zero", "div", "dropout", "dup", "elu", "exp", "expm1",
    "fill", "fill_inplace", "flash_attn_ext", "floor", "gated_delta_net", "gated_linear_attn",
    "geglu", "geglu_erf", "geglu_quick", "gelu", "gelu_back", "gelu_erf", "gelu_quick", "get_rows",
    "get_rows_back", "group_norm", "group_norm_back", "halve", "hardsigmoid", "hardswish", "im2col",
    "l2_norm", "l2_norm_back", "leaky_relu", "likeliest", "linear_cross_entropy",
    "linear_cross_entropy_by_row", "linear_soft_cross_entropy", "log", "log_temperature", "mean",
    "mul", "mul_mat", "mul_mat_add", "mul_mat_gated", "mul_mat_id", "mul_mat_id_back",
    "mul_mat_low_rank", "narrow", "neg", "norm", "norm_back", "opt_step_adamw",
    "opt_step_adamw_8bit", "opt_step_half", "opt_step_lion", "opt_step_sgd", "out_prod",
    "out_prod_add", "out_prod_id", "out_prod_low_rank", "out_prod_low_rank_add", "pad",
    "pad_reflect_1d", "permute", "pool_1d", "pool_2d", "reglu", "relu", "repeat", "repeat_back",
    "rescale", "rescale_back", "rescale_back_out_prod", "rescale_back_out_prod_id",
    "rescale_back_rows", "reshape", "rms_norm", "rms_norm_back", "rms_norm_mul",
    "rms_norm_mul_back", "rms_norm_mul_back_w", "roll", "rope", "rope_apply", "rope_apply_back",
    "rope_table", "round_", "rwkv_wkv6", "rwkv_wkv7", "scale", "set_", "set_rows", "sgn", "sigmoid",
    "silu", "silu_back", "sin", "soft_cross_entropy", "soft_max", "soft_max_back", "softplus",
    "solve_tri", "split", "sqr", "sqrt", "ssm_conv", "ssm_scan", "step", "sub", "sum_", "sum_rows",
    "swiglu", "swiglu_back", "swiglu_clamp", "swiglu_oai", "tanh", "timestep_embedding", "top_k",
    "transpose", "tri", "trunc", "uniform_noise", "upscale", "view", "window_span", "xielu",
]  # fmt: skip
