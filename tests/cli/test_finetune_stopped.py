"""Ctrl-C, and runs that go on where they were stopped."""

import os
import shlex
import signal

import pytest

from pyggml.lora import Trainer
from pyggml.lora.trainer import lock

pytestmark = pytest.mark.usefixtures("ctrl_c")


def test_ctrl_c_ends_after_the_step_and_the_run_can_be_resumed(
    finetune, pyggml, signal_after, tmp_path
):
    whole, stopped, folder = (tmp_path / n for n in ("whole.gguf", "stopped.gguf", "points"))
    uninterrupted = finetune("--lora-modules", "attn_q,ffn_up", output=whole)
    result = uninterrupted.row("result")
    signal_after(2)
    arguments = ("--lora-modules", "attn_q,ffn_up", "--checkpoint-dir", folder)
    arguments += ("--checkpoint-every", 1)
    ended = finetune(*arguments, output=stopped)
    assert ended.code == 130 and "-- before" not in ended.out
    assert "after step 2 of 4" in ended.row("stopped")
    assert stopped.stat().st_size == whole.stat().st_size
    assert stopped.read_bytes() != whole.read_bytes()
    assert len(list(folder.iterdir())) == 2  # of which the newest is taken
    program, *arguments = shlex.split(ended.row("resume"))
    assert program == "pyggml-finetune"
    assert arguments[arguments.index("--resume") + 1] == str(folder)
    resumed = pyggml("finetune", *arguments)
    assert resumed.code == 0
    assert stopped.read_bytes() == whole.read_bytes()
    assert "4, 2 of them done" in resumed.row("steps")
    assert resumed.row("result") == result and result.startswith("step 4 of 4: loss ")


def test_without_a_folder_for_checkpoints_the_adapter_is_saved_all_the_same(
    finetune, signal_after, tmp_path
):
    signal_after(1)
    ended = finetune()
    assert ended.code == 130 and "without --checkpoint-dir this run cannot be resumed" in ended.out
    assert (tmp_path / "adapter.gguf").exists()


def test_a_second_ctrl_c_ends_at_once(finetune, signal_after, tmp_path):
    signal_after(2, n=2)
    before = signal.getsignal(signal.SIGINT)
    assert finetune("--checkpoint-dir", tmp_path / "points").code == 130
    assert not (tmp_path / "adapter.gguf").exists()
    assert not (tmp_path / "points").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_ignores_ctrl_c_goes_on(finetune, signal_after):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_after(2)
    assert finetune().code == 0
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_ctrl_c_before_the_run_is_no_traceback(finetune, monkeypatch):
    monkeypatch.setattr(Trainer, "reserve", lambda self: signal.raise_signal(signal.SIGINT))
    ended = finetune()
    assert (ended.code, ended.err.strip()) == (130, "pyggml: stopped")


def test_a_resumed_folder_gets_the_next_checkpoints(finetune, signal_after, tmp_path):
    points = tmp_path / "points"
    signal_after(2)
    assert finetune("--checkpoint-dir", points).code == 130
    assert finetune("--resume", points).code == 0
    assert sorted(p.name for p in points.iterdir()) == ["step-00000002.gguf", "step-00000004.gguf"]


def test_checkpoints_without_a_folder_are_refused(finetune, tmp_path):
    ended = finetune("--checkpoint-every", 2)
    assert ended.code == 2 and "--checkpoint-every wants --checkpoint-dir, a folder" in ended.err
    assert not (tmp_path / "adapter.gguf").exists()


def test_two_runs_do_not_share_a_folder_or_an_output(finetune, tmp_path):
    points, out = tmp_path / "points", tmp_path / "adapter.gguf"
    points.mkdir()
    for place in (points, out):
        with lock.hold(place):
            ended = finetune("--checkpoint-dir", points)
            reason = f"{place}: is in use by process {os.getpid()}: wait for its end"
            assert ended.code == 2 and reason in ended.err and ended.out == ""
    assert finetune("--checkpoint-dir", points).code == 0
