"""Kernels of the card, each thread a thread of Python.

Numba's simulator has no warps. Here threads of a warp exchange numbers at barriers of 32, and the
card's instructions are functions of NumPy. Import it before the kernels.
"""

import os
import sys
import threading
import traceback
from collections import Counter
from types import SimpleNamespace

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np

from pyggml.backends.cuda.runtime import toolkit

sys.setswitchinterval(1e-4)
LANES = 32
own = threading.local()  # of a thread: what `cuda` has, and its barriers


class Atomic:
    def inc(self, array, at, last):  # blocks run one after the other
        found = array[at]
        array[at] = 0 if found >= last else found + 1
        return found


class Cuda:
    """What kernels ask of numba.cuda."""

    atomic = Atomic()

    def jit(self, function=None, **_):
        return function or (lambda function: function)

    def __getattr__(self, name):
        return getattr(own, name)

    def grid(self, _):
        return own.blockIdx.x * own.blockDim.x + own.threadIdx.x

    def gridsize(self, _):
        return own.gridDim.x * own.blockDim.x

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

    def shfl_sync(self, _mask, x, lane):
        own.warp.slots[own.lane] = x
        own.warp.barrier.wait()
        found = own.warp.slots[lane]
        own.warp.barrier.wait()
        return found


toolkit.cuda = Cuda()

# The modules below take `cuda` from the driver when they are imported.
from pyggml.backends.cuda.code import byte_ptx, cluster_ptx, jit, ptx, straight, warp  # noqa: E402

jit.most_shared = lambda: 227 << 10


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
    both, picked = bytes_of(low) + bytes_of(high), [int(which) >> 4 * i for i in range(4)]
    return word_of((both[p & 7] >> 7) * 255 if p & 8 else both[p & 7] for p in picked)


def dot_bytes(a, b, c):
    pairs = zip(*(np.frombuffer(bytes_of(w), np.int8).tolist() for w in (a, b)), strict=True)
    return np.int32(int(c) + sum(x * y for x, y in pairs))


def flushed(x):
    """Numbers too small for a full mantissa are 0 to the card's approximations."""
    return x if abs(x) >= np.finfo(np.float32).tiny else np.float32(0)


def warp_max(x):
    for step in (16, 8, 4, 2, 1):
        x = max(x, toolkit.cuda.shfl_xor_sync(0, x, step))
    return x


def warp_sum(x):
    for step in (16, 8, 4, 2, 1):
        x += toolkit.cuda.shfl_xor_sync(0, x, step)
    return x


def rounded(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x):
    return (np.asarray(x, np.uint32) << 16).view(np.float32)


def two_bf16(first, second):
    low, high = rounded([first, second])
    return np.uint32(int(low) | int(high) << 16)


def halves(word):
    return [widened(int(word) & 0xFFFF), widened(int(word) >> 16)]


def multiply_tile(c, a, b0, b1):
    """As the PTX manual has the fragments of m16n8k16."""
    warp, lane = own.warp, own.lane
    warp.slots[lane] = a, (b0, b1)
    warp.barrier.wait()
    g, t = lane >> 2, lane & 3
    lefts = [warp.slots[4 * g + i][0] for i in range(4)]
    columns = (2 * t, 2 * t + 1)
    rights = [[warp.slots[4 * column + i][1] for i in range(4)] for column in columns]
    sums = []
    for row in range(2):
        for right in rights:
            total = 0.0
            for i in range(4):
                for half in range(2):
                    x, y = halves(lefts[i][row + 2 * half]), halves(right[i][half])
                    total += float(x[0] * y[0]) + float(x[1] * y[1])
            sums.append(total)
    warp.barrier.wait()
    return tuple(np.float32(float(x) + y) for x, y in zip(c, sums, strict=True))


def add_tile(sums, i, a, b0, b1):
    sums[i] = multiply_tile(sums[i], a, b0, b1)


def transpose_8x8(word):
    """An 8×8 matrix transposed, of which each lane has two numbers of a row."""
    warp, lane = own.warp, own.lane
    warp.slots[lane] = [int(word) & 0xFFFF, int(word) >> 16]
    warp.barrier.wait()
    row, first = lane >> 2, 2 * (lane & 3)
    low, high = (warp.slots[4 * r + (row >> 1)][row & 1] for r in (first, first + 1))
    warp.barrier.wait()
    return np.uint32(low | high << 16)


def load_words(array, at):
    assert at % 16 == 0, f"16 bytes are read at {at}"
    return tuple(np.uint32(w) for w in array.view(np.uint8)[at : at + 16].view(np.uint32))


def store_words(array, at, *words):
    put(array.view(np.uint8), at, *words)


ptx.two_bf16, ptx.add_tile, ptx.transpose_8x8 = two_bf16, add_tile, transpose_8x8
ptx.load_words, ptx.store_words = load_words, store_words
ptx.power_of_two = np.exp2
ptx.commit_copies = ptx.await_copies = ptx.await_all_but_one = lambda: None
ptx.copy_16 = copy_16
ptx.as_float = lambda word: np.uint32(int(word)).view(np.float32)
ptx.bits_of = lambda x: np.float32(x).view(np.uint32)
ptx.bits_of_all = lambda _: np.uint32(0x7FC00001)
ptx.reciprocal = lambda x: flushed(np.float32(1) / flushed(x))
ptx.inverse_root = lambda x: np.float32(1) / np.sqrt(x)
ptx.logarithm_of_two = np.log2
ptx.load_pair = lambda array, at: tuple(word_of(array[at + i : at + i + 4]) for i in (0, 4))
warp.LANES, warp.warp_sum, warp.warp_max = LANES, warp_sum, warp_max
byte_ptx.shared_word, byte_ptx.shared_pair, byte_ptx.shared_words = map(words_at, (1, 2, 4))
byte_ptx.put_shared_pair = byte_ptx.put_shared_words = put
byte_ptx.half_of = lambda word: np.uint16(int(word) & 0xFFFF).view(np.float16).astype("f4")
byte_ptx.shared_float = lambda array, i: array[i]
byte_ptx.copier, byte_ptx.pick_bytes, byte_ptx.dot_bytes = copier, pick_bytes, dot_bytes
byte_ptx.count_ones = lambda word: np.uint32(int(word).bit_count())
straight.straight = lambda function, _returns: function
byte_ptx.constants_loader = lambda _, words: lambda i: tuple(words[4 * i : 4 * i + 4])


class Warp:
    def __init__(self):
        self.barrier, self.slots = threading.Barrier(LANES), [0] * LANES


class Block:
    """The shared memory and the barriers of a block of n_threads."""

    def __init__(self, n_threads, n_bytes):
        self.memory, self.fixed = np.full(n_bytes, 0xA5, np.uint8), {}
        self.barrier = threading.Barrier(n_threads)
        self.warps = [Warp() for _ in range(n_threads // LANES)]
        self.missing = Counter()  # of each barrier, the bytes that others are still to send
        self.has_come = threading.Condition()

    def shared_array(self, shape, dtype, _aligned=0):
        if shape == 0:
            return self.memory if dtype is np.uint32 else self.memory.view(dtype)
        own.n_arrays += 1
        return self.fixed.setdefault(own.n_arrays, np.zeros(shape, dtype))


class Cluster:
    """Blocks that run at the same time, and what they do to each other (cluster_ptx.py)."""

    def __init__(self, blocks, n_threads):
        self.blocks = blocks
        self.barrier = threading.Barrier(len(blocks) * n_threads)

    def mine(self):
        return self.blocks[own.blockIdx.x % len(self.blocks)]

    def number(self, array):
        """Of an array of this block, by which it is known in others."""
        return next((n for n, one in self.mine().fixed.items() if one is array), None)

    def send(self, array, at, barrier, block, x):
        there, number = self.blocks[block], self.number(array)
        to = there.memory
        if number is not None:  # which that block may not have come to
            to = there.fixed.setdefault(number, np.zeros_like(array)).reshape(-1)
        to.view(np.float32)[at // 4] = x
        with there.has_come:
            there.missing[self.number(barrier)] -= 4
            there.has_come.notify_all()

    def expect_bytes(self, barrier, n):
        with self.mine().has_come:
            self.mine().missing[self.number(barrier)] += int(n)

    def await_bytes(self, barrier):
        block, number = self.mine(), self.number(barrier)
        with block.has_come:
            come = block.has_come.wait_for(lambda: not block.missing[number], 60)
            assert come, "bytes never came"

    def abort(self):
        for each in (self.barrier, *(b.barrier for b in self.blocks)):
            each.abort()
        for one in (one for b in self.blocks for one in b.warps):
            one.barrier.abort()


for _name in ("send", "expect_bytes", "await_bytes"):

    def _of_cluster(*arguments, name=_name):
        getattr(own.of_cluster, name)(*arguments)

    setattr(cluster_ptx, _name, _of_cluster)
cluster_ptx.arrive_in_cluster = lambda: None
cluster_ptx.await_cluster = lambda: own.of_cluster.barrier.wait()
cluster_ptx.clusters_of = lambda n: lambda: None


def run_block(kernel, arguments, block, grid, n_threads, n_bytes=0):
    """Run a block; block, grid: (x, y, z). n_bytes: of dynamic shared memory."""
    _run([block], kernel, arguments, grid, n_threads, n_bytes)


def run_cluster(kernel, arguments, y, grid, n_threads, xs=None, n_bytes=0):
    """Run all blocks along x, or those at xs, whose other places are y and 0, at the same time."""
    xs = range(grid[0]) if xs is None else xs
    _run([(x, y, 0) for x in xs], kernel, arguments, grid, n_threads, n_bytes)


def _run(places, kernel, arguments, grid, n_threads, n_bytes):
    blocks, failures = [Block(n_threads, n_bytes) for _ in places], []
    cluster = Cluster(blocks, n_threads)

    def run(at, block, thread):
        own.threadIdx, own.blockDim = place(thread), place(n_threads, 1, 1)
        own.blockIdx, own.gridDim = place(*at), place(*grid)
        own.shared, own.n_arrays = SimpleNamespace(array=block.shared_array), 0
        own.block, own.of_cluster = block.barrier, cluster
        own.local = SimpleNamespace(array=lambda shape, dtype: np.full(shape, np.nan, dtype))
        own.warp, own.lane = block.warps[thread // LANES], thread % LANES
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
        except threading.BrokenBarrierError:
            pass
        except Exception:  # of whatever kind: it is printed, and the threads that wait are let go
            failures.append(traceback.format_exc())
            cluster.abort()

    threads = [
        threading.Thread(target=run, args=(at, block, i))
        for at, block in zip(places, blocks, strict=True)
        for i in range(n_threads)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        sys.exit(failures[0])


def place(x, y=0, z=0):
    return SimpleNamespace(x=x, y=y, z=z)


def show(what, found, wanted):
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    sys.stdout.write(f"{what} {error:.2e}\n")
