"""What a score is made of, and the tiles of exact attention.

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
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.simulator import on_card, small
from pyggml.backends.cuda.weights.readers import weight_of
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.graph.tensor import Tensor

WIDEST = 576  # numbers of a head
THREADS = small(128, 4)  # of a block
NO_KEYS = np.float32(1e30)  # the logarithm of a sum over no key, as on the CPU
MINUS_INF = np.float32(-np.inf)
ZERO, ONE = np.float32(0), np.float32(1)


@on_card
def tile_rows(head_size: int) -> int:
    """Rows of a tile, so that five tiles fit in a block's 48 KB of shared memory."""
    return 16 if head_size <= 128 else 8 if head_size <= 256 else 4


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


def sizes_of(node: Tensor, extras: tuple[Tensor, ...]) -> ScoreSizes:
    q, k = node.src[:2]
    masked, max_bias = node.params["masked"], node.params["max_bias"]
    n_masks = 0
    if masked:
        n_masks = extras[0].shape[0] if len(extras[0].shape) == 3 else 1
    has_slopes = masked or max_bias > 0
    steep_heads = 1 << (q.shape[1].bit_length() - 1) if has_slopes else 0
    return ScoreSizes(
        q.shape[0], k.shape[0], q.shape[1], k.shape[1], n_masks, len(extras) > masked, steep_heads
    )


def factors_of(node: Tensor) -> ScoreFactors:
    p, n_heads = node.params, node.src[0].shape[1]
    power = 1 << (n_heads.bit_length() - 1)
    bases = 2.0 ** (-p["max_bias"] / power), 2.0 ** (-p["max_bias"] / 2 / power)
    return ScoreFactors(*(np.float32(v) for v in (p["scale"], p["cap"], *bases)))


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
def tile_filler(name: str, rows: int, head_size: int) -> Any:
    """fill(tile, x, first, head, n, n_heads): rows first … of x (n, n_heads, D), 0 from n on."""
    load = key_loader(name)

    @device
    def fill(tile, x, first, head, n, n_heads):
        for e in range(cuda.threadIdx.x, rows * head_size, THREADS):
            i, c = e // head_size, e % head_size
            at = (np.int64(first + i) * n_heads + head) * head_size + c
            tile[i, c] = load(x, at) if first + i < n else ZERO

    return fill


@device
def dot_of(a, i, b, j, n):
    """Row i of tile a times row j of tile b."""
    total = ZERO
    for c in range(n):
        total += a[i, c] * b[j, c]
    return total
