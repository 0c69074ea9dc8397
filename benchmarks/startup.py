"""What a user waits for: import, first token, first step; nothing compiled, then all compiled.

usage: startup.py [--rounds 3] [--kernels 20]

Runs the demo's base model through the commands, in processes of their own, with a kernel cache of
its own that is emptied first. Prints a JSON line, and the seconds that the slowest kernels took to
compile, callees not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from pyggml.cli import demo

from machine import about

COMMAND = [sys.executable, "-P", "-m", "pyggml.cli"]  # -P: not the checkout that lies here
GENERATE = [*COMMAND, "generate", "-m", str(demo.BASE), "-p", "ROMEO:", "-n", "1"]


def seconds(command: list[str], cache: str, until: str | None = None) -> float:
    """Until the process ends, or prints a line that starts with `until`."""
    environment = os.environ | {"XDG_CACHE_HOME": cache, "LOCALAPPDATA": cache}
    began = perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if until is not None and line.startswith(until):
                break
        else:
            if process.wait() or until is not None:
                raise SystemExit(f"{' '.join(command)} ended without {until or 'success'}")
        taken = perf_counter() - began
        process.kill()
    return taken


def first_step(cache: str) -> float:
    """From the command to the first finished step of the demo."""
    command = [*COMMAND, "finetune", "--demo", "--max-steps", "2", "-o", f"{cache}/adapter.gguf"]
    return seconds(command, cache, until="step 1/")


def kernels(folder: str) -> None:
    """Run the demo's first step here, and print what its kernels took to compile as JSON."""
    from numba.core import event

    from pyggml.cli.__main__ import finetune

    taken: Counter[str] = Counter()
    under_way: list[list[float]] = []  # start, seconds of callees

    class Listener(event.Listener):
        def on_start(self, _: Any) -> None:
            under_way.append([perf_counter(), 0.0])

        def on_end(self, e: Any) -> None:
            began, callees = under_way.pop()
            whole = perf_counter() - began
            if under_way:
                under_way[-1][1] += whole
            function = getattr(e.data["dispatcher"], "py_func", e.data["dispatcher"])
            taken[f"{function.__module__}.{function.__name__}"] += whole - callees

    event.register("numba:compile", Listener())
    finetune(["--demo", "--max-steps", "1", "-o", f"{folder}/adapter.gguf"])
    print(json.dumps({name: round(s, 2) for name, s in taken.most_common()}))


def compile_times() -> dict[str, float]:
    """Kernel -> seconds, from a process with an empty cache."""
    with TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache, "LOCALAPPDATA": cache}
        command = [sys.executable, __file__, "--listen", cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", type=int, default=20)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.listen:
        kernels(options.listen)
        return
    cold, warm, token, imports = [], [], [], []
    for _ in range(options.rounds):
        with TemporaryDirectory() as cache:
            cold.append(first_step(cache))
            warm.append(first_step(cache))
            seconds(GENERATE, cache)
            token.append(seconds(GENERATE, cache))
            imports.append(seconds([sys.executable, "-P", "-c", "import pyggml"], cache))
    result = {
        "benchmark": "startup",
        "import": round(median(imports), 2),
        "first_token": round(median(token), 2),
        "first_step": round(median(warm), 2),
        "first_step_nothing_compiled": round(median(cold), 1),
        **about("pyggml", "numba", "numpy"),
    }
    print(json.dumps(result))
    times = compile_times()
    print(f"{sum(times.values()):8.2f} s to compile {len(times)} functions, among them")
    for name, taken in list(times.items())[: options.kernels]:
        print(f"{taken:8.2f} s  {name}")


if __name__ == "__main__":
    main()
