"""What a score is made of, and what ends a row of scores.

    z = cap·tanh(scale·q·k / cap) + bias        (without a cap: scale·q·k + bias)

bias is slope·mask, or with ALiBi and no mask slope·(j − the last key that the query sees). Sizes:
T queries of H heads, S keys of HK heads, D numbers to a head; query head h uses key head
h // (H / HK). Heads of values and results may have another number, DV.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code.formulas import softcap
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.weights.readers import weight_of
from pyggml.graph.dtypes import DTYPES, F32

WIDEST = 576  # numbers of a head
NO_KEYS = np.float32(1e30)  # the logarithm of a sum over no key, as on the CPU
MINUS_INF = np.float32(-np.inf)
ZERO, ONE = np.float32(0), np.float32(1)


class ScoreSizes(NamedTuple):
    """Whole numbers that every kernel gets."""

    n_queries: int
    n_keys: int
    n_heads: int
    n_key_heads: int
    n_masks: int  # 0: no mask
    has_sinks: bool
    steep_heads: int  # heads whose slope is a power of `ScoreFactors.steep`; 0: no slopes


class ScoreFactors(NamedTuple):
    """Floats that every kernel gets."""

    scale: np.float32
    cap: np.float32  # 0: none
    steep: np.float32  # ALiBi's bases
    flat: np.float32


def scores_of(
    site: CudaSite, n_sources: int, numbers: Any
) -> tuple[ScoreSizes, ScoreFactors, Any, Any]:
    """The sizes and the factors, the mask and the sinks, in place of which `numbers`, any array in
    F32, stand where there are none. n_sources: of the node, before them."""
    node, p, extras = site.node, site.node.params, site.src[n_sources:]
    (n_queries, n_heads, _), (n_keys, n_key_heads, _) = (t.shape for t in node.src[:2])
    masked, max_bias, n_masks = p["masked"], p["max_bias"], 0
    if masked:
        shape = node.src[n_sources].shape
        n_masks = shape[0] if len(shape) == 3 else 1
    power, has_sinks = 1 << (n_heads.bit_length() - 1), len(extras) > masked
    steep_heads = power if masked or max_bias > 0 else 0
    sizes = ScoreSizes(n_queries, n_keys, n_heads, n_key_heads, n_masks, has_sinks, steep_heads)
    bases = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    factors = ScoreFactors(*(np.float32(x) for x in (p["scale"], p["cap"], *bases)))
    mask, sinks = extras[0] if masked else numbers, extras[-1] if has_sinks else numbers
    return sizes, factors, mask, sinks


def raw_numbers(site: CudaSite, *which: int) -> list[Any]:
    """These sources as `key_loader` reads them: floats, else bytes."""
    return [
        site.src[i] if site.node.src[i].dtype is F32 else site.src[i].view(np.uint8) for i in which
    ]


@device
def base_of(highest):
    """What scores are taken less of before they become powers: the highest; 0 if there is none."""
    return ZERO if highest == MINUS_INF else highest


@device
def keys_of_query(span, query, n_keys):
    """The first key that a query sees, and the one past the last."""
    return max(span[2 * query], 0), min(span[2 * query + 1], n_keys)


@device
def keys_of_queries(span, first, count, n_keys):
    """The first key that any of `count` queries sees, and the one past the last."""
    start, stop = n_keys, 0
    for query in range(first, first + count):
        one, other = keys_of_query(span, query, n_keys)
        if one < other:
            start, stop = min(start, one), max(stop, other)
    return start, stop


@device
def slope_of(head, sizes, factors):
    """ALiBi's slope of a head (Press et al. 2022); 1 for a mask without ALiBi."""
    if head < sizes.steep_heads:
        return np.float32(math.pow(factors.steep, np.float32(head + 1)))
    return np.float32(math.pow(factors.flat, np.float32(2 * (head - sizes.steep_heads) + 1)))


@device
def cap_score(dot, factors):
    """scale·dot, capped if there is a cap."""
    score = dot * factors.scale
    return softcap(score, factors.cap) if factors.cap > ZERO else score


@device
def bias_of(head, query, key, stop, mask, sizes, factors):
    """What is added to the score of a key that the query sees; `stop` is past its last key."""
    if sizes.steep_heads == 0:
        return ZERO
    slope = slope_of(head, sizes, factors)
    if sizes.n_masks == 0:
        return slope * np.float32(key - stop + 1)
    row = (head % sizes.n_masks) * sizes.n_queries + query
    return slope * mask[np.int64(row) * sizes.n_keys + key]


@cache
def key_loader(name: str) -> Any:
    """load(k, i): number i of keys or values of this type, as float32."""
    if name == F32.name:

        @device
        def load(k, i):
            return k[i]

        return load
    weight, kind = weight_of(name), DTYPES[name]
    block, block_bytes = kind.block, kind.block_bytes

    @device
    def load_packed(k, i):
        return weight(k, i // block * block_bytes, i % block)

    return load_packed


@cache
def row_ender(power: Any, logarithm: Any, unit: float = 1.0) -> Any:
    """end(top, weight, sink): what a row's sum is multiplied by, and the logarithm of its weight,
    with one more score. power, logarithm: to the scores' base, whose own logarithm is `unit`."""
    one = np.float32(unit)

    @device
    def end(top, weight, sink):
        highest = max(top, sink)
        base = base_of(highest)
        shrink = power(top - base)
        weight = weight * shrink + power(sink - base)
        if weight > ZERO:
            return shrink / weight, (base + logarithm(weight)) * one
        return ZERO, NO_KEYS

    return end
