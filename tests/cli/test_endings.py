"""A run that is ended from outside: what is on the disk, what is said, and the exit code."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest
from processes import python

import pyggml as library
from pyggml.cli.terminal.interrupt import stop_on_signals
from pyggml.lora import Trainer

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and terminals of POSIX")
PATIENCE = 600  # seconds: on a busy machine, with kernels to compile


@pytest.fixture
def started(tiny, text, tmp_path):
    """started(*arguments, **of Popen) -> a process that trains for a very long time."""
    processes = []

    def start(*arguments, **options):
        command = [sys.executable, "-P", "-m", "pyggml.cli", "finetune", "-m", tiny, "-f", text]
        command += ["-o", tmp_path / "adapter.gguf", "--ctx", 16, "--lora-rank", 2, "--prompt", "a"]
        command += ["--epochs", 100_000, "--threads", 1, *arguments]
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite under nohup ignores it
        processes.append(subprocess.Popen([str(c) for c in command], **options))
        signal.signal(signal.SIGHUP, before)
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE)  # what it started may hold its pipes


def points_of(folder):
    return sorted(p.name for p in folder.glob("step-*.gguf"))


def wait_for(found):
    end = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.05)


# -- before the first step ----------------------------------------------------------------------


@pytest.fixture
def stopped_early(monkeypatch):
    """Ctrl-C while the loss is measured before the first step."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    whole = Trainer._validate

    def validate(self, report):
        signal.raise_signal(signal.SIGINT)
        return whole(self, report)

    monkeypatch.setattr(Trainer, "_validate", validate)
    yield
    signal.signal(signal.SIGINT, before)


def test_before_the_first_step_adapter_and_checkpoints_stay_as_they_were(
    finetune, stopped_early, tmp_path
):
    older = tmp_path / "adapter.gguf"
    older.write_bytes(b"a good one")
    ended = finetune("--checkpoint-dir", tmp_path / "deep" / "points", "--force")
    assert ended.code == 130
    assert (
        "stopped    before a step was made; adapter and checkpoints are as they were\n" in ended.out
    )
    assert "resume" not in ended.out and "result" not in ended.out
    assert older.read_bytes() == b"a good one"
    left = {p.relative_to(tmp_path).parts[:2] for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {("adapter.gguf",), ("deep", "points.tokens")}  # the text's, for the next run


def test_nor_does_it_in_a_run_that_was_resumed(finetune, tmp_path, monkeypatch):
    points, out = tmp_path / "points", tmp_path / "adapter.gguf"
    assert finetune("--max-steps", 2, "--checkpoint-dir", points).code == 0
    (point,) = points.iterdir()
    point.rename(points / "step-00000001.gguf")  # so that the file's name says less than it holds
    out.write_bytes(b"a good one")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(Trainer, "is_done", property(lambda self: False))
    monkeypatch.setattr(Trainer, "_begin", lambda self: self.stop())
    ended = finetune("--max-steps", 2, "--resume", points, "--force")
    signal.signal(signal.SIGINT, before)
    assert ended.code == 130 and "are as they were" in ended.out
    assert out.read_bytes() == b"a good one" and points_of(points) == ["step-00000001.gguf"]


# -- a closed terminal, a closed pipe -----------------------------------------------------------


def test_a_hang_up_saves_adapter_and_checkpoint(started, tmp_path, tiny):
    """The shell and the system each send one. SIGTERM takes the same way (see below)."""
    points = tmp_path / "points"
    run = started("--checkpoint-dir", points, "--checkpoint-every", 1, stdout=subprocess.DEVNULL,
                  stderr=subprocess.PIPE, text=True)  # fmt: skip
    wait_for(lambda: len(points_of(points)) == 2)
    for _ in range(2):
        run.send_signal(signal.SIGHUP)
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 130
    assert "Traceback" not in err, err
    assert library.load(tiny, tmp_path / "adapter.gguf").adapters


def test_a_reader_that_goes_away_ends_the_run_as_sigterm_does(started, tmp_path, tiny):
    points = tmp_path / "points"
    run = started("--checkpoint-dir", points, "--checkpoint-every", 1, stdout=subprocess.PIPE,
                  stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert any("loss" in line for line in run.stdout)
    run.stdout.close()
    run.stdout = None
    _, err = run.communicate(timeout=PATIENCE)
    assert (run.returncode, err) == (130, "")
    (newest,) = points_of(points)[-1:]
    assert library.load(tiny, tmp_path / "adapter.gguf").adapters
    assert int(newest[5:13]) < 100_000, "not to the end"


def test_a_closed_terminal_ends_the_run_and_saves(started, tmp_path, tiny):
    """As a window that is closed: the system sends a hang-up, and nothing can be written."""
    import fcntl
    import termios

    leader, follower = os.openpty()
    run = started("--checkpoint-dir", tmp_path / "points", stdin=follower, stdout=follower,
                  stderr=follower, start_new_session=True,
                  preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))  # fmt: skip
    os.close(follower)
    said, end = b"", time.monotonic() + PATIENCE
    while b"step 1" not in said:
        assert time.monotonic() < end and select.select([leader], [], [], PATIENCE)[0], said
        said += os.read(leader, 4096)
    os.close(leader)
    assert run.wait(timeout=PATIENCE) == 130
    assert library.load(tiny, tmp_path / "adapter.gguf").adapters
    assert len(points_of(tmp_path / "points")) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")  # noqa: PTH110
def test_a_full_disk_for_what_is_said_is_an_error_at_the_end(monkeypatch):
    asked = []
    with open("/dev/full", "w") as full:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", full)
        with (
            pytest.raises(OSError, match="No space left"),
            stop_on_signals(lambda: asked.append("stop")),
        ):
            for _ in range(3):
                sys.stdout.write("step 1")
                sys.stdout.flush()
            asked.append("saved")
    assert asked == ["stop", "saved"]


# -- commands that write a model ----------------------------------------------------------------


SLOW = """
import sys, time
import pyggml.requantize
from pyggml.cli.__main__ import main
module = sys.modules["pyggml.requantize.requantize"]  # the package's name for it is a function's
pack = module.quantize
def slow(*given):
    packed = pack(*given)
    print("packed", file=sys.stderr, flush=True)
    time.sleep(1)
    return packed
module.quantize = slow
sys.exit(main(sys.argv[1:]))
"""


LOST = """
import ctypes, os, signal, sys, threading, time
import click
from pyggml.cli.terminal.exit import run

def slowly(thread, start=threading.Thread.start):  # as on a busy machine
    start(thread)
    time.sleep(float(sys.argv[2]))

threading.Thread.start = slowly

@ctypes.CFUNCTYPE(None)
def called_by_c():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    time.sleep(0)

@click.command()
def command():
    called_by_c()
    time.sleep(600)

sys.exit(run(lambda: command, "pyggml", []))
"""


@pytest.mark.quick
@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
@pytest.mark.parametrize("busy", ["0", "0.3"])
def test_a_signal_within_a_function_that_c_calls_ends_the_command(name, code, busy):
    """As LLVM does while kernels are compiled: Python ignores what such a function raises."""
    ended = python("-P", "-c", LOST, name, busy)
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr, ended.stderr


def test_a_signal_while_a_model_is_written_leaves_nothing_half_written(tiny, tmp_path):
    out = tmp_path / "out.gguf"
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", SLOW, "quantize", tiny, out, "Q8_0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "packed\n" in iter(run.stderr.readline, "")
    assert list(tmp_path.glob(".out.gguf.*.partial"))
    run.send_signal(signal.SIGTERM)
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 143
    assert "Traceback" not in err, err
    assert list(tmp_path.iterdir()) == []
