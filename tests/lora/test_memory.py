"""A training step takes its memory once: later steps allocate nothing that grows with the model."""

import gc
import sys
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import heap
from pyggml.lora import LoraConfig, StepReport, TrainConfig, Trainer, attach
from pyggml.lora.trainer import passes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_allocates_nothing_of_the_model_s_size(tiny, corpus_of, checkpointing):
    """Neither as large as the parameters nor as the graph, and nothing that stays."""
    model = pyggml.load(tiny)
    adapter = attach(model, LoraConfig(rank=16))
    corpus = corpus_of(60, [400, 300, 70])
    config = TrainConfig(
        grad_accum=2, max_steps=5, val_every=0, clip=1e-3, grad_checkpointing=checkpointing
    )
    # Kernels are compiled, and paths and layouts remembered for each number of trained tokens.
    Trainer(adapter.model, adapter.parameters, corpus, config).run()
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config)
    most, kept = [], []

    def report(event):
        if isinstance(event, StepReport):
            current, peak = tracemalloc.get_traced_memory()
            most.append(peak - (kept[-1] if kept else 0))
            kept.append(current)
            tracemalloc.reset_peak()

    tracemalloc.start()
    try:
        trainer.run(report)
    finally:
        tracemalloc.stop()
    smallest = min(adapter.parameters.data.nbytes, trainer.passes.n_bytes)
    assert smallest > 90_000
    assert len(most) == 5 and max(most[1:]) < smallest / 3
    assert np.ptp(kept[1:]) < 10_000


def test_a_run_binds_its_kernels_once(tiny, corpus_of, monkeypatch):
    """Programs are calls with their arrays; a step binds nothing, and finds what it reads alone."""
    model = pyggml.load(tiny)
    adapter = attach(model)
    corpus = corpus_of(10, [90, 60, 30])
    trainer = Trainer(adapter.model, adapter.parameters, corpus, TrainConfig())
    trainer.passes.bind()
    before = trainer.passes.programs
    device = type(model.backend)
    whole, look, attached, were_read = device.attach, device.begin_read, [], []

    def attach_one(self, tensor, arena, offset):
        attached.append(tensor)
        whole(self, tensor, arena, offset)

    def read_one(self, tensor):
        were_read.append(tensor.root)
        return look(self, tensor)

    monkeypatch.setattr(device, "bind", None)
    monkeypatch.setattr(device, "attach", attach_one)
    monkeypatch.setattr(device, "begin_read", read_one)
    for b in trainer.corpus.train.batches(np.arange(3), 1):
        trainer.passes.train(b)
        trainer.passes.evaluate(b)
    assert trainer.passes.programs is before
    assert attached == [t for t in were_read if t.op is not None]


def test_a_trainer_lets_go_of_its_arenas(trainer_of):
    trainer = trainer_of(max_steps=1)
    trainer.run()
    arena = weakref.ref(trainer.passes)
    trainer.free()
    gc.collect()
    assert arena() is None
    assert trainer.losses.over(trainer.corpus.train, range(1), alone=True).loss > 0


def test_idle_memory_is_the_arena_s_if_that_is_large_enough(trainer_of):
    passes = trainer_of().passes
    (arena,) = passes.programs[0].arenas.values()
    n = arena.nbytes // 4
    assert np.shares_memory(passes.idle_memory(n), arena) and passes.idle_memory(n).shape == (n,)
    assert not np.shares_memory(passes.idle_memory(n + 1), arena)


def test_the_end_of_training_leaves_what_was_trained(trainer_of):
    trainer = trainer_of(max_steps=2)
    trainer.run()
    p = trainer.parameters
    trained = p.data.copy()
    assert p.m.any() and p.v.any() and p.gradient.any()
    p.end()
    assert not (p.m.any() or p.v.any() or p.gradient.any())
    np.testing.assert_array_equal(p.data, trained)


@pytest.mark.skipif(sys.platform != "linux", reason="only there a process tells its own memory")
def test_what_is_cleared_goes_back_to_the_system():
    def own():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) << 10

    a = np.ones(8 << 20, np.float32)[3:]
    before = own()
    heap.clear(a)
    assert own() < before - 0.9 * a.nbytes
    assert not a.any()


@pytest.mark.quick
def test_python_looks_for_no_garbage_while_graphs_are_planned(tiny, monkeypatch):
    collects = []
    whole = passes.gradient_groups
    monkeypatch.setattr(
        passes, "gradient_groups", lambda *a: collects.append(gc.isenabled()) or whole(*a)
    )
    adapter = attach(pyggml.load(tiny), LoraConfig(rank=2))
    passes.Passes(adapter.model, adapter.parameters, 8)
    assert collects == [False] and gc.isenabled()
    with pytest.raises(ZeroDivisionError), heap.without_collector():
        assert not gc.isenabled() and 1 / 0
    assert gc.isenabled()
