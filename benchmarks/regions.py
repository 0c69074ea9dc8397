"""What it costs to share work out: our threads (pyggml.jit.regions) against Numba's own.

usage: regions.py [--rounds 9] [--layers omp,workqueue]

Calls from Python whose 2 or 64 tasks add one number each: our tasks, our loops with `prange`, and
the same loop on a layer of Numba's, each in a process of its own that takes turns with the others.
Prints a JSON line: microseconds of a call, medians over the rounds of 1000 calls.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from pyggml import threads
from pyggml.jit import parallel, prange
from pyggml.jit.frames import Floats1, Frame
from pyggml.jit.tasks import launch, stage, task_code

from machine import about, median_seconds
from turns import Runner

CALLS, STEP = 1000, 32  # numbers from one task's to the next, which lies in other cache lines
TASKS = (2, 64)


class Numbers(Frame):
    x: Floats1


@task_code(Numbers)
def _add_one(f, task, thread):
    f.x[task * STEP] += np.float32(1)


@parallel
def our_loop(x, n):
    for i in prange(n):
        x[i * STEP] += np.float32(1)


@numba.njit(parallel=True)
def numba_loop(x, n):
    for i in prange(n):
        x[i * STEP] += np.float32(1)


def one_call(of: str, n: int) -> Callable[[], object]:
    """What is timed: `of` is "tasks", "loop" or a layer of Numba's."""
    x = np.zeros(n * STEP, np.float32)
    if of == "tasks":
        tasks = stage(_add_one, Numbers(x=x), n)
        return lambda: launch(tasks)
    loop = our_loop if of == "loop" else numba_loop
    return lambda: loop(x, n)


def run(of: str, n: int, rounds: int) -> None:
    """Time it in turns, and print the result as a JSON line."""
    call = one_call(of, n)

    def calls() -> None:
        for _ in range(CALLS):
            call()

    print(json.dumps({"us": median_seconds(calls, rounds, True) / CALLS * 1e6}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", default="omp,workqueue")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--in-turns", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run(options.only[0], int(options.only[1]), options.rounds)
        return
    result: dict[str, object] = about("numba") | {"threads": threads.most()}
    layers = options.layers.split(",")
    for n in TASKS:
        runners = {}
        for of in ("tasks", "loop", *layers):
            os.environ["NUMBA_THREADING_LAYER"] = of if of in layers else "default"
            arguments = ("--only", of, str(n), "--rounds", str(options.rounds))
            runners[of] = Runner(sys.executable, Path(__file__), *arguments)
        for _ in range(options.rounds):
            lines = {of: runner.turn() for of, runner in runners.items()}
        result |= {f"{of} {n}": round(json.loads(s)["us"], 2) for of, s in lines.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
