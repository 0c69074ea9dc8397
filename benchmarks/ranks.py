"""How much faster several ranks make the steps of one run, on processors or a card each.

usage: ranks.py MODEL.gguf [--ranks 1,2,4] [--tokens 256] [--batch 1,4,16] [--passes 4] [--steps 5]
                [--device cpu|cuda] [--mpiexec PATH] [--through-host]

Ranks of the CPU have one thread each, or as many as follow an x: --ranks 1x16,4x4 compares threads
with ranks. They start each other, or with --mpiexec a launcher starts them, which gives each its
processors. The steps are the same for any number of ranks: `passes` of `batch` windows of `tokens`
tokens. Prints a JSON line for each number of ranks and each batch: seconds of a step (the median of
all but the first three), how many times as fast as one thread of the first in the list, were its
efficiency 1, the efficiency (that by ranks and threads), the shares of a step in which the
first rank exchanges gradients, and in which it waits for flags and losses of others (medians), and
a digest of the adapter.
--through-host keeps cards from exchanging gradients directly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import pyggml
from pyggml import threads
from pyggml.lora import Corpus, Dataset, LoraConfig, StepReport, TrainConfig, Trainer, attach
from pyggml.lora.ranks import Ranks, ranks_of_process
from pyggml.lora.ranks.device import device_of_rank
from pyggml.lora.ranks.local import start
from pyggml.lora.trainer import gradient

from machine import about

_FIRST = 3  # steps that compile, or capture


def measures(given: argparse.Namespace, ranks: Ranks) -> Iterator[dict[str, object]]:
    """Steps of this rank's group, for each batch."""
    device = device_of_rank(given.device, ranks)
    for batch in map(int, given.batch.split(",")):
        trainer = trainer_of(given, ranks, batch, device)
        yield {"batch": batch, "tokens": given.tokens, "device": device} | _measured_run(trainer)
        trainer.free()


def trainer_of(
    given: argparse.Namespace, ranks: Ranks, batch: int = 1, device: str = "cpu"
) -> Trainer:
    """A run of windows of random tokens."""
    base = pyggml.load(given.model, device=device)
    adapter = attach(base, LoraConfig())
    shape = (given.passes * batch * given.steps, given.tokens + 1)
    tokens = np.random.default_rng(0).integers(0, base.config.n_vocab, shape, np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros(shape, np.int32)), None)
    n_threads = threads.most() if device == "cpu" else 1
    config = TrainConfig(batch=batch, grad_accum=given.passes, threads=n_threads)
    return Trainer(adapter.model, adapter.parameters, corpus, config, ranks=ranks)


class Clock:
    """Seconds of each step, and of those in the sum of gradients and in meeting other ranks."""

    def __init__(self) -> None:
        self.steps, self.shares = list[float](), list[list[float]]()
        self._spent, self._last = [0.0, 0.0], perf_counter()

    def timing(self, call: Callable[..., None], i: int) -> Callable[..., None]:
        """A call whose time counts as part i alone, whatever it calls."""

        def act(*arrays: Any, **how: Any) -> None:
            began, before = perf_counter(), [*self._spent]
            call(*arrays, **how)
            self._spent = before
            self._spent[i] += perf_counter() - began

        return act

    def report(self, event: object) -> None:
        if isinstance(event, StepReport):
            now = perf_counter()
            self.steps.append(now - self._last)
            self.shares.append([s / self.steps[-1] for s in self._spent])
            self._spent, self._last = [0.0, 0.0], now


def _measured_run(trainer: Trainer) -> dict[str, object]:
    clock = Clock()
    for name in ("begin_sum", "wait"):
        vars(trainer.gradient)[name] = clock.timing(getattr(trainer.gradient, name), 0)
    if trainer.ranks.size > 1:
        # Ranks wait for each other there alone. Not all kinds of ranks have it, so mypy knows none.
        gather = getattr(trainer.ranks, "_gather")  # noqa: B009
        vars(trainer.ranks)["_gather"] = clock.timing(gather, 1)
    trainer.run(clock.report, progress=False)
    vars(trainer.ranks).pop("_gather", None)
    numbers = trainer.parameters.data
    exchanging, meeting = np.median(clock.shares[_FIRST:], axis=0).tolist()
    return {
        "seconds": median(clock.steps[_FIRST:]),
        "each": [round(s, 5) for s in clock.steps],
        "exchanging": exchanging,
        "meeting": meeting,
        "gradient_bytes": numbers.nbytes,
        "loss": trainer.history.losses[-1],
        "digest": hashlib.sha256(numbers.tobytes()).hexdigest()[:16],
    }


def _as_rank(given: argparse.Namespace) -> None:
    """Be one of the ranks; the first prints the measures."""
    if given.through_host:
        vars(gradient)["links_to_ranks"] = lambda devices, ranks: None
    ranks = ranks_of_process()
    again = [sys.executable, *sys.argv]
    alone = ranks.size == 1 and given.one > 1
    with start(given.one, again) if alone else nullcontext(ranks) as group:
        for line in measures(given, group):
            if group.is_first:
                sys.stdout.write("\n" + json.dumps(line) + "\n")
                sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", default="1")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mpiexec")
    parser.add_argument("--through-host", action="store_true")
    parser.add_argument("--one", type=int, default=0, help=argparse.SUPPRESS)  # of so many ranks
    given = parser.parse_args()
    if given.one:
        _as_rank(given)
        return
    first: dict[int, float] = {}
    for group in given.ranks.split(","):
        n, n_threads = map(int, f"{group}x1".split("x")[:2])
        launcher = [given.mpiexec, "-n", str(n)] if given.mpiexec else []
        words = [*launcher, sys.executable, *sys.argv, "--one", str(n)]
        threads = {"NUMBA_NUM_THREADS": str(n_threads)} if given.device == "cpu" else {}
        env = {**os.environ} | threads
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as running:
            assert running.stdout is not None
            for line in running.stdout:
                if line.startswith("{"):
                    _say((n, n_threads), json.loads(line), first)


def _say(group: tuple[int, int], line: dict[str, Any], first: dict[int, float]) -> None:
    times = first.setdefault(line["batch"], line["seconds"] * prod(group)) / line["seconds"]
    which = {"ranks": group[0], "threads": group[1]}
    line = {**which, **line, "times": times, "efficiency": times / prod(group)}
    sys.stdout.write(json.dumps({**line, **about()}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
