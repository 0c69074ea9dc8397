"""Four neighbouring numbers at once: 16 bytes of float32, 8 of bfloat16; and eight.

A card moves most bytes a second where each thread moves 16 at a time. Places count numbers, and are
multiples of four.
"""

from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import address
from pyggml.backends.cuda.runtime.simulator import on_card
from pyggml.backends.kit.places import span
from pyggml.graph.tensor import Tensor


@device
def load_four(x, i):
    """Numbers i to i + 3 of x (float32)."""
    a, b, c, d = ptx.load_words(x, 4 * i)
    return ptx.as_float(a), ptx.as_float(b), ptx.as_float(c), ptx.as_float(d)


@device
def load_four_bf16(x, i):
    """The same of bfloat16 (uint16), as float32."""
    low, high = ptx.load_pair(x, 2 * i)
    half, top = np.uint32(16), np.uint32(0xFFFF0000)
    return (
        ptx.as_float(low << half), ptx.as_float(low & top),
        ptx.as_float(high << half), ptx.as_float(high & top),
    )  # fmt: skip


@device
def sum_of_fours(x, first, n, times):
    """Σ over runs of n fours, `times` of them side by side: four `first`, counted in one run after
    the other, of those that all runs add up to."""
    run = np.uint32(first) // n
    at = np.int64(run * n * times + (np.uint32(first) - run * n))
    a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for _ in range(times):
        more = load_four(x, 4 * at)
        a, b, c, d = a + more[0], b + more[1], c + more[2], d + more[3]
        at += np.int64(n)
    return a, b, c, d


@device
def store_four(y, i, a, b, c, d):
    """y[i …] = four numbers, float32."""
    ptx.store_words(y, 4 * i, ptx.bits_of(a), ptx.bits_of(b), ptx.bits_of(c), ptx.bits_of(d))


@device
def load_eight(x, at):
    return load_four(x, at) + load_four(x, at + 4)


@device
def load_eight_bf16(x, at):
    w = ptx.load_words(x, 2 * at)
    top, half = np.uint32(0xFFFF0000), np.uint32(16)
    return (
        ptx.as_float(w[0] << half), ptx.as_float(w[0] & top),
        ptx.as_float(w[1] << half), ptx.as_float(w[1] & top),
        ptx.as_float(w[2] << half), ptx.as_float(w[2] & top),
        ptx.as_float(w[3] << half), ptx.as_float(w[3] & top),
    )  # fmt: skip


def eights(in_bf16: bool) -> Any:
    """What reads eight numbers of an array from a multiple of eight on, as float32."""
    return load_eight_bf16 if in_bf16 else load_eight


def loader(in_bf16: bool) -> Any:
    """What reads four numbers of an array, of bfloat16 or else of float32, as float32."""
    return load_four_bf16 if in_bf16 else load_four


def storer(in_bf16: bool) -> Any:
    """What writes four float32 to such an array."""
    return ptx.put_four_bf16 if in_bf16 else store_four


def vectorizable(*arrays: Any) -> bool:
    """Whether all arrays begin and end where four numbers can be moved at once."""
    return all(a.size % 4 == 0 and start_of(a) % (4 * a.dtype.itemsize) == 0 for a in arrays)


def lies_in_fours(*tensors: Tensor) -> bool:
    """The same of tensors that have no memory yet: owners begin at multiples of 64 bytes."""
    sizes = ((t, t.dtype.numpy.itemsize) for t in tensors)
    return all(span(t) // n % 4 == 0 and t.offset % (4 * n) == 0 for t, n in sizes)


@on_card
def start_of(array: Any) -> int:
    """The address; 0 of an array on the host, which stands for one that begins as it must."""
    return address(array) if hasattr(array, "__cuda_array_interface__") else 0
