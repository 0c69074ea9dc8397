"""`--keep-best`, in every way a run can end: the step that is said is that of the file."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from pyggml.cli.commands.finetune import results
from pyggml.errors import PyggmlError
from pyggml.lora import Trainer, ValidationReport
from pyggml.lora.trainer import checkpoint

LOSSES = (7.0, 6.0, 5.0, 5.5, 5.7, 5.6, 5.9)  # of each step's validation: the second is the best
BEST, LATER = 2, 4
RUN = ("--lr-scheduler", "constant", "--warmup-steps", 0, "--val-every", 1)


@pytest.fixture(scope="module")
def adapters():
    """Number of steps -> the bytes that such a run wrote."""
    return {}


@pytest.fixture
def adapter_of(finetune, tmp_path, adapters):
    """What a run of so many steps writes, which does not depend on how long it might have been."""

    def read(step):
        if step not in adapters:
            path = tmp_path / f"{step}.gguf"
            assert finetune(*RUN, "--max-steps", step, output=path).code == 0
            adapters[step] = path.read_bytes()
        return adapters[step]

    return read


@pytest.fixture(autouse=True)
def planted_losses(monkeypatch):
    def validated(step, loss, *rest):
        return ValidationReport(step, LOSSES[step], *rest)

    monkeypatch.setattr("pyggml.lora.trainer.loop.ValidationReport", validated)


@pytest.fixture
def after_step(monkeypatch, ctrl_c):
    """after_step(n, act): do that when step n was made, given the trainer."""

    def plant(step, act):
        whole = Trainer._step

        def made(self):
            report = whole(self)
            if report.step == step:
                act(self)
            return report

        monkeypatch.setattr(Trainer, "_step", made)

    return plant


def said(ended):
    """(step, file): what a run says that it wrote."""
    saved = re.search(r"of step (\d+) was saved as (\S+)", ended.err)
    if saved:
        return int(saved[1]), Path(saved[2].rstrip(";"))
    last = re.search(r"step (\d+) of \d+", ended.row("result"))
    steps = [int(last[1])]
    if best := re.search(r"^best .* at step (\d+); the output is of that step", ended.out, re.M):
        steps = [int(best[1])]
    stopped = re.search(
        r"^stopped .*after step (\d+) .* of (?:that step|step (\d+))", ended.out, re.M
    )
    if stopped:
        steps.append(int(stopped[2] or stopped[1]))
    assert len(set(steps)) == 1, "all lines name one step"
    written = re.search(r"^adapter +(\S+\.gguf),", ended.out, re.M)
    return steps[0], Path(written[1])


def full(*given):
    raise PyggmlError("No space left on device")


def raised(number):
    return lambda trainer: signal.raise_signal(number)


def poison(trainer):
    trainer.parameters.data[:] = np.nan


ENDINGS = {  # options, what happens after step LATER, exit code, step of the file
    "the end": ((), None, 0, BEST),
    "no step was better": (("--patience", 2), None, 0, BEST),
    "Ctrl-C": ((), raised(signal.SIGINT), 130, BEST),
    "SIGTERM": ((), raised(signal.SIGTERM), 143, BEST),
    "Ctrl-C after steps without validation": (
        ("--val-every", 3, "--max-steps", 5), raised(signal.SIGINT), 130, 3),
    "Ctrl-C before a validation": (("--val-every", 0), raised(signal.SIGINT), 130, LATER),
    "no numbers": ((), poison, 2, BEST),
    "a full disk before a validation": (("--val-every", 0), full, 2, LATER),
    "a full disk": ((), full, 2, BEST),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.filterwarnings("ignore:.*invalid value")
def test_the_file_is_of_the_step_that_is_said(finetune, adapter_of, after_step, name):
    options, act, code, step = ENDINGS[name]
    expected = adapter_of(step)
    if act is not None:
        after_step(LATER, act)
    ended = finetune(*RUN, "--max-steps", 6, "--keep-best", *options)
    assert ended.code == code, ended.err
    written, path = said(ended)
    assert written == step
    assert path.read_bytes() == expected


def test_a_full_disk_for_checkpoints(finetune, adapter_of, monkeypatch, tmp_path):
    expected = adapter_of(BEST)
    monkeypatch.setattr(checkpoint, "save", full)
    points = ("--checkpoint-dir", tmp_path / "points", "--checkpoint-every", LATER)
    ended = finetune(*RUN, "--max-steps", 6, "--keep-best", *points)
    assert ended.code == 2 and "No space left" in ended.err
    step, path = said(ended)
    assert step == BEST and path.read_bytes() == expected


def test_a_full_disk_for_the_output(finetune, adapter_of, monkeypatch, tmp_path):
    expected, write, out = adapter_of(BEST), results._write, tmp_path / "adapter.gguf"
    monkeypatch.setattr(
        results, "_write", lambda of, path, *more: full() if path == out else write(of, path, *more)
    )
    ended = finetune(*RUN, "--max-steps", 6, "--keep-best", output=out)
    assert ended.code == 2 and "No space left" in ended.err
    step, path = said(ended)
    assert step == BEST and path.read_bytes() == expected


@pytest.mark.filterwarnings("default:.*was of a run of 6 steps")
@pytest.mark.parametrize(("every", "step"), [(1, BEST), (3, 3)])
def test_a_resumed_run_that_is_at_its_end(
    finetune, adapter_of, after_step, monkeypatch, tmp_path, every, step
):
    """Its last step was not validated by the run that was stopped there."""
    expected, points = adapter_of(step), tmp_path / "points"
    keep = (*RUN, "--keep-best", "--val-every", every)
    after_step(LATER, raised(signal.SIGINT))
    assert finetune(*keep, "--max-steps", 6, "--checkpoint-dir", points).code == 130
    ended = finetune(*keep, "--max-steps", LATER, "--resume", points)
    assert ended.code == 0, ended.err
    assert said(ended)[0] == step and said(ended)[1].read_bytes() == expected


def test_a_stopped_run_goes_on_from_its_last_step(finetune, pyggml, after_step, tmp_path):
    whole, stopped, points = (tmp_path / n for n in ("whole.gguf", "stopped.gguf", "points"))
    keep = (*RUN, "--keep-best", "--max-steps", 6)
    assert finetune(*keep, output=whole).code == 0
    after_step(1, raised(signal.SIGINT))
    assert finetune(*keep, "--checkpoint-dir", points, output=stopped).code == 130
    assert finetune(*keep, "--resume", points, output=stopped).code == 0
    assert stopped.read_bytes() == whole.read_bytes()
