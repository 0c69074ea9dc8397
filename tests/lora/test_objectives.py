"""An objective is a declaration: nothing but its file and the table knows it."""

import ast
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import pyggml
from pyggml.lora import LoraConfig, StepReport, TrainConfig, Trainer, attach
from pyggml.lora.objectives import OBJECTIVES, Tally, TextObjective
from pyggml.lora.objectives.choice import USERS
from pyggml.lora.record.records import record_of
from pyggml.ops import scale

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.quick


def test_no_other_file_names_an_objective():
    """As a word of its own: a branch on a name, or a table by names. A command may share a name
    with an objective: its file, and the table of commands, are of commands."""
    commands, named = ROOT / "cli/commands", []
    for path in (p for folder in ("lora", "cli") for p in (ROOT / folder).rglob("*.py")):
        own = path.parent in (ROOT / "lora/objectives", commands) and path.stem in OBJECTIVES
        if own or path == ROOT / "cli/__main__.py":
            continue
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        words = [n for n in nodes if isinstance(n, ast.Constant) and n.value in OBJECTIVES]
        named += [f"{path.relative_to(ROOT)}:{n.lineno}: {n.value}" for n in words]
    assert named == []


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_declaration_is_whole(name):
    kind = OBJECTIVES[name]
    assert kind.__module__ == f"pyggml.lora.objectives.{name}" and kind.name == name
    assert kind.purpose.startswith("learns ") and kind.rows in (
        "training",
        "pairs",
        "labels",
        "prompts",
        "classes",
        "groups",
    )
    assert all(f.default in (0, 0.0, ()) for f in fields(kind.tally)), "a tally begins with nothing"


def test_a_setting_of_several_has_one_range():
    for of in USERS.values():
        assert len({f.metadata["range"] for f in of.values()}) == 1


@dataclass(frozen=True, slots=True)
class Losses(Tally):
    n_batches: int = 0
    loss_sum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Counted(TextObjective):
    """The loss of `sft`, and a report of its own."""

    name: ClassVar[str] = "counted"
    purpose: ClassVar[str] = "learns to write, and counts"
    tally: ClassVar[type[Tally]] = Losses

    def loss(self, net, batch):
        loss = net.token_loss(batch.targets, batch.weights)
        return {"loss": loss, "twice": scale(loss, 2.0)}

    def report(self, batch, outputs):
        return Losses(1, float(outputs["twice"]) / 2)


def test_one_s_own_reports_what_it_counts(tiny, corpus_of):
    steps = []
    for objective in (None, Counted()):
        adapter = attach(pyggml.load(tiny, compute="f32"), LoraConfig(rank=3))
        config = TrainConfig(max_steps=2, grad_accum=2, compute="f32")
        run = (adapter.model, adapter.parameters, corpus_of(8), config, objective)
        steps.append([])
        Trainer(*run).run(steps[-1].append)
    usual, own = ([r for r in some if isinstance(r, StepReport)] for some in steps)
    assert [r.loss for r in own] == [r.loss for r in usual]
    for report in own:
        assert report.tally.n_batches == 2 and report.token_accuracy is None
        assert report.tally.loss_sum == pytest.approx(report.loss)
        record = record_of(report)
        assert (record["n_batches"], record["loss_sum"]) == report.tally.numbers
        assert report.tally.words == f"n_batches 2, loss_sum {report.tally.loss_sum:g}"
        np.testing.assert_array_equal(Losses.of(report.tally.numbers).numbers, report.tally.numbers)
