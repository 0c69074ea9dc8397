"""`--resume auto`: the same command starts a run and continues it, however it ended."""

import os
import signal
import subprocess
import sys
import time

import pytest


def points_of(folder):
    return sorted(p.name for p in folder.glob("step-*.gguf"))


def test_it_starts_a_run_and_continues_it(finetune, signal_after, tmp_path):
    folder = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 1)
    signal_after(2)
    assert finetune(*folder, "--resume", "auto").code == 130
    ended = finetune(*folder, "--resume", "auto", "--checkpoint-keep", 3)
    assert ended.code == 0
    assert "step 3/4" in ended.out and "step 2/4" not in ended.out
    assert points_of(tmp_path / "c") == [f"step-0000000{n}.gguf" for n in (2, 3, 4)]


def test_it_wants_a_folder(finetune):
    ended = finetune("--resume", "auto")
    assert ended.code == 2 and "--resume auto wants --checkpoint-dir" in ended.err


@pytest.mark.filterwarnings("default")
def test_a_damaged_checkpoint_gives_way_to_an_older_one(finetune, signal_after, tmp_path):
    folder = ("--checkpoint-dir", tmp_path / "c", "--checkpoint-every", 1)
    signal_after(3)
    finetune(*folder)
    newest = tmp_path / "c" / "step-00000003.gguf"
    newest.write_bytes(newest.read_bytes()[:-100])
    ended = finetune(*folder, "--resume", "auto")
    assert "step 3/4" in ended.out and "step 2/4" not in ended.out
    assert "step-00000003.gguf: is damaged; an older one is taken" in ended.err


@pytest.mark.skipif(os.name != "posix", reason="only POSIX has SIGKILL")
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    pyggml, tiny, text, tmp_path
):
    def command(name):
        settings = f"--ctx 16 --lora-rank 2 --prompt a --max-steps 12 --epochs 99 --threads 1 " \
            f"--checkpoint-every 1 --resume auto --checkpoint-dir {tmp_path / name}"  # fmt: skip
        files = ["-m", tiny, "-f", text, "-o", tmp_path / f"{name}.gguf"]
        return ["finetune", *files, *settings.split()]

    assert pyggml(*command("whole")).code == 0
    for seen in (1, 5):
        words = [sys.executable, "-P", "-m", "pyggml.cli", *command("killed")]
        run = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        while run.poll() is None and points_of(tmp_path / "killed")[-1:] < [
            f"step-{seen:08d}.gguf"
        ]:
            time.sleep(0.01)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    assert pyggml(*command("killed")).code == 0
    assert (tmp_path / "killed.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
