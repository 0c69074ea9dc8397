"""The numbers that training starts from, by a tensor's name.

Matrices and tables are normal of standard deviation 0.02 (GPT-2; `initializer_range` of most
configurations in transformers), or that of their architecture. Where a paper has it so, those that
write into the residual stream are smaller by √(2 · layers).
"""

import re
from collections.abc import Callable
from zlib import crc32

import numpy as np

from pyggml.fresh import rwkv
from pyggml.graph.tensor import Shape

Draw = Callable[[Shape, np.random.Generator], np.ndarray]

USUAL = 0.02
# `initializer_range` of the published configurations that have another.
DEVIATIONS = {"deepseek": 0.006, "deepseek2": 0.006, "deepseek2-ocr": 0.006, "kimi-linear": 0.006}
# Radford et al. 2019, section 2.3; bigcode's configurations follow it.
SMALLER_RESIDUALS = ("gpt2", "starcoder", "starcoder2", "codeshell")
RESIDUALS = re.compile(r"(attn_output|ffn_down(_exps|_shexp)?|ssm_out)\.weight$")
# Made of a trained Qwen 2, whose attention is exchanged (Goldstein et al. 2025, arXiv:2505.03005).
WITHOUT = ("rwkv6qwen2", "arwkv7")


def _full(value: float) -> Draw:
    return lambda shape, rng: np.full(shape, value, np.float32)


def _decay(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """-exp(A_log). Mamba: −1 … −n along the states of each channel (S4D's real start; Gu, Dao 2023,
    section 3.6). Mamba 2 and delta nets: one of each head, −1 to −16 (Dao, Gu 2024)."""
    if len(shape) == 2 and shape[1] > 1:
        return np.broadcast_to(-np.arange(1, shape[1] + 1, dtype=np.float32), shape).copy()
    return -rng.uniform(1, 16, shape).astype(np.float32)


def _step_size(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """The bias under softplus of step sizes from 0.001 to 0.1 (Gu, Dao 2023, section 3.6)."""
    step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
    return (step + np.log(-np.expm1(-step))).astype(np.float32)


def _convolution(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Uniform in ±1/√width, as PyTorch's Conv1d of a filter for each channel."""
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def _quarter_turned(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Factors of the periods of rotary pairs: Gemma 4 turns a quarter of them where it has no
    window (`partial_rotary_factor` of its configurations); the others stand still."""
    return np.where(np.arange(shape[0]) < shape[0] // 4, 1, 1e30).astype(np.float32)


# The first that matches the name without "blk.N." counts; a matrix is in none of them.
_RULES: tuple[tuple[re.Pattern[str], Draw], ...] = tuple(
    (re.compile(pattern), draw)
    for pattern, draw in (
        (r"ssm_a$", _decay),
        (r"ssm_dt\.bias$", _step_size),
        (r"ssm_d$", _full(1)),
        (r"rope_freqs\.weight$", _quarter_turned),
        (r"(ssm_conv1d(_[qkv])?|shortconv\.conv)\.weight$", _convolution),
        (r"(layer_output_scale\.weight|\.scale)$", _full(1)),
        (r"norm.*\.bias$|\.bias$|exp_probs_b$", _full(0)),
        (r"(altup_correct_scale|attn_sinks)\.weight$", _full(0)),
        (r"norm", _full(1)),
    )
)


def initial(
    name: str,
    shape: Shape,
    architecture: str,
    n_layer: int,
    seed: int = 0,
    head_size: int = rwkv.HEAD_SIZE,
) -> np.ndarray:
    """A tensor's first numbers, float32. They depend on its name, its shape and the seed, of RWKV
    also on the number of layers and the size of a head."""
    rng = np.random.default_rng([crc32(name.encode()), seed])
    own = re.sub(r"^blk\.\d+\.", "", name)
    if architecture in (rwkv.SIX, rwkv.SEVEN):
        layer = 0 if own == name else int(name.split(".")[1])
        part, depth = own.removesuffix(".weight"), (layer, n_layer)
        return rwkv.first_numbers(part, shape, architecture, depth, head_size, rng)
    for pattern, draw in _RULES:
        if pattern.search(own):
            return draw(shape, rng)
    deviation = DEVIATIONS.get(architecture, USUAL)
    if architecture in SMALLER_RESIDUALS and RESIDUALS.match(own):
        deviation *= (2 * n_layer) ** -0.5
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)
