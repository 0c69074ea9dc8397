"""A script: the kernel of products of few rows (gemm/few_rows.py), each thread a thread of Python.

Numba's simulator has no warps. Here threads of a warp exchange numbers at barriers of 32, and the
card's instructions are functions of NumPy. It prints, for each product, what it is and its error.
"""

import os
import sys
import threading
import traceback
from types import SimpleNamespace

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np

from pyggml.backends.cuda import driver

sys.setswitchinterval(1e-4)
LANES = 32
own = threading.local()  # of a thread: what `cuda` has, and its barriers


class Cuda:
    """What kernels ask of numba.cuda."""

    def __getattr__(self, name):
        return getattr(own, name)

    def syncthreads(self):
        own.block.wait()

    def syncwarp(self):
        own.warp.barrier.wait()

    def shfl_xor_sync(self, _mask, x, step):
        own.warp.slots[own.lane] = x
        own.warp.barrier.wait()
        found = own.warp.slots[own.lane ^ step]
        own.warp.barrier.wait()
        return found


driver.cuda = Cuda()
driver.device = lambda function: function
driver.kernel = lambda function, **_: function
driver.most_shared = lambda: 227 << 10

# The modules below take `cuda`, `device` and `kernel` from the driver when they are imported.
from pyggml.backends.cuda import byte_ptx, ptx, warp  # noqa: E402


def word_of(raw):
    return np.uint32(int.from_bytes(bytes(raw), "little"))


def bytes_of(word):
    return (int(word) & 0xFFFFFFFF).to_bytes(4, "little")


def words_at(n):
    def load(memory, at):
        assert at % (4 * n) == 0, f"{4 * n} bytes are read at {at}"
        found = tuple(word_of(memory[at + 4 * i : at + 4 * i + 4]) for i in range(n))
        return found if n > 1 else found[0]

    return load


def put(memory, at, *words):
    assert at % (4 * len(words)) == 0, f"{4 * len(words)} bytes are written at {at}"
    memory[at : at + 4 * len(words)] = np.frombuffer(b"".join(map(bytes_of, words)), np.uint8)


def copy_16(memory, to, source, at, n):
    assert at % 16 == 0 and to % 16 == 0, f"16 bytes are copied from {at} to {to}"
    piece = np.zeros(16, np.uint8)
    piece[:n] = source[at : at + int(n)]
    memory[to : to + 16] = piece


def copier(n_bytes):
    def copy(memory, to, source, at):
        for i in range(0, n_bytes - 16 * own.lane, 512):
            copy_16(memory, to + i, source, at + i, 16)

    return copy


def pick_bytes(low, high, which):
    both = bytes_of(low) + bytes_of(high)
    return word_of(both[int(which) >> 4 * i & 7] for i in range(4))


def dot_bytes(a, b, c):
    pairs = zip(*(np.frombuffer(bytes_of(w), np.int8).tolist() for w in (a, b)), strict=True)
    return np.int32(int(c) + sum(x * y for x, y in pairs))


def warp_sum(x):
    for step in (16, 8, 4, 2, 1):
        x += driver.cuda.shfl_xor_sync(0, x, step)
    return x


ptx.commit_copies = ptx.await_copies = lambda: None
ptx.copy_16 = copy_16
ptx.as_float = lambda word: np.uint32(int(word)).view(np.float32)
ptx.bits_of = lambda x: np.float32(x).view(np.uint32)
warp.warp_sum = warp_sum
byte_ptx.shared_word, byte_ptx.shared_pair, byte_ptx.shared_words = map(words_at, (1, 2, 4))
byte_ptx.put_shared_pair = byte_ptx.put_shared_words = put
byte_ptx.half_of = lambda word: np.uint16(int(word) & 0xFFFF).view(np.float16).astype("f4")
byte_ptx.nearest = lambda x: np.int32(np.rint(x))
byte_ptx.copier, byte_ptx.pick_bytes, byte_ptx.dot_bytes = copier, pick_bytes, dot_bytes

# After the instructions are this file's own.
from pyggml.backends.cuda.gemm import few_rows  # noqa: E402
from pyggml.dtypes import DTYPES  # noqa: E402
from pyggml.quants import dequantize, quantize  # noqa: E402

# Few blocks of few warps, so that each has several chunks.
few_rows._FEWEST_WARPS = few_rows._MOST_WARPS = 2
few_rows._BLOCKS = 4


class Warp:
    def __init__(self):
        self.barrier, self.slots = threading.Barrier(LANES), [0] * LANES


def run_block(kernel, arguments, block, grid, n_threads, n_bytes):
    memory, failures = np.full(n_bytes, 0xA5, np.uint8), []
    barrier, warps = threading.Barrier(n_threads), [Warp() for _ in range(n_threads // LANES)]

    def shared_array(_n, dtype):
        return memory if dtype is np.uint32 else memory.view(dtype)

    def run(thread):
        own.threadIdx, own.blockDim = SimpleNamespace(x=thread), SimpleNamespace(x=n_threads)
        own.blockIdx, own.gridDim = SimpleNamespace(x=block), SimpleNamespace(x=grid)
        own.shared, own.block = SimpleNamespace(array=shared_array), barrier
        own.warp, own.lane = warps[thread // LANES], thread % LANES
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
        except threading.BrokenBarrierError:
            pass
        except Exception:  # of whatever kind: it is printed, and the threads that wait are let go
            failures.append(traceback.format_exc())
            for each in (barrier, *(w.barrier for w in warps)):
                each.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n_threads)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        sys.exit(failures[0])


def launch(parts, a, rows, k, norm=None):
    kernel, (grid, n_threads, _, n_bytes), arguments, _ = few_rows.products(
        parts, a, rows, k, None, norm
    ).arguments
    for block in range(grid):
        run_block(kernel, arguments, block, grid, n_threads, n_bytes)


rng = np.random.default_rng(1)


def numbers(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def matrix(kind, n, k):
    packed = quantize(numbers(n, k), kind)
    return packed.reshape(-1), dequantize(packed, kind).reshape(n, k).astype(float)


def show(what, found, wanted):
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    sys.stdout.write(f"{what} {error:.2e}\n")


def part_of(kind, n, k, rows, **more):
    packed, plain = matrix(kind, n, k)
    out = np.full(rows * n, np.nan, np.float32)
    return few_rows.Part(out, packed, DTYPES[kind], n, **more), plain


def added(kind, n, k, rows):
    a, before = numbers(rows, k), numbers(rows, n)
    part, plain = part_of(kind, n, k, rows, added=before.reshape(-1))
    launch([part], a.reshape(-1), rows, k)
    show(f"{kind} {n} x {k}, {rows} rows", part.out.reshape(rows, n), a @ plain.T + before)


def normed(kinds, k, rows):
    a, weights, out = 3 * numbers(rows, k), numbers(k), np.full(rows * k, np.nan, np.float32)
    wanted = a / np.sqrt((a.astype(float) ** 2).mean(1, keepdims=True) + 1e-3) * weights
    (first, w), (second, v) = (
        part_of(kind, n, k, rows) for kind, n in zip(kinds, (9, 5), strict=True)
    )
    norm = few_rows.Norm(weights, np.float32(1e-3), out, True)
    launch([first, second], a.reshape(-1), rows, k, norm)
    show(f"first of {kinds}", first.out.reshape(rows, -1), wanted @ w.T)
    show(f"second of {kinds}", second.out.reshape(rows, -1), wanted @ v.T)
    show(f"norm before {kinds}", out.reshape(rows, k), wanted)


def gated(k=768, n=7):
    a, (up, plain_up) = numbers(k), matrix("Q6_K", n, k)
    part, plain = part_of("Q6_K", n, k, 1, up=up)
    launch([part], a, 1, k)
    gate = plain @ a
    show("gated", part.out, gate / (1 + np.exp(-gate)) * (plain_up @ a))


added("Q8_0", 70, 256, 1)
added("Q4_K", 45, 256, 1)
added("Q8_0", 13, 160, 3)
added("Q6_K", 9, 768, 2)
normed(("Q4_K", "Q6_K"), 512, 2)
normed(("Q8_0", "Q8_0"), 160, 1)  # groups of no full warp; both parts run the same code
gated()
