"""How much faster several ranks make the steps of one run.

usage: ranks.py MODEL.gguf [--ranks 1,2,4] [--tokens 256] [--passes 4] [--steps 5]
                [--mpiexec mpiexec]

Every rank has one thread and the processors that the launcher gives it. The steps are the same for
any number of ranks: `passes` windows of `tokens` tokens. Prints a JSON line for each number of
ranks: seconds of a step (the median of all but the first), how many times as fast as the first
number in the list, the efficiency (that by ranks), and the share of a step in which the first rank
exchanges gradients or waits for the others' (the median).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import pyggml
from pyggml.lora import Corpus, Dataset, LoraConfig, StepReport, TrainConfig, Trainer, attach
from pyggml.lora.ranks import ranks_of_process

from machine import about


def measure(model: Path, n_tokens: int, n_passes: int, n_steps: int) -> dict[str, object] | None:
    """Steps of this rank's group; None on all ranks but the first."""
    ranks = ranks_of_process()
    base = pyggml.load(model)
    adapter = attach(base, LoraConfig())
    shape = (n_passes * n_steps, n_tokens + 1)
    tokens = np.random.default_rng(0).integers(0, base.config.n_vocab, shape, np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros(shape, np.int32)), None)
    config = TrainConfig(grad_accum=n_passes, threads=1)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config, ranks=ranks)
    seconds, exchanged, spent, add = [], [], [0.0], ranks.add

    def timed_add(gradients: Sequence[np.ndarray], n: int, size: int) -> np.ndarray:
        began = perf_counter()
        total = add(gradients, n, size)
        spent[0] += perf_counter() - began
        return total

    vars(ranks)["add"] = timed_add

    def report(event: object) -> None:
        if isinstance(event, StepReport):
            seconds.append(event.seconds)
            exchanged.append(spent[0] / event.seconds)
            spent[0] = 0.0

    trainer.run(report, progress=False)
    if not ranks.is_first:
        return None
    n_bytes = 4 * adapter.parameters.data.size
    return {
        "seconds": median(seconds[1:]),
        "exchanging": median(exchanged[1:]),
        "gradient_bytes": n_bytes,
        "loss": trainer.history.losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mpiexec", default="mpiexec")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # as one of the ranks
    given = parser.parse_args()
    if given.one:
        measures = measure(given.model, given.tokens, given.passes, given.steps)
        if measures is not None:
            sys.stdout.write("\n" + json.dumps(measures) + "\n")
        return
    first: float | None = None
    for n in map(int, given.ranks.split(",")):
        words = [given.mpiexec, "-n", str(n), sys.executable, *sys.argv, "--one"]
        env = {**os.environ, "NUMBA_NUM_THREADS": "1"}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
        line = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
        first = first or line["seconds"] * n
        times = first / line["seconds"]
        line = {"ranks": n, **line, "times": times, "efficiency": times / n}
        sys.stdout.write(json.dumps({**line, **about()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
