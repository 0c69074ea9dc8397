"""Kills: commands ended at drawn moments. The next start ends with the bytes of an undisturbed run.

python -m attacks.kills --runs 100             each command ended that often, in each way in turn
python -m attacks.kills train --seed 7         one command, other moments
python -m attacks.kills --forked               more of them in an hour: each command begins in a
                                               fork of a process that has imported what it needs
python -m attacks.kills --jumping-clock        while Python's clocks jump (attacks/jumping_clock)

A command is ended by SIGKILL, SIGTERM or Ctrl-C at a moment drawn over its whole length, by a limit
on the size of files, or (as root on Linux) by a disk that is full. Then its output must be absent
or whole, its words no traceback, and the same command, started again, must make the very bytes that
it makes undisturbed and leave no partial file. Training that is asked to end saves the adapter of
the step under way: that must load.
"""

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
JUMPING_CLOCK = Path(__file__).parent / "jumping_clock"
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
LIMIT, DISK = "a file too large", "a full disk"
COMMAND = [sys.executable, "-m", "pyggml.cli"]
_LONGEST = 600.0  # seconds
_IMPORTED = ("finetune", "merge", "quantize", "imatrix", "convert_lora")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A command: its arguments, in a folder with `base.gguf`, `lora.gguf` and `text.txt`, and what
    it writes there. `saves_early`: an adapter, also when it is asked to end."""

    name: str
    arguments: Sequence[str]
    output: str
    saves_early: bool = False


_TRAINING = ("--ctx", "32", "--batch", "2", "--max-steps", "16", "--val-every", "0")
_POINTS = ("--checkpoint-dir", "points", "--checkpoint-every", "2", "--resume", "auto")
SCENARIOS = (
    Scenario(
        "train",
        ("finetune", "-m", "base.gguf", "-f", "text.txt", "-o", "a.gguf", *_TRAINING, *_POINTS),
        "a.gguf",
        saves_early=True,
    ),
    Scenario(
        "merge", ("merge", "-m", "base.gguf", "--lora", "lora.gguf", "-o", "m.gguf"), "m.gguf"
    ),
    Scenario("quantize", ("quantize", "base.gguf", "q.gguf", "Q4_K_M"), "q.gguf"),
    Scenario(
        "imatrix",
        ("imatrix", "-m", "base.gguf", "-f", "text.txt", "-o", "i.gguf", "--ctx", "32"),
        "i.gguf",
    ),
    Scenario("convert", ("convert-lora", "lora.gguf", "peft", "-m", "base.gguf"), "peft"),
)


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A command that nobody ends: its output's digest, its seconds, the bytes of its folder."""

    digest: str
    seconds: float
    n_bytes: int


def environment() -> dict[str, str]:
    """That of this process, in which pyggml is this checkout's, and the clock jumps if it does."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    before = [str(JUMPING_CLOCK)] if str(JUMPING_CLOCK) in given else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*before, str(ROOT)]),
        "PYTHONUNBUFFERED": "1",
    }


def digest(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files with their names; "" where there is none."""
    if not path.exists():
        return ""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


Limits = Mapping[int, int]
NO_LIMITS: Limits = {}


def take(limits: Limits) -> None:
    """Give this process these limits."""
    for kind, n_bytes in limits.items():
        resource.setrlimit(kind, (n_bytes, n_bytes))


class Fresh:
    """A command in a process of its own. limits: kind of `resource` → bytes."""

    def __init__(self, scenario: Scenario, folder: Path, limits: Limits = NO_LIMITS) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *scenario.arguments],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: take(limits),
        )

    def wait(self, seconds: float) -> None:
        """Until it ends, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, bytes]:
        """Its exit code, once it has ended, and what it said."""
        words = self.process.communicate(timeout=_LONGEST)[1]
        return self.process.returncode, words


class Forked:
    """The same in a fork of a process that has imported what commands need."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload([f"pyggml.cli.commands.{name}" for name in _IMPORTED])

    def __init__(self, scenario: Scenario, folder: Path, limits: Limits = NO_LIMITS) -> None:
        descriptor, self._words = tempfile.mkstemp()
        os.close(descriptor)
        given = scenario.arguments, str(folder), self._words, limits
        self._process = self._context.Process(target=run_here, args=given)
        self._process.start()

    def wait(self, seconds: float) -> None:
        """Until it ends, so long at most."""
        self._process.join(seconds)

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, number)

    def end(self) -> tuple[int, bytes]:
        """Its exit code, once it has ended, and what it said."""
        self._process.join(_LONGEST)
        words = Path(self._words).read_bytes()
        Path(self._words).unlink()
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode, words


def run_here(arguments: Sequence[str], folder: str, words: str, limits: Limits) -> None:
    """The command, in this process, whose standard error is a file."""
    os.chdir(folder)
    os.dup2(os.open(words, os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    take(limits)
    from pyggml.cli.__main__ import main

    sys.exit(main(arguments))


Start = type[Fresh] | type[Forked]


def run_undisturbed(scenario: Scenario, inputs: Path, command: Start = Fresh) -> Undisturbed:
    """Run a command twice, the second time with its kernels compiled.

    Raises AssertionError unless it succeeds and writes the same twice.
    """
    digests, seconds, n_bytes = [], 0.0, 0
    for _ in range(2):
        with fresh(inputs) as folder:
            start = time.monotonic()
            code, words = command(scenario, folder).end()
            assert code == 0, words.decode(errors="replace")
            seconds = time.monotonic() - start
            digests.append(digest(folder / scenario.output))
            n_bytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert digests[0] == digests[1] != "", f"{scenario.name} does not write the same twice"
    return Undisturbed(digests[0], seconds, n_bytes)


@contextlib.contextmanager
def fresh(inputs: Path, most_bytes: int = 0) -> Iterator[Path]:
    """A folder with the inputs of every command, on a disk of its own of `most_bytes` if given."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if most_bytes:
            size = f"size={most_bytes}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", made], check=True)
        try:
            for path in inputs.iterdir():
                shutil.copyfile(path, folder / path.name)
            yield folder
        finally:
            if most_bytes:
                subprocess.run(["umount", "-l", made], check=True)


def faults(
    scenario: Scenario, folder: Path, words: bytes, whole: Undisturbed, command: Start = Fresh
) -> list[str]:
    """What is wrong after an end, and after the start that follows it."""
    wrong = []
    if b"Traceback" in words:
        wrong.append(f"a traceback: {words[-600:].decode(errors='replace')}")
    output = folder / scenario.output
    if digest(output) not in ("", whole.digest) and not (scenario.saves_early and loads(output)):
        wrong.append("its output is not whole")
    if output.is_dir():  # a folder is written once
        shutil.rmtree(output)
    code, words = command(scenario, folder).end()
    if code:
        wrong.append(f"the next start ended with {code}: {words[-600:]!r}")
    elif digest(folder / scenario.output) != whole.digest:
        wrong.append("the next start wrote other bytes")
    left = [p.name for p in folder.rglob("*.partial")]
    return [*wrong, f"left {left}"] if left else wrong


def loads(adapter: Path) -> bool:
    """Whether an adapter beside its model is one that the model takes."""
    import pyggml
    from pyggml.errors import AdapterError

    try:
        pyggml.load(adapter.parent / "base.gguf", adapter=adapter)
    except AdapterError:
        return False
    return True


def attack(
    scenario: Scenario,
    inputs: Path,
    whole: Undisturbed,
    way: str,
    rng: random.Random,
    command: Start,
) -> list[str]:
    """End a command in this way, at a drawn moment; what is wrong after it."""
    n_inputs = sum(path.stat().st_size for path in inputs.iterdir())
    spare = rng.randrange(1, whole.n_bytes - n_inputs)
    moment = rng.uniform(0, 1.1 * whole.seconds)
    with fresh(inputs, n_inputs + (64 << 10) + spare if way == DISK else 0) as folder:
        process = command(scenario, folder, {resource.RLIMIT_FSIZE: spare} if way == LIMIT else {})
        if way in SIGNALS:
            process.wait(moment)
            process.send(SIGNALS[way])
        words = process.end()[1]
        if way == DISK:
            size = f"remount,size={4 * whole.n_bytes + (1 << 20)}"
            subprocess.run(["mount", "-o", size, str(folder)], check=True)
        return faults(scenario, folder, words, whole, command)


def ways() -> tuple[str, ...]:
    """The ways to end a command that this machine has."""
    is_root = sys.platform == "linux" and os.geteuid() == 0
    return (*SIGNALS, LIMIT, *([DISK] if is_root else []))


def write_inputs(folder: Path) -> None:
    """A small model, an adapter for it, and a text."""
    import pyggml
    from attacks.targets import small_model
    from pyggml.lora import LoraConfig, attach

    path = folder / "base.gguf"
    path.write_bytes(small_model(width=256, n_blocks=2))
    adapter = attach(pyggml.load(path), LoraConfig(rank=4))
    data = adapter.parameters.data
    data[:] = np.random.default_rng(1).normal(0, 0.1, len(data))
    adapter.save(folder / "lora.gguf")
    (folder / "text.txt").write_text("the cat sat on the mat, and then the dog. " * 200)


def main() -> int:
    """The exit code: 1 if a fault was met."""
    parser = argparse.ArgumentParser(prog="attacks.kills", description=__doc__.partition("\n")[0])
    names = [s.name for s in SCENARIOS]
    parser.add_argument("scenarios", nargs="*", choices=[[], *names], help="commands; none: all")
    parser.add_argument("--runs", type=int, default=20, help="ends of each command")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--forked", action="store_true", help="begin in a fork")
    parser.add_argument("--jumping-clock", action="store_true", help="of every command")
    given = parser.parse_args()
    command = Forked if given.forked else Fresh
    if given.jumping_clock:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(JUMPING_CLOCK), str(ROOT)])
    n_faults, rng = 0, random.Random(given.seed)
    with tempfile.TemporaryDirectory() as made:
        inputs = Path(made)
        write_inputs(inputs)
        for scenario in SCENARIOS:
            if scenario.name in (given.scenarios or names):
                n_faults += attack_often(scenario, inputs, given.runs, rng, command)
    return bool(n_faults)


def attack_often(
    scenario: Scenario, inputs: Path, n_runs: int, rng: random.Random, command: Start
) -> int:
    """End a command n_runs times, in each way in turn, and print what came of it."""
    whole = run_undisturbed(scenario, inputs, command)
    n_faults, counts = 0, Counter[str]()
    for i in range(n_runs):
        way = ways()[i % len(ways())]
        counts[way] += 1
        for fault in attack(scenario, inputs, whole, way, rng, command):
            n_faults += 1
            print(f"{scenario.name} after {way}: {fault}", flush=True)
    how = ", ".join(f"{n} by {way}" for way, n in counts.items())
    print(f"{scenario.name:9} {n_runs} ends ({how}): {n_faults} faults", flush=True)
    return n_faults


if __name__ == "__main__":
    sys.exit(main())
