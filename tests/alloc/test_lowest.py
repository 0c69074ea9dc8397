"""Lowest fit: pieces that live at the same time lie apart, and large ones leave no gaps."""

import numpy as np

from pyggml.alloc.fit import Arena, lowest


def test_pieces_that_live_at_the_same_time_lie_apart():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 100, 60)
    lives = [(int(a), int(a + rng.integers(1, 30)), int(rng.integers(1, 50))) for a in first]
    starts, end = lowest(lives)
    assert end == max(start + size for start, (*_, size) in zip(starts, lives, strict=True))
    for i, (a, b, n) in enumerate(lives):
        for j, (c, d, m) in enumerate(lives[:i]):
            apart = starts[i] + n <= starts[j] or starts[j] + m <= starts[i]
            assert apart or b <= c or d <= a


def test_a_late_large_piece_lies_where_others_have_been():
    """Best fit grows behind the piece that stays, 64 bytes at an address of 256."""
    lives = [(0, 2, 256), (1, 9, 64), (3, 9, 320)]
    starts, end = lowest(lives)
    assert (starts.tolist(), end) == ([0, 320, 0], 384)
    arena = Arena()
    arena.take(256), arena.take(64), arena.give_back(0, 256), arena.take(320)
    assert arena.peak == 640
