"""Places: traps laid where commands write and read. No file is lost, nothing waits, all is said.

python -m attacks.places --runs 200 --seed 0

A folder holds a user's files. A trap is drawn for a command, and laid: its output is a link to, or
a second name of, what it reads or what is somebody's own; a pipe or a terabyte of nothing stands
where it reads; a link stands where its lock or its partial file would; strangers lie in its folders
of kept tokens and checkpoints. Then, with --force and without, every file but the output must be as
it was, and the command must have ended by itself, without a traceback.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from attacks.kills import COMMAND, SCENARIOS, Scenario, environment, fresh, write_inputs

_LONGEST = 120.0  # seconds; a pipe without a writer is given up after 60
_OWN = b"weeks of my own work\n"
Trap = Callable[[Path, Scenario, random.Random], None]


def output_is_a_link(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    """To an input, or to a file of the user."""
    name = drawn.choice(["base.gguf", "lora.gguf", "text.txt", "mine.txt"])
    (folder / scenario.output).symlink_to(folder / name)


def output_has_two_names(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    os.link(folder / drawn.choice(["base.gguf", "lora.gguf"]), folder / scenario.output)


def output_is_a_stranger(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    (folder / scenario.output).write_bytes(_OWN)


def beside_is_a_stranger(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    ending = drawn.choice([".yaml", ".html", ".metrics.jsonl", ".metrics.old.jsonl"])
    (folder / f"a{ending}").write_bytes(_OWN)


def lock_is_a_link(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    (folder / f".{scenario.output}.lock").symlink_to(folder / "mine.txt")
    (folder / "points").mkdir(exist_ok=True)
    (folder / "points" / ".lock").symlink_to(folder / "mine.txt")


def input_is_no_file(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    name = drawn.choice(
        [n for n in ("base.gguf", "text.txt", "lora.gguf") if n in scenario.arguments]
    )
    (folder / name).unlink()
    if drawn.random() < 0.5:
        os.mkfifo(folder / name)
    else:
        (folder / name).touch()
        os.truncate(folder / name, 1 << 40)


def folders_hold_strangers(folder: Path, scenario: Scenario, drawn: random.Random) -> None:
    for inside, name in (("points", "step-00000004.gguf"), ("points.tokens", "0" * 32 + ".json")):
        (folder / inside).mkdir(exist_ok=True)
        (folder / inside / name).write_bytes(_OWN)


TRAPS: tuple[Trap, ...] = (
    output_is_a_link,
    output_has_two_names,
    output_is_a_stranger,
    beside_is_a_stranger,
    lock_is_a_link,
    input_is_no_file,
    folders_hold_strangers,
)


def content(folder: Path) -> dict[str, bytes]:
    """The user's files, those behind links too; a terabyte is its size."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if size < 1 << 30 else b"%d" % size
        for path in folder.rglob("*")
        if path.is_file() and (size := path.stat().st_size) >= 0
    }


def fall(scenario: Scenario, inputs: Path, trap: Trap, force: bool, drawn: random.Random) -> str:
    """Lay the trap and run the command; what was lost, or went wrong, or ""."""
    with fresh(inputs) as folder:
        (folder / "mine.txt").write_bytes(_OWN)
        trap(folder, scenario, drawn)
        before = content(folder)
        arguments = [*scenario.arguments, *(["--force"] if force else [])]
        try:
            done = subprocess.run(
                [*COMMAND, *arguments], cwd=folder, env=environment(), capture_output=True,
                stdin=subprocess.DEVNULL, timeout=_LONGEST, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return "it waits"
        after = content(folder)
        named = {scenario.output, *(f"a{e}" for e in (".yaml", ".html", ".metrics.jsonl"))}
        named |= {"a.metrics.old.jsonl"}
        free = named if force else set()
        lost = [n for n, raw in before.items() if after.get(n) != raw and n not in free]
        if lost:
            return f"lost: {', '.join(lost)}"
        words = done.stderr[-300:].decode(errors="replace")
        return f"a traceback: {words}" if b"Traceback" in done.stderr else ""


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    options.add_argument("--runs", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    settings = options.parse_args()
    drawn, counts, n_failed = random.Random(settings.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        inputs = Path(name)
        write_inputs(inputs)
        for _ in range(settings.runs):
            scenario, trap = drawn.choice(SCENARIOS), drawn.choice(TRAPS)
            force = scenario.name != "convert" and drawn.random() < 0.5
            wrong = fall(scenario, inputs, trap, force, drawn)
            counts[trap.__name__] += 1
            if wrong:
                n_failed += 1
                print(f"{scenario.name}, {trap.__name__}, force {force}: {wrong}", flush=True)
    print(f"{counts.total()} traps, {n_failed} failures: {dict(counts)}")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
