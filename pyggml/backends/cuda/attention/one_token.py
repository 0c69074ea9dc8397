"""The heads of the one token that attention is for, made in its kernel: normalised and turned.

Each warp makes its queries, and the token's key, by itself, and takes that for what the cache has
in the token's row; one block puts key and value there. A lane has four numbers of a head of 128.
"""

from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code.fours import lies_in_fours, load_four
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.ops.norm.norm_rope import HEAD, angles, normed_and_turned
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.graph.dtypes import F16
from pyggml.graph.tensor import Tensor

_FOUR = 4  # numbers of a lane


class Token(NamedTuple):
    """What its heads are made of.

    q, k, v   results of products: numbers of all heads
    weights   of the norms of queries and of keys
    eps       what each of the norms adds
    table     (2, 64): cosines and sines of its position
    ids       (1,): its row in the caches
    k_cache, v_cache, n_rows
    fault     the cell, and the number if there is no such row
    """

    q: Any
    k: Any
    v: Any
    weights: tuple[Any, Any]
    eps: tuple[np.float32, np.float32]
    table: Any
    ids: Any
    k_cache: Any
    v_cache: Any
    n_rows: int
    fault: tuple[Any, int]


def serves(head_size: int, n_pairs: int, *sources: Tensor) -> bool:
    """Whether all pairs of a head are turned, and all lies well."""
    return HAS_PTX and head_size == HEAD and 2 * n_pairs == HEAD and lies_in_fours(*sources)


@device
def _put(into, to, four):
    into[to], into[to + 1], into[to + 2], into[to + 3] = four


@device
def _four_of(held, at):
    return held[at], held[at + 1], held[at + 2], held[at + 3]


@device
def _read(own, token, key_head):
    c = _FOUR * (cuda.threadIdx.x & 31)
    at = key_head * HEAD + c
    _put(own, 0, load_four(token.k, at))
    _put(own, _FOUR, load_four(token.v, at))
    of_q, of_k = token.weights
    turns = angles(token.table, 0, 1, 1), load_four(of_q, c), load_four(of_k, c)
    return token.ids[0], turns


@device
def _keep(own, token, row, key_head, writes):
    if not writes:
        return
    if not 0 <= row < token.n_rows:
        cuda.atomic.max(token.fault[0], 0, token.fault[1])
    else:
        heads = token.k.size // HEAD
        at = (np.int64(row) * heads + key_head) * HEAD + _FOUR * (cuda.threadIdx.x & 31)
        for i in range(_FOUR):
            token.k_cache[np.uint64(at + i)] = own[i]
            token.v_cache[np.uint64(at + i)] = own[_FOUR + i]


def _rounder(key_type: str) -> Any:
    """A number as a cache of this type holds it."""
    if key_type == F16.name:

        @device
        def round_to_half(x):
            return np.float32(np.float16(x))

        return round_to_half

    @device
    def same(x):
        return x

    return same


def of_token(key_type: str, n_together: int, batch: int) -> tuple[Any, Any, Any, Any]:
    """The device functions of a block for `n_together` heads and keys by the `batch`.

    read(own, token, key_head)   the token's key and value, as they are; gives its row, and `turns`
    make(held, own, token, turns)                queries and key are made of what was read
    keep(own, token, row, key_head, writes)      if `writes`, the row gets key and value
    replace(keys, values, own, row, key, last)   those of the token, if it is in a batch of keys
    """
    round_to_half = _rounder(key_type)

    @device
    def make(held, own, token, turns):
        (cos, sin), of_q, of_k = turns
        for g in range(n_together):
            q = _four_of(held, _FOUR * g)
            _put(held, _FOUR * g, normed_and_turned(q, of_q, cos, sin, token.eps[0]))
        _put(own, 0, normed_and_turned(_four_of(own, 0), of_k, cos, sin, token.eps[1]))
        for i in range(2 * _FOUR):
            own[i] = round_to_half(own[i])

    @device
    def replace(keys, values, own, row, key, last):
        if key <= row < np.int32(key + batch):
            for u in range(batch):
                if min(np.int32(key + u), np.int32(last - 1)) == row:
                    for i in range(_FOUR):
                        keys[u * _FOUR + i], values[u * _FOUR + i] = own[i], own[_FOUR + i]

    return _read, make, _keep, replace
