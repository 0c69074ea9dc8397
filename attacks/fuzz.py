"""Fuzzing: made-up and damaged input for every parser of foreign bytes.

python -m attacks.fuzz gguf --runs 1000000      a parser, that many inputs
python -m attacks.fuzz --seconds 60             each parser in turn, a minute each
python -m attacks.fuzz gguf --input FILE        the input of a failure again
python -m attacks.fuzz gguf --keep FOLDER       inputs that reach what the corpus does not, into it
python -m attacks.guided gguf -runs=1000000     coverage guides the inputs (`pip install atheris`)

Parsers, their seeds and the errors that they may raise are in attacks.targets. An input fails a
parser by any other exception, by more than a second, or by more than ten times its size and 100 MB
of memory. A failing input is kept in `failures/`, where the command was started.
"""

import argparse
import gc
import hashlib
import random
import resource
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from attacks.mutate import mutate
from attacks.targets import TARGETS, Target

MOST_SECONDS, MOST_TIMES, MOST_MORE = 1.0, 10, 100 << 20
MOST_INPUT = 1 << 14  # bytes: "a small input"
CORPUS = Path(__file__).parent / "corpus"
_LIBRARY = tuple(str(CORPUS.parents[1] / name) for name in ("pyggml", "lora", "cli"))


@dataclass
class Tally:
    """What the inputs of a parser did: how many it read, how many it refused, and the failures."""

    n_read: int = 0
    n_refused: int = 0
    slowest: float = 0.0
    failures: dict[str, bytes] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.n_read + self.n_refused + len(self.failures)


def check(target: Target, data: bytes, tally: Tally) -> None:
    """Give a parser one input, and count what it did."""
    peak, start = _peak_bytes(), time.process_time()
    try:
        target.read(data)
    except target.refusals:
        tally.n_refused += 1
    except Exception:  # whatever it is, it is a failure
        tally.failures[traceback.format_exc(limit=-4)] = data
        return
    else:
        tally.n_read += 1
    seconds, more = time.process_time() - start, _peak_bytes() - peak
    tally.slowest = max(tally.slowest, seconds)
    if seconds > MOST_SECONDS:
        tally.failures[f"took {seconds:.1f} s"] = data
    if more > MOST_TIMES * len(data) + MOST_MORE:
        tally.failures[f"took {more >> 20} MiB for {len(data)} bytes"] = data


def _peak_bytes() -> int:
    n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return n if sys.platform == "darwin" else n << 10


def seeds_of(target: Target) -> list[bytes]:
    """A parser's own seeds, and those in the corpus."""
    kept = [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*"))]
    return [*target.seeds(), *kept]


def inputs(target: Target, seed: int) -> Iterator[bytes]:
    """The seeds as they are, then changes of them without end."""
    seeds = seeds_of(target)
    yield from seeds
    rng = random.Random(seed)
    while True:
        yield mutate(rng, seeds, target.words, MOST_INPUT)


def warm_up(target: Target) -> None:
    """Read the seeds once, so that no later input is charged for what is imported or compiled.

    Raises what a seed is refused with: there is no fuzzing from a seed that is not read."""
    for data in target.seeds():
        target.read(data)


def attack(target: Target, n_runs: int, seconds: float, seed: int) -> Tally:
    """Try inputs until there were n_runs, the time is over, or ten kinds of failures were met."""
    warm_up(target)
    tally, end = Tally(), time.monotonic() + seconds
    for i, data in enumerate(inputs(target, seed)):
        if i >= n_runs or time.monotonic() > end or len(tally.failures) >= 10:
            return tally
        check(target, data, tally)
        if not i % 4096:
            gc.collect()
    raise AssertionError("inputs have no end")


def keep(target: Target, tally: Tally) -> None:
    """Write failing inputs to `failures/`, and say what each did."""
    folder = Path("failures")
    for what, data in tally.failures.items():
        folder.mkdir(exist_ok=True)
        path = folder / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.write_bytes(data)
        print(f"{path}:\n{what}".encode(errors="backslashreplace").decode())


def lines_of(target: Target, data: bytes) -> frozenset[tuple[str, int]]:
    """The lines of the library that an input reaches."""
    lines = set[tuple[str, int]]()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARY):
            return None
        lines.add((name, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        check(target, data, Tally())
    finally:
        sys.settrace(None)
    return frozenset(lines)


def keep_reaching(target: Target, folder: Path) -> int:
    """Copy into the corpus the inputs, smallest first, that reach further lines; how many."""
    warm_up(target)
    reached = {line for data in seeds_of(target) for line in lines_of(target, data)}
    candidates = sorted((path.read_bytes() for path in folder.iterdir()), key=len)
    n_kept = 0
    for data in candidates:
        further = lines_of(target, data) - reached
        if further:
            path = CORPUS / target.name / hashlib.sha256(data).hexdigest()[:12]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            reached |= further
            n_kept += 1
    return n_kept


def main() -> int:
    """The exit code: 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="attacks.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="parsers; none: all")
    parser.add_argument("--runs", type=int, help="inputs of each parser")
    parser.add_argument("--seconds", type=float, help="time of each parser; 60 without --runs")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--input", type=Path, help="one input, from this file")
    parser.add_argument("--keep", type=Path, help="a folder of inputs for the corpus")
    given = parser.parse_args()
    n_runs = given.runs or sys.maxsize
    seconds = given.seconds or (inf if given.runs else 60.0)
    n_failures = 0
    for name in given.targets or TARGETS:
        target, start = TARGETS[name], time.monotonic()
        if given.keep:
            print(f"{name}: {keep_reaching(target, given.keep)} of {given.keep} kept")
            continue
        if given.input:
            warm_up(target)
            tally = Tally()
            check(target, given.input.read_bytes(), tally)
        else:
            tally = attack(target, n_runs, seconds, given.seed)
        speed = tally.n / (time.monotonic() - start)
        print(
            f"{name:14} {tally.n:>9,} inputs, {speed:>7,.0f}/s, {tally.n_read:>9,} read, "
            f"{len(tally.failures)} failures, slowest {tally.slowest:.2f} s",
            flush=True,
        )
        keep(target, tally)
        n_failures += len(tally.failures)
    return bool(n_failures)


if __name__ == "__main__":
    sys.exit(main())
