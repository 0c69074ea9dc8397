"""The adapter file: replaced only at the end, and not lost where a disk refuses."""

import os
import re
import tempfile
from pathlib import Path

import pytest

import pyggml as library
from pyggml import gguf
from pyggml.errors import PyggmlError
from pyggml.gguf import reader
from pyggml.lora import Trainer
from pyggml.lora.optim import FlatOptimiser


def an_adapter():
    """The bytes of a file that is an adapter's, as far as its kind goes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "older.gguf")
        gguf.write(path, {"general.type": "adapter"}, [])
        return path.read_bytes()


OLDER = an_adapter()


def test_an_older_adapter_is_replaced_only_at_the_end(finetune, tmp_path, monkeypatch):
    path = tmp_path / "adapter.gguf"
    path.write_bytes(OLDER)
    whole = Trainer.run

    def watched(self, report, **how):
        assert path.read_bytes() == OLDER
        return whole(self, report, **how)

    monkeypatch.setattr(Trainer, "run", watched)
    ended = finetune()
    assert ended.code == 0 and ended.row("output").endswith("it is replaced at the end")
    assert path.read_bytes()[:4] == b"GGUF"
    endings = (".gguf", ".html", ".metrics.jsonl", ".yaml")
    assert sorted(tmp_path.iterdir()) == [path.with_suffix(e) for e in endings]


def full_disk(folder):
    """An os.fsync for which this folder's disk is full."""

    def fsync(handle):
        if Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(folder):
            raise OSError(28, "No space left on device")

    return fsync


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks /proc for a handle's path")
@pytest.mark.parametrize("spare", [True, False], ids=["elsewhere is room", "no room at all"])
def test_a_full_disk_leaves_the_older_file_and_saves_the_work(
    finetune, tiny, tmp_path, tmp_path_factory, monkeypatch, spare
):
    path, elsewhere = tmp_path / "adapter.gguf", tmp_path_factory.mktemp("elsewhere")
    path.write_bytes(OLDER)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    monkeypatch.setattr(os, "fsync", full_disk(tmp_path if spare else "/"))
    ended = finetune()
    assert ended.code == 2 and f"{path}: cannot be written: No space left on device" in ended.err
    assert path.read_bytes() == OLDER and list(tmp_path.iterdir()) == [path]
    rescue = list(elsewhere.rglob("*"))
    if spare:
        assert f"; the adapter of step 4 was saved as {rescue[-1]}\n" in ended.err
        assert library.load(tiny, rescue[-1]).adapters
    else:
        assert rescue == []


def test_numbers_of_half_a_step_are_not_saved(finetune, monkeypatch):
    """An error after steps within the backward pass; those after it begin when all is well."""
    lengths = []

    def check_length(self, norm):
        lengths.append(norm)
        if len(lengths) == 3:
            raise PyggmlError("the gradient is too long")

    monkeypatch.setattr(FlatOptimiser, "check_length", check_length)
    for options, end in (
        ((), "; the adapter of step 2 was saved as "),
        (("--step-in-backward",), "; the adapter was not saved: half of the step had changed it"),
    ):
        ended = finetune(*options, "--grad-accum", 1)
        assert ended.code == 2 and f"the gradient is too long{end}" in ended.err
        lengths.clear()


def test_a_disk_that_is_too_small_is_noticed_before(finetune, monkeypatch):
    class Usage:
        free = 4000

    monkeypatch.setattr("shutil.disk_usage", lambda folder: Usage)
    ended = finetune()
    assert ended.code == 2 and "its disk has 4.0 kB left" in ended.err
    assert "data" not in ended.out


# -- a learning rate that is too high -----------------------------------------------------------


def test_an_adapter_that_makes_no_numbers_is_not_written(finetune, tmp_path, monkeypatch):
    """The last update may be what breaks it: no later step finds out."""
    whole, older = Trainer.run, tmp_path / "adapter.gguf"
    older.write_bytes(OLDER)

    def broken(self, report, **how):
        done = whole(self, report, **how)
        self.parameters.data[:] = float("nan")
        return done

    monkeypatch.setattr(Trainer, "run", broken)
    ended = finetune()
    said = "the adapter holds numbers that are none; --lr may be too high; the adapter was not"
    assert ended.code == 2 and said in ended.err and "result" not in ended.out
    assert older.read_bytes() == OLDER


def test_a_loss_that_rises_is_warned_about(finetune, monkeypatch):
    whole = Trainer._step

    def rising(self):
        report = whole(self)
        self.history.losses[-1] = 1.0 + self.progress.step
        return report

    monkeypatch.setattr(Trainer, "_step", rising)
    ended = finetune("--max-steps", 12)
    early, late = re.findall(r"\nwarning    the loss more than doubled, (\S+) → (\S+): ", ended.out)
    assert ended.code == 0 and early == ("4.000", "9.000") and late == ("4.500", "10.500")


def test_a_run_maps_its_model_once(finetune, tiny, tmp_path, monkeypatch):
    """Mapped twice, as for the answers before, each page would count twice as the process's."""
    mapped, map_file = [], reader._map_file
    monkeypatch.setattr(reader, "_map_file", lambda p: mapped.append(p) or map_file(p))
    assert finetune("-o", tmp_path / "adapter.gguf").code == 0
    assert [p for p in mapped if p == Path(tiny)] == [Path(tiny)]
