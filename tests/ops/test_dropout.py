"""Dropout's random numbers: Philox's own test vectors, the share dropped, and what sets them."""

import numpy as np
import pytest

from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import leaf
from pyggml.ops import dropout, mul
from pyggml.ops.arithmetic.dropout import philox
from pyggml.runtime import Devices, bind, results, schedule

# Random123's kat_vectors of philox4x32, 10 rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_philox_gives_its_authors_numbers(counter, key, words):
    found = philox(np.array(counter, np.uint64), np.array(key, np.uint64))
    assert " ".join(f"{int(w):08x}" for w in found) == words


def dropped(p, stream=0, draw=(1, 2, 3), shape=(300, 203)):
    x = leaf(np.ones(shape, np.float32))
    node = dropout(x, leaf(np.array(draw, np.int32)), p, stream)
    return results(Graph.of(node))[0]


def test_the_share_that_is_dropped_and_how_much_the_others_grow():
    for p in (0.1, 0.5, 0.9):
        y = dropped(p)
        n = y.size
        assert abs((y == 0).mean() - p) < 5 * np.sqrt(p * (1 - p) / n)
        assert np.unique(y).tolist() == [0, np.float32(1 / (1 - p))]
        assert abs((y == 0).mean(axis=0) - p).max() < 6 * np.sqrt(p * (1 - p) / 300)
    np.testing.assert_array_equal(dropped(0.0), 1)


def test_seed_draw_and_stream_each_give_another_mask():
    masks = [dropped(0.5)]
    masks += [dropped(0.5, draw=d) for d in ((0, 2, 3), (1, 0, 3), (1, 2, 4))]
    masks.append(dropped(0.5, stream=9))
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs(((a > 0) == (b > 0)).mean() - 0.5) < 0.02
    np.testing.assert_array_equal(dropped(0.5), masks[0])


def test_a_plan_reads_the_draw_when_it_runs():
    draw = leaf(np.array([1, 2, 3], np.int32))
    node = mul(dropout(leaf(np.ones((4, 64), np.float32)), draw, 0.5, 0), leaf(np.float32([2])))
    program = bind(schedule(Graph.of(node), Devices()))
    found = []
    for number in (3, 4, 3):
        write(draw, (1, 2, number))
        program()
        found.append(program.read(node).copy())
    assert (found[0] != found[1]).any()
    np.testing.assert_array_equal(found[0], found[2])
