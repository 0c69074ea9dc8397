"""A training step, a prompt and a token by threads, and what each op makes of more of them.

usage: threads.py MODEL.gguf [--threads 1,2,4,8,16] [--tokens 512] [--steps 5] [--generate 32]

Each number of threads is a process of its own that may run on as many cores, the first ones of this
process; numbers above those are left out. The step is that of step.py, prompt and token those of
race.py. The share of an op is its rate on T threads over T₁ times its rate on one, where T₁ is how
many times as fast the microkernel for floats is on T threads: 1 is all that the machine gives. An
op that is not among the dozen longest has a dash. Prints two tables. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from machine import about

HERE = Path(__file__).parent


def run(script: str, arguments: list[str], cores: list[int]) -> dict[str, Any]:
    """The last line of a benchmark in a process on these cores."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=os.environ | {"NUMBA_NUM_THREADS": str(len(cores))},
        preexec_fn=partial(os.sched_setaffinity, 0, cores),
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def of_threads(options: argparse.Namespace, cores: list[int]) -> dict[str, Any]:
    """What is measured on so many cores: the line of step.py, and the rows of race.py."""
    n = ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    step = run("step.py", [options.model, *n], cores)
    ours = ["--ours", "--prompt", str(options.tokens), "--generate", str(options.generate)]
    rows = {f"step of {options.tokens}": step["tokens_per_second"]}
    return {**step, "rows": rows | run("race.py", [options.model, *ours], cores)}


def rates(measured: dict[int, dict[str, Any]]) -> list[str]:
    """Tokens a second: a row for each thing that is timed, a column for each number of threads."""
    names = list(next(iter(measured.values()))["rows"])
    lines = ["| tokens/s, threads | " + " | ".join(map(str, measured)) + " |"]
    lines += ["|---" * (len(measured) + 1) + "|"]
    for name in names:
        cells = (f"{each['rows'][name]:,.1f}" for each in measured.values())
        lines += [f"| {name} | " + " | ".join(cells) + " |"]
    return lines


def shares(measured: dict[int, dict[str, Any]]) -> list[str]:
    """Milliseconds of each op, and its share of what the machine gives."""
    first = measured[min(measured)]
    lines = ["| ms (share), threads | " + " | ".join(map(str, measured)) + " |"]
    lines += ["|---" * (len(measured) + 1) + "|"]
    for name, alone in first["by_op"].items():
        cells = []
        for each in measured.values():
            times = each["peak_gflops"] / first["peak_gflops"]
            taken = each["by_op"].get(name, 0.0)
            cells.append(f"{1e3 * taken:.1f} ({alone / taken / times:.2f})" if taken else "–")
        lines += [f"| {name} | " + " | ".join(cells) + " |"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", default="1,2,4,8,16")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--generate", type=int, default=32)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    counts = [*map(int, options.threads.split(","))]
    measured = {n: of_threads(options, cores[:n]) for n in counts if n <= len(cores)}
    print(f"{about()['cpu']}, {os.cpu_count()} cores\n")
    if left_out := sorted({*counts} - {*measured}):
        print(f"left out, for want of cores: {left_out}\n")
    print("\n".join([*rates(measured), "", *shares(measured)]))


if __name__ == "__main__":
    main()
