"""Keys and values on their way to a lane: words as they lie in the cache, and the numbers in them.

A lane has four neighbouring numbers of every 128 of a head. Words are made numbers only when they
are needed, so that nothing waits for them before.
"""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.scores import ZERO, key_loader
from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.byte_ptx import half_of
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import LANES
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.graph.dtypes import F16, F32


def fours_of(head_size: int) -> int:
    """Of a head, by lane."""
    return -(-head_size // (4 * LANES))


@cache
def float_loader(name: str, vectorized: bool) -> Any:
    """load(x, at, c, head_size): numbers c to c + 3 of the head that begins at number `at`."""
    if vectorized and name == F32.name:

        @device
        def load_floats(x, at, c, head_size):
            return load_four(x, at + c)

        return load_floats
    load = key_loader(name)

    @device
    def one(x, at, c, head_size):
        return load(x, at + c) if c < head_size else ZERO

    @device
    def load_each(x, at, c, head_size):
        return (
            one(x, at, c, head_size), one(x, at, c + 1, head_size),
            one(x, at, c + 2, head_size), one(x, at, c + 3, head_size),
        )  # fmt: skip

    return load_each


@device
def _load_f16(x, at, c, head_size):
    return ptx.load_pair(x, 2 * (at + c))


@device
def _of_f16(raw, at):
    low, high, half = raw[at], raw[at + 1], np.uint32(16)
    return half_of(low), half_of(low >> half), half_of(high), half_of(high >> half)


@device
def _of_floats(raw, at):
    return raw[at], raw[at + 1], raw[at + 2], raw[at + 3]


@cache
def _words_of(name: str, head_size: int, vectorized: bool) -> tuple[int, Any, Any, Any]:
    """(words of four numbers, their type, read, numbers) of heads of a type.

    read(into, to, x, at, lane)   the words of a lane's numbers, of the head that begins at `at`;
                                  zeros past its end
    numbers(raw, at)              four numbers
    """
    fours, is_whole = fours_of(head_size), head_size % (4 * LANES) == 0
    is_raw = vectorized and name == F16.name and HAS_PTX
    n_words, kind = (2, np.uint32) if is_raw else (4, np.float32)
    load = _load_f16 if is_raw else float_loader(name, vectorized)
    numbers, nothing = _of_f16 if is_raw else _of_floats, (kind(0),) * n_words

    @device
    def read(into, to, x, at, lane):
        for i in range(fours):
            c = 4 * (lane + i * LANES)
            words = load(x, at, c, head_size) if is_whole or c < head_size else nothing
            for j in range(n_words):
                into[to + n_words * i + j] = words[j]

    return n_words, kind, read, numbers


def query_reader(head_size: int, vectorized: bool) -> Any:
    """read(into, to, x, at, lane): a lane's numbers of the head that begins at `at`, float32."""
    return _words_of(F32.name, head_size, vectorized)[2]


def keys_of(name: str, head_size: int, batch: int, vectorized: bool) -> tuple[Any, Any, Any]:
    """((words of four numbers, their type), fetch, unpack) for keys of a type by the batch.

    fetch(raw_k, raw_v, k, v, key, last, key_head, sizes, lane)  a batch, if there is one
    unpack(keys, values, raw_k, raw_v)                           its numbers, as float32
    """
    n_words, kind, read, numbers = _words_of(name, head_size, vectorized)
    fours = fours_of(head_size)

    @device
    def fetch(raw_k, raw_v, k, v, key, last, key_head, sizes, lane):
        if key < last:
            pitch = np.uint64(np.uint32(sizes.n_key_heads * head_size))  # a product of 32 bits
            for u in range(batch):
                row = np.uint32(min(np.int32(key + u), np.int32(last - 1)))
                at = np.int64(np.uint64(row) * pitch) + key_head * head_size
                read(raw_k, u * fours * n_words, k, at, lane)
                read(raw_v, u * fours * n_words, v, at, lane)

    @device
    def unpack(keys, values, raw_k, raw_v):
        for i in range(batch * fours):
            key, value = numbers(raw_k, n_words * i), numbers(raw_v, n_words * i)
            for j in range(4):
                keys[4 * i + j], values[4 * i + j] = key[j], value[j]

    return (n_words, kind), fetch, unpack
