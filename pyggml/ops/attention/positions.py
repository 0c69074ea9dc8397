"""What every device computes of positions before a graph runs: the frequencies of rotary positions
(see pyggml.ops.attention.rope_table), ALiBi's slopes, and what scores read besides."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log, pi
from typing import Any, TypeVar

import numpy as np

ONE_POSITION, FOUR_POSITIONS = ("normal", "neox"), ("mrope", "imrope", "vision")
Sections = tuple[int, ...]
Memory = TypeVar("Memory")  # of a device


def n_pairs(mode: str, n_dims: int) -> int:
    """How many pairs of features a head turns."""
    return n_dims if mode == "vision" else n_dims // 2


def positions_of_pairs(mode: str, n_dims: int, sections: Sections) -> tuple[np.ndarray, np.ndarray]:
    """For each pair: which of the positions it uses, and e."""
    i = np.arange(n_pairs(mode, n_dims))
    if mode in ONE_POSITION:
        return np.zeros_like(i), i
    sector = i % sum(sections)
    if mode == "imrope":
        lasts = sector < 3 * np.array([*sections[:3]])[sector % 3]
        return np.where(lasts, sector % 3, 3), i
    starts = np.cumsum((0, *sections[:3]))
    axis = np.digitize(sector, starts[1:])
    return axis, sector - starts[axis] if mode == "vision" else i


def _turning_dim(turns: float, n_dims: int, n_ctx_orig: int, freq_base: float) -> float:
    """The pair, as a real number, that makes this many turns within n_ctx_orig positions."""
    return n_dims * log(n_ctx_orig / (turns * 2 * pi)) / (2 * log(freq_base))


def frequencies(
    exponents: np.ndarray,
    *,
    n_dims: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
    n_ctx_orig: int,
    **_: Any,
) -> tuple[np.ndarray, float]:
    """(radians per position of each pair, float64, without freq_factors; m)."""
    radians = np.power(float(freq_base), -2.0 * exponents / n_dims)
    if not ext_factor:
        return radians * freq_scale, attn_factor
    low = max(0, floor(_turning_dim(beta_fast, n_dims, n_ctx_orig, freq_base)))
    high = min(n_dims - 1, ceil(_turning_dim(beta_slow, n_dims, n_ctx_orig, freq_base)))
    i = np.arange(len(exponents))
    mix = ext_factor * (1 - np.clip((i - low) / max(0.001, high - low), 0, 1))
    return radians * (freq_scale * (1 - mix) + mix), attn_factor * (1 + 0.1 * log(1 / freq_scale))


def rotations(**params: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Of a rope's parameters: which position each pair uses, its radians by position (float64),
    and the factor of cosines and sines."""
    axes, exponents = positions_of_pairs(params["mode"], params["n_dims"], params["sections"])
    return axes, *frequencies(exponents, **params)


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """ALiBi's slope of each head (n_head,) float64; ones if max_bias is not positive."""
    if max_bias <= 0:
        return np.ones(n_head)
    h = np.arange(n_head)
    m = 2 ** (n_head.bit_length() - 1)
    exponent = np.where(h < m, (h + 1) / m, (2 * (h - m) + 1) / (2 * m))
    return np.asarray(np.exp2(-max_bias * exponent))


def score_tables(
    params: Mapping[str, Any],
    given: Sequence[Memory],
    n_heads: int,
    constant: Callable[[np.ndarray], Memory],
    lowest: float = -np.inf,
) -> tuple[Memory, Memory, Memory]:
    """(mask, slopes, sinks) of scores on a device, float32.

    given: the mask if params["masked"], then the sinks if there are any. In their place stand
    tables of the same type: the slopes, which nobody reads as a mask, and sinks that are `lowest`.
    """
    tables = list(given)
    slopes = constant(alibi_slopes(n_heads, params["max_bias"]).astype(np.float32))
    mask = tables.pop(0) if params["masked"] else slopes
    sinks = tables[0] if tables else constant(np.full(n_heads, lowest, np.float32))
    return mask, slopes, sinks
