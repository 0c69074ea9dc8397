"""Products of one row, or a few, with a weight of each type: GB/s of weight bytes.

usage: one_row.py [--types Q4_K,…] [--widths 1024,4096,14336] [--tokens 1] [--threads 1]
           [--sizes 0.6,6,200] [--rounds 3] [--model FILE …] [--against FOLDER …]

A matrix of each size, in MB, is multiplied for a tenth of a second: one that stays in the second
cache, one in the third, and one that comes from memory. Every product includes the rounding of x.
With --against, a source tree of another revision, both run in processes of their own, in turns.
Each cell is the best of the rounds: on a machine that others use too, the least disturbed. Before
the table stands what a plain sum over as many bytes makes. With --model, tokens a second of models,
one sequence from nothing, instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

SECONDS = 0.1  # of a measurement
ROWS = 64  # that are packed; a matrix repeats them
ALL = "Q8_0,Q6_K,Q5_K,Q4_K,Q3_K,Q2_K,Q4_0,Q5_0,IQ4_XS,IQ4_NL,MXFP4,NVFP4,TQ1_0,TQ2_0,IQ3_S,IQ2_S"


def measure(options: argparse.Namespace) -> None:
    """Print a JSON line for each type, width and size."""
    import numpy as np

    from pyggml import threads
    from pyggml.backends.cpu import CPU
    from pyggml.graph.dtypes import dtype
    from pyggml.kernels import gemm
    from pyggml.quants import quantize

    def rate(n_bytes: int, call: Callable[[], None]) -> float:
        """GB/s of the fastest call."""
        call()
        best, began = float("inf"), perf_counter()
        while perf_counter() - began < SECONDS:
            start = perf_counter()
            call()
            best = min(best, perf_counter() - start)
        return n_bytes / best / 1e9

    threads.set(options.threads)
    if options.model:
        measure_models(options.model)
        return
    rng = np.random.default_rng(0)
    for megabytes in options.sizes:
        numbers = np.ones(int(megabytes * 1e6) // 8, np.int64)
        print(json.dumps(["sum", 0, megabytes, rate(numbers.nbytes, numbers.sum)]), flush=True)
    for kind in options.types.split(","):
        for width in options.widths:
            some = quantize(rng.standard_normal((ROWS, width)).astype(np.float32), kind)
            x = rng.standard_normal((options.tokens, width)).astype(np.float32)
            for megabytes in options.sizes:
                w = np.tile(some, (max(1, round(megabytes * 1e6 / some.nbytes)), 1))
                y = np.zeros((len(x), len(w)), np.float32)
                p = gemm.Problem("mul_mat", len(x), len(w), width, dtype(kind), "int8")
                scratch = CPU().alloc(gemm.scratch_bytes(p))
                call = gemm.mul_mat(y, x, gemm.Weight(w, dtype(kind), "int8"), scratch, False)
                print(json.dumps([kind, width, megabytes, rate(w.nbytes, call)]), flush=True)


def measure_models(paths: list[str]) -> None:
    """Print a JSON line for each model: tokens a second, the fastest of 64."""
    import pyggml
    from pyggml.generation import Session

    for path in paths:
        session, best = Session(pyggml.load(path), 128), float("inf")
        for token in range(64):
            start = perf_counter()
            session.feed([token + 100])
            best = min(best, perf_counter() - start)
        print(json.dumps([Path(path).stem, 0, 0.0, 1 / best]), flush=True)


def table(options: argparse.Namespace, given: list[str]) -> None:
    """Run all trees in turns; print the best of each cell."""
    own = str(Path(__file__).parents[1])
    trees = [*options.against, own]
    best: dict[tuple[str, int, float], dict[str, float]] = {}
    command = [sys.executable, "-P", str(Path(__file__).resolve()), *given, "--measure"]
    for _ in range(options.rounds):
        for tree in trees:
            environment = {**os.environ, "PYTHONPATH": tree}
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            for line in ran.stdout.splitlines():
                kind, width, size, rate = json.loads(line)
                cell = best.setdefault((kind, width, size), {})
                cell[tree] = max(rate, cell.get(tree, 0.0))
    unit = "tokens a second" if options.model else f"GB/s, {options.tokens} row(s)"
    print(f"{unit}, {options.threads} thread(s), best of {options.rounds};"
          f" of each size: {', '.join(Path(tree).name for tree in trees)}")  # fmt: skip
    if options.model:
        for (name, *_), cell in best.items():
            print(f"{name:24}" + "".join(f"{cell[tree]:8.1f}" for tree in trees))
        return
    heads = (f"{size:g} MB".center(8 * len(trees)) for size in options.sizes)
    print(f"{'':8}{'width':>6}{''.join(heads)}")
    for kind, width in dict.fromkeys(key[:2] for key in best):
        cells = (best[kind, width, size] for size in options.sizes)
        rates = "".join(f"{cell[tree]:8.1f}" for cell in cells for tree in trees)
        print(f"{kind:8}{width or '':>6}{rates}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = "a list of numbers, with commas"
    parser.add_argument("--types", default=ALL)
    parser.add_argument("--widths", default="1024,4096,14336", help=numbers)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", default="0.6,6,200", help=numbers)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--against", action="append", default=[])
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.widths = [int(n) for n in options.widths.split(",")]
    options.sizes = [float(n) for n in options.sizes.split(",")]
    if options.measure:
        measure(options)
    else:
        table(options, sys.argv[1:])


if __name__ == "__main__":
    main()
