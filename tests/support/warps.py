"""Twins in Python of instructions that Numba's simulator lacks: tensor cores, and what the lanes of
a warp exchange. With `as_instructions(monkeypatch)` the simulator runs kernels that need them.

Each thread of a block is a Python thread. The 32 lanes of a warp meet at a barrier, leave what they
bring, and read what the others brought.
"""

import sys
import threading
from collections import defaultdict

import numpy as np
from numba.cuda.simulator.kernelapi import FakeCUDAModule, FakeCUDAShared

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.graph.call import Call

LANES = 32


class _Meeting:
    def __init__(self):
        self.barrier, self.brought = threading.Barrier(LANES, timeout=300), [None] * LANES


_MEETINGS, _LOCK = defaultdict(_Meeting), threading.Lock()


def _me():
    return threading.current_thread().threadIdx.x


def _exchanged(value):
    """What each lane of the warp brings."""
    thread = threading.current_thread()
    block = thread.blockIdx
    with _LOCK:
        meeting = _MEETINGS[id(thread._manager), block.x, block.y, block.z, _me() // LANES]
    meeting.brought[_me() % LANES] = value
    meeting.barrier.wait()
    found = list(meeting.brought)
    meeting.barrier.wait()
    return found


def _bytes(array):
    """The bytes of an array in a kernel."""
    plain = getattr(array, "_item", array)
    return getattr(plain, "_ary", plain).reshape(-1).view(np.uint8)


def _load(n):
    def load(array, at):
        words = _bytes(array)[at : at + 4 * n].view(np.uint32)
        return tuple(words) if n > 1 else words[0]

    return load


def _store(array, at, *words):
    _bytes(array)[at : at + 4 * len(words)] = np.array(words, np.uint32).view(np.uint8)


def _half(x):
    """A float32 in bfloat16, ties to even."""
    bits = int(np.float32(x).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _two_bf16(first, second):
    return np.uint32(_half(first) | _half(second) << 16)


def _floats(word):
    return np.array([word << 16 & 0xFFFF0000, word & 0xFFFF0000], np.uint32).view(np.float32)


def _two_f16(first, second):
    return np.array([first, second], np.float16).view(np.uint32)[0]


def _of_f16(word):
    return np.array([word], np.uint32).view(np.float16).astype(np.float32)


def _add_tile(floats):
    def add(sums, i, a, b0, b1):
        """mma.sync.m16n8k16: of each lane 4g + t, see pyggml.backends.cuda.code.ptx."""
        left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
        for lane, (words, first, second) in enumerate(_exchanged((a, b0, b1))):
            g, t = divmod(lane, 4)
            for j, word in enumerate(words):
                at = 2 * t + 8 * (j // 2)
                left[g + 8 * (j % 2), at : at + 2] = floats(int(word))
            right[2 * t : 2 * t + 2, g] = floats(int(first))
            right[2 * t + 8 : 2 * t + 10, g] = floats(int(second))
        product = left @ right
        g, t = divmod(_me() % LANES, 4)
        for e in range(4):
            sums[i, e] += product[g + 8 * (e // 2), 2 * t + e % 2]

    return add


def _load_matrices(transposed):
    def load(shared, at, flip=0):
        places = _exchanged(int(at) ^ int(flip))
        g, t = divmod(_me() % LANES, 4)
        words = []
        for i in range(4):
            rows = [_bytes(shared)[p : p + 16].view(np.uint16) for p in places[8 * i : 8 * i + 8]]
            two = (rows[2 * t][g], rows[2 * t + 1][g]) if transposed else rows[g][2 * t : 2 * t + 2]
            words.append(np.uint32(int(two[0]) | int(two[1]) << 16))
        return tuple(words)

    return load


def _copy_16(shared, to, source, at, n_bytes):
    _bytes(shared)[to : to + 16] = 0
    _bytes(shared)[to : to + n_bytes] = _bytes(source)[at : at + n_bytes]


def _shfl_xor_sync(self, mask, value, step):
    return _exchanged(value)[(_me() % LANES) ^ step]


_simulated_array = FakeCUDAShared.array


def shared_array(self, shape, dtype, alignment=None):
    """One array for each line of a block's kernel.

    The simulator's own takes no alignment, and may give an array each to threads that ask at once.
    """
    if shape == 0:  # what the launch gives, one for all
        return _simulated_array(self, shape, np.dtype(dtype))
    caller = sys._getframe(1)
    with _LOCK:
        place = caller.f_code, caller.f_lineno
        return self._allocations.setdefault(place, np.empty(shape, dtype))


def _ballot_sync(self, mask, holds):
    return np.uint32(sum(1 << lane for lane, one in enumerate(_exchanged(holds)) if one))


def _nothing():
    """Copies are done at once."""


def as_instructions(monkeypatch):
    """Give the simulator the instructions, until the test ends."""
    twins = {
        "TENSOR_CORES": True,
        "load_pair": _load(2),
        "load_words": _load(4),
        "store_word": _store,
        "store_pair": _store,
        "store_words": _store,
        "two_bf16": _two_bf16,
        "bits_of": lambda x: np.float32(x).view(np.uint32),
        "power_of_two": lambda x: np.float32(2.0) ** np.float32(x),
        "reciprocal": lambda x: np.float32(1) / np.float32(x),
        "two_f16": _two_f16,
        "add_tile": _add_tile(_floats),
        "add_tile_of_f16": _add_tile(_of_f16),
        "load_matrices": _load_matrices(False),
        "load_flipped_matrices": _load_matrices(False),
        "load_matrices_transposed": _load_matrices(True),
        "load_flipped_matrices_transposed": _load_matrices(True),
        "copy_16": _copy_16,
        "commit_copies": _nothing,
        "await_copies": _nothing,
        "await_all_but_one": _nothing,
        "await_all_but_two": _nothing,
    }
    for name, twin in twins.items():
        monkeypatch.setattr(ptx, name, twin, raising=False)
    monkeypatch.setattr(FakeCUDAShared, "array", shared_array)
    monkeypatch.setattr(byte_ptx, "put_shared_words", _store)
    monkeypatch.setattr(FakeCUDAModule, "shfl_xor_sync", _shfl_xor_sync, raising=False)
    monkeypatch.setattr(FakeCUDAModule, "ballot_sync", _ballot_sync, raising=False)


def _matrix(array, rows, columns, step, is_transposed=False):
    """A matrix in an array of the simulator's, whose rows, or columns, are `step` numbers apart."""
    plain = getattr(array, "_ary", array)
    near, far = plain.itemsize, plain.itemsize * step
    strides = (near, far) if is_transposed else (far, near)
    return np.lib.stride_tricks.as_strided(plain, (rows, columns), strides)


def _numbers(matrix):
    if matrix.dtype != np.uint16:
        return matrix
    return (matrix.astype(np.uint32) << 16).view(np.float32)


def _multiply(stream, sizes, a, a_form, b, b_form, c, c_step, accumulate, factor=1.0):
    """cuBLAS's product, by NumPy: see pyggml.backends.cuda.gemm.cublas."""
    m, n, k = sizes
    forms = ((a, m, a_form), (b, n, b_form))
    left, right = (_matrix(x, rows, k, step, not near) for x, rows, (near, step) in forms)
    out = _matrix(c, m, n, c_step)

    def run():
        product = factor * (_numbers(left) @ _numbers(right).T)
        product += out if accumulate else 0
        out[...] = np.vectorize(_half)(product) if out.dtype == np.uint16 else product

    return Call(run)


def with_products(monkeypatch):
    """Let the simulator compute what cuBLAS does for LoRA's own ops."""
    from pyggml.backends.cuda.ops.lora import gradients, products

    for module in (gradients, products):
        monkeypatch.setattr(module, "multiply", _multiply)


def with_cublas(monkeypatch):
    """Let the simulator have cuBLAS, for all products."""
    from pyggml.backends.cuda import rewrites
    from pyggml.backends.cuda.gemm import cublas

    with_products(monkeypatch)
    monkeypatch.setattr(cublas, "multiply", _multiply)
    for module in (cublas, rewrites):
        monkeypatch.setattr(module, "has_cublas", lambda: True)
