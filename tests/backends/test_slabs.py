"""Pieces of a card's memory, cut from larger arrays."""

from itertools import pairwise

import numpy as np

from pyggml.backends.cuda.runtime.slabs import PAGE, Slabs, taken


class Memory:
    def __init__(self):
        self.made = []

    def __call__(self, n_bytes):
        self.made.append(np.zeros(n_bytes, np.uint8))
        return self.made[-1]


def test_pieces_lie_side_by_side_and_apart():
    memory, rng = Memory(), np.random.default_rng(1)
    slabs, sizes = Slabs(memory), rng.integers(0, 12 << 20, 200)
    pieces = [slabs.take(int(n)) for n in sizes]
    assert [p.size for p in pieces] == [max(int(n), 1) for n in sizes]
    places = sorted((p.ctypes.data, p.size) for p in pieces)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(places))
    starts = {m.ctypes.data for m in memory.made}
    for p in pieces:
        whole = p.base
        assert whole.ctypes.data in starts and (p.ctypes.data - whole.ctypes.data) % 256 == 0
    wanted = sum(taken(p.size) for p in pieces)
    assert wanted <= sum(m.size for m in memory.made) < 1.2 * wanted


def test_a_large_piece_is_an_array_of_its_own():
    memory = Memory()
    slabs, n = Slabs(memory), (40 << 20) + 1
    assert slabs.take(n) is memory.made[0] and taken(n) == (40 << 20) + PAGE
    small = slabs.take(3)
    assert small.base is memory.made[1] and taken(3) == 256


def test_matrices_of_layers_leave_little_room_empty():
    memory, matrix = Memory(), 34 * 2048 // 32
    slabs = Slabs(memory)
    sizes = [matrix * n for n in (2048, 1024, 1024, 2048, 6144, 6144, 6144)] * 40
    pieces = [slabs.take(n) for n in sizes]
    assert sum(m.size for m in memory.made) < 1.05 * sum(p.size for p in pieces)
