"""Passes that overlap on several devices give the bytes of passes that follow each other."""

from functools import partial

import numpy as np
import pytest
import ranked_run
from late_cpu import Desk, LateCPU
from separate_cpu import SeparateCPU

import pyggml
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach
from pyggml.lora.data import Corpus
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.windows.lengths import bucket
from pyggml.lora.data.windows.packing import pack
from pyggml.runtime import Program

CTX = 24


class Card(SeparateCPU):
    """One of several, with so many bytes free if it tells."""

    def __init__(self, free=None):
        super().__init__()
        self.free = free

    def memory(self):
        return self.free and (self.free, 10**9)


def corpus():
    """Windows of several lengths, 23 to learn and 6 held out."""
    rng = np.random.default_rng(2)
    sizes = np.minimum(rng.geometric(0.12, 29) + 1, CTX + 1)
    rows = [Document(rng.integers(0, 48, m).tolist(), np.arange(m) >= 0) for m in sizes]
    parts = [pack(each, CTX, True, alone=True) for each in (rows[6:], rows[:6])]
    return Corpus(*bucket(parts))


def trainer_of(path, cards=(), split=(), n_passes=4):
    """With dropout and noise, which each pass draws; the last step has three passes."""
    placed = {"gpu_layers": 99, "split": split} if cards else {}
    model = pyggml.load(path, compute="f32", backends=cards, **placed)
    adapter = attach(model, LoraConfig(rank=3, dropout=0.1))
    config = TrainConfig(
        compute="f32", lr=0.01, grad_accum=n_passes, val_every=3, neftune_alpha=3, clip=0.05,
    )  # fmt: skip
    return Trainer(adapter.model, adapter.parameters, corpus(), config)


def outcome(trainer):
    trainer.run(progress=False)
    validations = [(v.loss, v.token_accuracy) for v in trainer.history.validations]
    return trainer.parameters.data.tobytes(), trainer.history.losses, validations


@pytest.mark.parametrize(
    ("split", "n_cards", "at_once"), [((1, 1), 2, 2), ((1, 1, 1, 1), 2, 4), ((1, 1, 2), 3, 3)]
)
def test_passes_that_overlap_give_the_bytes_of_one_device(
    tiny, split, n_cards, at_once, monkeypatch
):
    """On devices that do what they are asked for at any time, each in its order."""
    started, start = [], Program.start
    monkeypatch.setattr(Program, "start", lambda program, i: started.append(i) or start(program, i))
    desk = Desk(n_cards)
    placed = trainer_of(tiny, [LateCPU(desk, f"late {i}") for i in range(n_cards)], split)
    assert placed.passes.n_slots == at_once
    assert outcome(placed) == outcome(trainer_of(tiny))
    assert started[:4].count(0) > 1, "the second pass began before the first one ended"


def test_what_follows_a_step_s_passes_is_asked_for_before_the_last_loss_is_waited_for(
    tiny, monkeypatch
):
    """The sum and the norm. A step that fails has the device wait for no other rank."""
    told, late = [], LateCPU(Desk(0), "late")
    trainer = ranked_run.trainer_of(tiny, backends=[late], grad_accum=2, max_steps=1)
    gradient, clips = trainer.gradient, trainer.optimiser
    for owner, name in ((gradient, "begin"), (gradient, "begin_sum"), (clips, "begin_clip")):
        monkeypatch.setattr(owner, name, telling(told, name, getattr(owner, name)))
    read = late.begin_read
    monkeypatch.setattr(late, "begin_read", lambda t: telling(told, "wait", read(t)))
    trainer.run(progress=False)
    step = told[told.index("begin") :][:5]
    assert step == ["begin", "wait", "wait", "begin_sum", "begin_clip"], "of the first pass alone"
    trainer = ranked_run.trainer_of(tiny)
    monkeypatch.setattr(trainer.gradient, "give_up", partial(told.append, "given up"))
    begin = trainer.passes.begin
    monkeypatch.setattr(
        trainer.passes, "begin", lambda batch, alone: begin(batch, alone) if alone else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        trainer.run(progress=False)
    assert told[-1] == "given up"


def telling(told, name, call):
    """A call that is told by its name."""

    def act(*arguments):
        told.append(name)
        return call(*arguments)

    return act


def test_what_overlaps_is_planned_and_needs_memory(tiny):
    alone, both = (trainer_of(tiny, [Card(), Card()], (1, 1), n) for n in (1, 2))
    wanted, doubled = ([d.arena for d in each.on_devices()] for each in (alone, both))
    assert [alone.passes.n_slots, both.passes.n_slots] == [1, 2]
    assert doubled[0] > 1.9 * wanted[0] and doubled[1] == wanted[1]
    needed = both.on_devices()[0].n_bytes
    for free, n in ((needed, 2), (needed - 1, 1)):
        assert trainer_of(tiny, [Card(free), Card(10**8)], (1, 1), 2).passes.n_slots == n


@pytest.mark.parametrize("kind", ["dpo", "distill"])
def test_graphs_of_an_objective_run_before_passes_that_overlap(tiny, kind, monkeypatch):
    run = partial(ranked_run.trainer_of, tiny, kind=kind, compute="f32", **ranked_run.SHORT)
    alone = run()
    monkeypatch.setattr(pyggml, "load", partial(pyggml.load, gpu_layers=99, split=(1, 1)))
    placed = run(backends=[Card(), Card()])
    assert placed.passes.n_slots == 2
    for trainer in (alone, placed):
        trainer.run(progress=False)
    assert ranked_run.outcome(placed) == ranked_run.outcome(alone)
