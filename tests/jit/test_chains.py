"""Regions are fewer, tasks and bits the same; what stages say of their memory is so."""

from ctypes import c_uint8
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.jit import JIT, chains
from pyggml.jit.tasks import Extent, TaskStage, launch, launch_all
from pyggml.kernels.gemm import paths
from pyggml.lora import LoraConfig, attach
from pyggml.lora.data import WindowBatch
from pyggml.lora.trainer.passes import Passes

GOLDEN = Path(__file__).parents[1] / "golden/models"
pytestmark = pytest.mark.skipif(not JIT, reason="without the JIT each kernel is a call of its own")


def stages_of(*touches):
    """(tasks, parts) of each."""
    return [TaskStage(i, 0, n, None, None, parts) for i, (n, parts) in enumerate(touches)]


def shape_of(stages):
    """Codes: a list of regions, of their branches, of the stages of each."""

    def branches(stage):
        parts = stage.lies[1] if isinstance(stage.lies, tuple) else None
        is_branch = parts and stage.code == chains.BRANCH.address
        return [links(part) for part in (parts if is_branch else [stage])]

    def links(stage):
        return [s.code for s in (stage.lies[1] if isinstance(stage.lies, tuple) else [stage])]

    return [branches(stage) for stage in stages]


def part(start, n, each=0, is_read=False):
    return Extent(start, n, each, is_read)


A, B, C = 0, 1000, 2000  # arrays of 960 bytes


@pytest.mark.parametrize(
    "given, wanted",
    [
        # the second reads by pieces what the first wrote by smaller ones
        (
            [(8, (part(A, 960, 120),)), (4, (part(A, 960, 240, True), part(B, 960, 240)))],
            [[[0, 1]]],
        ),
        # pieces of which none is a multiple of the other
        ([(8, (part(A, 960, 120),)), (6, (part(A, 960, 160), part(B, 960, 160)))], [[[0]], [[1]]]),
        # any task reads any of it
        ([(8, (part(A, 960, 120),)), (8, (part(A, 960, 0, True),))], [[[0]], [[1]]]),
        # too few tasks for the threads
        ([(8, (part(A, 960, 120),)), (1, (part(A, 960, 960),))], [[[0]], [[1]]]),
        # both one task
        ([(1, (part(A, 960),)), (1, (part(A, 960, 0, True), part(B, 960)))], [[[0, 1]]]),
        # nothing in common; both only read it
        ([(8, (part(A, 960, 120),)), (4, (part(B, 960, 240),))], [[[1], [0]]]),
        ([(8, (part(A, 960, 0, True),)), (4, (part(A, 960, 0, True),))], [[[1], [0]]]),
        # scratch of threads, the same or shifted
        ([(4, (part(A, 960, -240),)), (4, (part(A, 960, -240),))], [[[0], [1]]]),
        ([(4, (part(A, 960, -240),)), (4, (part(A, 960, -480),))], [[[0]], [[1]]]),
        # the third joins the first past the second, unless they share something
        (
            [(8, (part(A, 960, 120),)), (1, (part(B, 960),)), (8, (part(A, 960, 120, True),))],
            [[[1], [0, 2]]],
        ),
        (
            [(8, (part(A, 960, 120),)), (1, (part(B, 960), part(A, 9))), (8, (part(A, 960, 120),))],
            [[[0]], [[1]], [[2]]],
        ),
        # memory that is not said
        ([(8, (part(A, 960, 120),)), (8, ()), (8, (part(C, 960, 120),))], [[[0]], [[1]], [[2]]]),
    ],
)
def test_what_is_together(given, wanted):
    assert shape_of(chains.in_fewer(stages_of(*given), 4)) == wanted


def test_a_stage_that_waits_for_two_chains_is_a_region_of_its_own():
    given = [(8, (part(A, 960, 120),)), (8, (part(B, 960, 120),))]
    both = (8, (part(A, 960, 120, True), part(B, 960, 120, True), part(C, 960, 120)))
    assert shape_of(chains.in_fewer(stages_of(*given, both), 4)) == [[[0], [1]], [[2]]]


@pytest.fixture(params=["as this CPU", "tiles"])
def step(request, monkeypatch, rng):
    """A training step's program, the gradient it adds to, and what writes its batch."""
    if request.param == "tiles":  # emulated, where the CPU has none
        at = paths.PATHS.index(paths.strided.STRIDED) + 1
        tiled = (*paths.PATHS[:at], paths.tiles.MANY, *paths.PATHS[at:])
        monkeypatch.setattr(paths, "PATHS", tiled)
        paths.path_of.cache_clear()
        paths.scratch_bytes.cache_clear()
        paths.packing.cache_clear()
    monkeypatch.setattr(chains, "n_cores", lambda: 2)
    model = pyggml.load(GOLDEN / "qwen2-Q4_K_M.gguf", compute="int8")
    adapter = attach(model, LoraConfig(rank=8, alpha=3.0))
    parameters = adapter.parameters
    parameters.data[:] = rng.normal(0, 0.1, parameters.data.shape)
    n = 64
    passes = Passes(adapter.model, parameters, n)
    at = np.arange(n, dtype=np.int32)
    ids, targets = rng.integers(0, model.config.n_vocab, (2, n)).astype(np.int32)
    ones = np.ones(n, np.float32)
    batch = WindowBatch(ids, at, np.stack([0 * at, at + 1], 1), targets, ones / n, n * ones)
    passes.train(batch)
    yield passes.programs[0], parameters.gradient
    paths.path_of.cache_clear()
    paths.scratch_bytes.cache_clear()
    paths.packing.cache_clear()


def test_a_step_in_fewer_regions_has_the_bits_of_its_nodes_one_by_one(step):
    program, gradient = step
    results = []
    for run in (program, lambda: list(program.walk())):
        gradient[:] = 0
        run()
        results.append(gradient.copy())
    np.testing.assert_array_equal(*results)
    assert np.count_nonzero(gradient) > 100
    kernels = [c for calls in program.kernels.values() for c in calls.values()]
    before = sum(len(c.arguments) for c in kernels if c.kernel is launch)
    after = sum(len(c.arguments[1]) for c in program.calls if c.kernel is launch_all)
    assert after < 0.65 * before


def test_stages_touch_the_memory_that_they_say_and_no_other(step, rng):
    """Each is run twice, the second time with noise wherever it says that it reads nothing."""
    program, gradient = step
    (arena,) = program.arenas.values()
    noise = rng.integers(0, 255, arena.size, dtype=np.uint8)

    def inside(parts):
        mask = np.zeros(arena.size, bool)
        for p in parts:
            start = p.start - arena.ctypes.data
            mask[max(0, start) : max(0, start + p.n_bytes)] = True
        return mask

    def elsewhere(parts):
        """What is written outside the arena."""
        end = arena.ctypes.data + arena.size
        out = [p for p in parts if not (p.is_read or arena.ctypes.data <= p.start < end)]
        return [np.frombuffer((c_uint8 * p.n_bytes).from_address(p.start), np.uint8) for p in out]

    gradient[:] = 0
    for calls in program.kernels.values():
        for call in calls.values():
            for stage in call.arguments if call.kernel is launch else ():
                before, sums = arena.copy(), gradient.copy()
                outside = [(x, x.copy()) for x in elsewhere(stage.touches)]
                launch(stage)
                after, added = arena.copy(), gradient.copy()
                if not stage.touches:
                    continue
                own = inside(p for p in stage.touches if p.each < 0)
                written = inside(p for p in stage.touches if not p.is_read)
                assert not ((before != after) & ~written).any(), stage
                arena[:] = np.where(inside(stage.touches), before, noise)
                gradient[:] = sums
                for x, then in outside:
                    x[:] = then
                launch(stage)
                assert not ((arena != after) & written & ~own).any(), stage
                np.testing.assert_array_equal(gradient, added)
                arena[:] = after
            if call.kernel is not launch:
                call()
