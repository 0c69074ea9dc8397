"""Nodes in any order that their waits allow, and captured side by side: the bits of a line."""

import random

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.branches import may_begin_early, side_by_side
from pyggml.backends.cuda.runtime.captures import Capture
from pyggml.backends.cuda.runtime.early import (
    await_others,
    begins_early,
    knows_early,
    release_others,
)
from pyggml.backends.cuda.runtime.kernel import BoundCall, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch, of_library
from pyggml.backends.cuda.runtime.toolkit import SIMULATED, cuda
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import add, add_inplace, mul, rms_norm_mul, scale, silu, sum_rows, swiglu
from pyggml.ops.layout.layout import transpose
from pyggml.runtime import Devices, bind, schedule

RNG = np.random.default_rng(9)


def branching(total):
    """Branches that meet, with results that take the place of sources, and a sum that changes."""
    x, w = (leaf(RNG.standard_normal(s).astype(np.float32)) for s in ((5, 8), (8,)))
    y = rms_norm_mul(x, w, eps=1e-6)
    branches = [silu(scale(y, 0.5 + i)) for i in range(3)]
    gated = swiglu(branches[0], mul(branches[1], y))
    back = add(gated, scale(add(branches[2], gated), 0.1))
    return Graph.of(add_inplace(total, transpose(back)), sum_rows(mul(back, y)))


def random_order(waits, rng):
    left, order = set(range(len(waits))), []
    while left:
        ready = sorted(i for i in left if not left.intersection(waits[i]))
        order.append(rng.choice(ready))
        left.remove(order[-1])
    return order


def test_any_order_that_the_waits_allow_gives_the_bits_of_the_line(card):
    total = zeros((8, 5))
    graph = branching(total)
    program = bind(schedule(graph, Devices([card, CPU()])))
    program()
    wanted = [program.read(t) for t in graph.outputs]
    steps, tell = side_by_side(list(program.kernels[card].values()))
    waits = tell()
    assert len({len(w) for w in waits}) > 1, "there are branches"
    on_card = next(t for t in program.schedule.parts[-1].changed)
    for seed in range(9):
        write(total, np.zeros(total.shape, np.float32))
        card.write(program.schedule.devices.copy_of(on_card, card), np.zeros(total.shape))
        for i in random_order(waits, random.Random(seed)):
            steps[i]()
        for t, numbers in zip(graph.outputs, wanted, strict=True):
            here = program.schedule.twins.get(t, t)
            np.testing.assert_array_equal(card.read(here), numbers)


def bound_to(out, saved, scratch):
    given = (False, None, False, "f32", *[None] * 5)
    return CudaSite(silu(zeros((4,))), out, (), (saved,), scratch, *given)


@pytest.mark.parametrize("named, waits", [(True, [(), ()]), (False, [(), (0,)])])
def test_launches_of_a_node_that_name_what_they_write(named, waits):
    """Two results from the same scratch, as the gradients of queries and of keys."""
    out, saved, scratch = (cuda.to_device(np.zeros(4, np.float32)) for _ in range(3))
    site = bound_to(out, saved, scratch)
    calls = (
        launch(None, 1, 1, None, result, scratch, writes=[result] if named else None)
        for result in (out, saved)
    )
    assert side_by_side([BoundCall(in_turn(*calls), site)])[1]() == waits


@pytest.mark.skipif(SIMULATED, reason="the simulator captures nothing")
def test_a_captured_call_waits_for_what_it_is_told(card):
    """A long call, and one that needs its result but is the first of three to be short."""
    order, n = [], 1 << 22

    @kernel
    def fill(out, value, times):
        for _ in range(times):
            for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
                out[i] = value + out[i] * np.float32(0)

    @kernel
    def put(out, x):
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = x[i]

    x, y, z = (cuda.to_device(np.zeros(n, np.float32)) for _ in range(3))
    calls = [
        lambda: fill[64, 256, card.stream](x, np.float32(3), 50),
        lambda: fill[64, 256, card.stream](z, np.float32(5), 1),
        lambda: put[64, 256, card.stream](y, x),
    ]
    captured = Capture(calls, card.stream, lambda: [(), (), (0,)])
    for _ in range(3):
        for array in (x, y, z):
            array.copy_to_device(np.zeros(n, np.float32), stream=card.stream)
        captured()
        card.stream.synchronize()
        order.append([float(a.copy_to_host()[-1]) for a in (x, y, z)])
    assert order == [[3, 3, 5]] * 3


def test_what_may_begin_early():
    """A launch that reads early what those that it waits for have awaited themselves."""
    w, x, y, z = (cuda.to_device(np.zeros(4, np.float32)) for _ in "wxyz")

    def early(out, a, b):
        pass

    begins_early(early, lambda arguments: arguments[2:])  # b
    steps = (
        launch(early, 1, 1, None, x, x, w),
        launch(early, 1, 1, None, y, x, w, writes=[y]),
        launch(early, 1, 1, None, z, y, x),  # x is made by the first, which the second awaits
        launch(early, 1, 1, None, z, y, y),  # y is made by the second
        launch(None, 1, 1, None, y, z, w),  # by another kernel
        of_library(None, reads=[y], writes=[x]),
        launch(early, 1, 1, None, z, x, w),  # after a library's
    )
    calls = [BoundCall(in_turn(*steps), bound_to(x, y, z))]
    waits = side_by_side(calls)[1]()
    assert may_begin_early(calls, waits) == [True, True, True, False, False, False, True]


def test_what_a_launch_that_leads_awaits_is_not_read_early_by_the_next():
    w, x, y, z = (cuda.to_device(np.zeros(4, np.float32)) for _ in "wxyz")

    def early(out, a, b):
        pass

    def leading(out, a, b):
        pass

    begins_early(early, lambda arguments: arguments[2:])
    begins_early(leading, lambda arguments: arguments[2:], leads=True)
    steps = (
        launch(early, 1, 1, None, x, w, w),
        launch(leading, 1, 1, None, y, x, w, writes=[y]),
        launch(early, 1, 1, None, z, y, x, writes=[z]),  # x: by the first, which may still run
        launch(early, 1, 1, None, y, z, x),  # the third has awaited both
    )
    calls = [BoundCall(in_turn(*steps), bound_to(x, y, z))]
    waits = side_by_side(calls)[1]()
    assert may_begin_early(calls, waits) == [True, True, False, True]


@pytest.mark.skipif(SIMULATED, reason="the simulator captures nothing")
def test_launches_that_begin_early_wait_for_what_they_read_and_write(card):
    """Two arrays in turn: each launch reads what the last one writes, and writes what it reads."""
    n, times = 1 << 16, 200

    @kernel
    def move(out, x, rounds):
        await_others()
        release_others()
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            found = x[i]
            for _ in range(rounds):  # blocks end at different times
                found = found * np.float32(1)
            out[i] = found + np.float32(1)

    x, y = (cuda.to_device(np.zeros(n, np.float32)) for _ in "xy")
    calls = [
        lambda pair=pair, i=i: move[16 + i % 7 * 20, 128, card.stream](*pair, 1 + i % 5 * 100)
        for i, pair in enumerate([(y, x), (x, y)] * (times // 2))
    ]
    calls.insert(0, lambda: y.copy_to_device(x, stream=card.stream))  # which is no kernel
    waits = [(i - 1,) if i else () for i in range(times + 1)]
    captured = Capture(calls, card.stream, lambda: waits, lambda _: [knows_early()] * (times + 1))
    for run in range(1, 5):
        captured()
        card.stream.synchronize()
        np.testing.assert_array_equal(x.copy_to_host(), np.float32(times * run))
    assert captured.early is not None, "the driver takes them"
