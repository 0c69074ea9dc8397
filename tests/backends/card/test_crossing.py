"""Copies from one device to another, of which the card may be both."""

import numpy as np

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import open_cuda
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.ops import add, transpose, view
from pyggml.runtime import Devices, bind, schedule


def test_results_cross_between_devices_as_they_lie(card):
    """Whole, transposed and with gaps, in runs that follow each other at once."""
    other = open_cuda(card.index, "f32")
    devices = Devices([card, other, CPU()])
    devices.homes = {0: card, 1: other}
    x, weights = leaf(np.zeros((6, 8), np.float32)), np.arange(48, dtype=np.float32).reshape(6, 8)
    here, there = leaf(weights), leaf(2 * weights)
    devices.group(0, here)
    devices.group(1, there)
    y = add(x, here)
    z = add(y, there)
    turned = add(transpose(y), transpose(there))
    part = add(view(y, (6, 4), y.strides), view(there, (6, 4), there.strides))
    program = bind(schedule(Graph.of(z, turned, part), devices))
    assert [part.backend for part in program.schedule.parts] == [card, other]
    for k in range(3):
        x.data[:] = k
        program()
        total = k + weights + 2 * weights
        values = [program.read(t) for t in program.schedule.graph.outputs]
        np.testing.assert_array_equal(values[0], total)
        np.testing.assert_array_equal(values[1], total.T)
        np.testing.assert_array_equal(values[2], total[:, :4])
