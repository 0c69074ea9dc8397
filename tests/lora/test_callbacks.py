"""What a program may do while a run goes on: look, stop, save, and choose the learning rate."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from extras import need

from pyggml import gguf
from pyggml.errors import CheckpointError, ConfigError
from pyggml.lora import CheckpointReport, StepReport, TrainConfig, Trainer, ValidationReport
from pyggml.lora.adapter import attach
from pyggml.lora.config import LoraConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_of(tiny, corpus_of):
    """(schedule, **settings) -> a trainer of the tiny model, and its adapter."""
    import pyggml

    def make(schedule=None, **settings):
        adapter = attach(pyggml.load(tiny), LoraConfig(rank=3))
        config = TrainConfig(**{"epochs": 2, **settings})
        args = adapter.model, adapter.parameters, corpus_of(10), config
        return Trainer(*args, schedule=schedule), adapter

    return make


@pytest.mark.quick
def test_a_run_shows_itself_unless_it_is_told_not_to(run_of, capsys):
    trainer, _ = run_of()
    reports = []
    trainer.run(reports.append)
    said = capsys.readouterr().out
    assert re.search(r"^step 0 +validation loss \d\.\d{4}", said, re.M)
    assert f"step {trainer.n_steps}/{trainer.n_steps}  loss " in said
    assert "StepReport" not in said
    assert sum(isinstance(r, StepReport) for r in reports) == trainer.n_steps
    run_of()[0].run(progress=False)
    assert capsys.readouterr().out == ""


def test_reports_are_sentences():
    step = StepReport(3, 9, 0, 1.5, 1e-3, 0.25, 64, 0.5)
    assert str(step) == "step 3/9  loss 1.5000  lr 1.00e-03  |g| 0.25  128 tokens/s"
    assert str(ValidationReport(3, 1.25, 9, None, 0.125)) == (
        "step 3  validation loss 1.2500 ± 0.12"
    )
    assert str(CheckpointReport(3, "a.gguf")) == "step 3  checkpoint a.gguf"


def test_a_notebook_s_cell_shows_the_bar(run_of, capsys, monkeypatch):
    shown = []

    def display(picture, display_id):
        shown.append(picture._repr_mimebundle_(None, None))
        return SimpleNamespace(update=lambda p: shown.append(p._repr_mimebundle_(None, None)))

    ipython = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=1), display=SimpleNamespace(display=display)
    )
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    trainer, _ = run_of()
    trainer.run()
    first, last = shown[0]["text/html"], shown[-1]["text/html"]
    assert "validating" in first and f"/{trainer.n_steps}" in first
    assert f"step {trainer.n_steps}/{trainer.n_steps}" in last and "loss" in last
    assert "validation loss" in capsys.readouterr().out


CELL = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import pyggml
from pyggml.cli import demo
from pyggml.lora import DataConfig, Trainer, TrainConfig, attach, corpus
model = pyggml.load(demo.BASE)
adapter = attach(model)
windows = corpus(["the king is dead, my lord"] * 9, model, DataConfig(ctx=16))
Trainer(adapter.model, adapter.parameters, windows, TrainConfig(max_steps=3)).run()
"""


def test_a_real_notebook_has_one_bar_which_is_replaced():
    nbclient, nbformat = need("nbclient"), need("nbformat")
    need("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(book, timeout=500, kernel_name="python3").execute()
    outputs = book.cells[0].outputs
    (bar,) = [o for o in outputs if o.output_type == "display_data"]
    assert "step 3/3" in bar["data"]["text/html"]
    said = "".join(o.get("text", "") for o in outputs)
    assert " a step, " in said


def test_a_callback_stops_the_run(run_of):
    trainer, _ = run_of()

    def stop_at_four(report):
        if isinstance(report, StepReport) and report.step == 4:
            trainer.stop()

    assert not trainer.run(stop_at_four, progress=False)
    assert trainer.progress.step == 4


def test_a_callback_saves_adapter_and_checkpoint(run_of, tmp_path):
    folder = tmp_path / "points"
    trainer, adapter = run_of(checkpoint_dir=str(folder), checkpoint_every=0)
    other, again = run_of(checkpoint_dir=str(tmp_path / "other"), checkpoint_every=0)
    saved = []

    def save_at_three(report):
        if isinstance(report, StepReport) and report.step == 3:
            adapter.save(tmp_path / "three.gguf")
            saved.append(trainer.save())
            trainer.stop()

    trainer.run(save_at_three, progress=False)
    assert saved == [folder / "step-00000003.gguf"] or saved[0].parent == folder
    other.resume(folder)
    assert other.progress.step == 3
    again.save(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "three.gguf").read_bytes()
    with gguf.open(saved[0]):
        pass


def test_no_folder_no_checkpoint(run_of):
    with pytest.raises(ConfigError, match="checkpoint_dir is None, wanted a folder"):
        run_of()[0].save()


# -- a schedule of one's own --------------------------------------------------------------------


def test_a_schedule_is_a_function_of_steps_and_losses(run_of):
    seen = []

    def schedule(step, n_steps, history):
        seen.append((step, n_steps, len(history.losses), len(history.validations)))
        return 0.01 / (1 + step)

    trainer, _ = run_of(schedule, val_every=2)
    rates = []
    trainer.run(lambda r: rates.append(getattr(r, "lr", None)), progress=False)
    n = trainer.n_steps
    assert [r for r in rates if r is not None] == [0.01 / (1 + i) for i in range(n)]
    assert seen[:3] == [(0, n, 0, 1), (1, n, 1, 1), (2, n, 2, 2)]


def test_a_resumed_run_wants_the_same_function(run_of, tmp_path):
    def schedule(step, n_steps, history):
        return 0.01

    how = {"checkpoint_dir": str(tmp_path / "points")}
    trainer, _ = run_of(schedule, **how)
    trainer.run(progress=False)
    run_of(schedule, **how)[0].resume(tmp_path / "points")
    with pytest.raises(CheckpointError, match="lr_scheduler"):
        run_of(**how)[0].resume(tmp_path / "points")


def test_settings_beside_a_schedule_do_nothing_and_are_refused(run_of):
    with pytest.raises(ConfigError, match="lr_min does nothing beside a schedule of your own"):
        run_of(lambda step, n, history: 0.1, lr_min=1e-5)


@pytest.mark.parametrize("value", [-0.1, 11.0, float("nan"), "0.1", None])
def test_a_schedule_gives_a_learning_rate(run_of, value):
    trainer, _ = run_of(lambda step, n, history: value)
    with pytest.raises(ConfigError, match="for step 0, wanted a learning rate of 0 to 10"):
        trainer.run(progress=False)
