"""The second process that compiles a first run: it helps once and ends when told."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

from pyggml import load, threads
from pyggml.cli import compile_ahead
from pyggml.graph import Graph
from pyggml.jit import JIT
from pyggml.lora import LoraConfig, TrainConfig, attach
from pyggml.lora.trainer.passes import Passes

ASKED = JIT and threads.most() > 1
pytestmark = pytest.mark.skipif(not ASKED, reason="nothing to compile, or no second core for it")
LORA, TRAIN = LoraConfig(rank=2, modules=("attn_q",)), TrainConfig()
CTX = 16
PATIENCE = 600  # seconds until a helper that does nothing is given up


@pytest.fixture
def helpers(monkeypatch, tmp_path):
    """The helpers that were started, with a cache of their own."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(compile_ahead, "CACHE", tmp_path / "kernels")
    yield started
    assert all(process.returncode is not None for process in started), "none outlives the run"


@pytest.fixture(scope="module")
def plan(tiny):
    adapter = attach(load(tiny), LORA)
    return Passes.of(adapter.model, adapter.parameters, TRAIN, CTX).training.graph


def notes(folder):
    return list(folder.rglob("*.compiled"))


def wait_for_a_kernel(folder, helper):
    for _ in range(10 * PATIENCE):
        if list(folder.rglob("*.nbc")):
            return
        assert helper.poll() is None, "the helper ended without a kernel"
        sleep(0.1)
    raise AssertionError("no kernel came")


def test_a_helper_compiles_until_the_first_step(helpers, tiny, plan, tmp_path):
    with compile_ahead.run_helper(tiny, LORA, TRAIN, CTX, plan, "f32") as done:
        wait_for_a_kernel(tmp_path, helpers[0])
        assert not notes(tmp_path)
        done()
        assert helpers[0].wait(PATIENCE) == 0
        assert len(list(tmp_path.rglob("*.nbc"))) < 100, "it left some of 119"
        assert notes(tmp_path)
        written = notes(tmp_path)[0].read_text()
        done()  # after every later step
        assert notes(tmp_path)[0].read_text() == written
    with compile_ahead.run_helper(tiny, LORA, TRAIN, CTX, plan, "f32") as done:
        done()
    assert len(helpers) == 1, "a step of this kind has been taken"
    with compile_ahead.run_helper(tiny, LORA, TRAIN, CTX, plan, "bf16"):
        assert len(helpers) == 2, "other kernels"


def test_only_kernels_of_new_nodes_are_to_be_compiled(plan, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_ahead, "CACHE", tmp_path)
    known = Graph.of(plan["loss"])
    assert compile_ahead.share_to_compile(known, "f32") == 1
    with compile_ahead.run_helper(None, None, TRAIN, CTX, known, "f32") as done:
        done()
    assert compile_ahead.share_to_compile(known, "f32") == 0
    assert 0.2 < compile_ahead.share_to_compile(plan, "f32") < 0.8
    assert compile_ahead.share_to_compile(plan, "bf16") == 1


def test_a_run_that_fails_leaves_no_note(helpers, tiny, plan, tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        compile_ahead.run_helper(tiny, LORA, TRAIN, CTX, plan, "f32"),
    ):
        wait_for_a_kernel(tmp_path, helpers[0])
        raise KeyboardInterrupt
    assert helpers[0].returncode is not None, "it ended with the run"
    assert not notes(tmp_path)


@pytest.mark.parametrize("program", ["false", "no-such-program"])
def test_a_helper_that_does_not_start_is_no_error(helpers, tiny, plan, monkeypatch, program):
    monkeypatch.setattr(sys, "executable", program)
    with compile_ahead.run_helper(tiny, LORA, TRAIN, CTX, plan, "f32") as done:
        for helper in helpers:
            helper.wait(PATIENCE)
        done()


def test_the_command_asks_for_help_once(helpers, finetune, tmp_path):
    for _ in range(2):
        assert finetune("-o", tmp_path / "adapter.gguf").code == 0
    assert len(helpers) == 1 and len(notes(tmp_path)) == 1


def test_a_dry_run_asks_for_help_and_no_run_after_it(helpers, finetune, tmp_path):
    for given in (["--dry-run"], ["--dry-run"], ["-o", tmp_path / "adapter.gguf"]):
        assert finetune(*given).code == 0
        assert len(helpers) == 1 and len(notes(tmp_path)) == 1


def test_no_help_for_one_thread_or_where_nothing_is_kept(helpers, tiny, plan, monkeypatch):
    with compile_ahead.run_helper(
        Path(tiny), LORA, replace(TRAIN, threads=1), CTX, plan, "f32"
    ) as done:
        done()
    monkeypatch.setattr(compile_ahead, "CACHE", None)
    with compile_ahead.run_helper(Path(tiny), LORA, TRAIN, CTX, plan, "f32") as done:
        done()
    assert not helpers
