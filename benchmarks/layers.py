"""What a step takes whose layers lie on several devices, beside one device that has them all.

usage: layers.py MODEL.gguf [--on cuda:0 --on cuda:0,cuda:1 --on cuda:0,cuda:1/3,1/1 ...]
                 [--tokens 2048] [--batch 1] [--passes 4] [--steps 8]

Steps of `passes` passes of `batch` windows of `tokens` tokens, with LoRA of rank 8 on all linear
modules, the same for all. What follows devices are their shares, as of --split, and how many passes
may be under way at once. Prints a JSON line for each: seconds of a step (the median of all but the
first three), how many times as fast as the first line's, the share of a step that the sum and the
clipping of its gradient and the optimiser take, the losses, a digest of the adapter, and how far it
is from the first line's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import pyggml
from pyggml.lora import Corpus, Dataset, LoraConfig, StepReport, TrainConfig, Trainer, attach

from machine import about

_FIRST = 3  # steps that compile, or capture


class Clock:
    """Seconds of each step, its losses, and seconds in what follows its passes."""

    def __init__(self) -> None:
        self.steps, self.losses, self.after = list[float](), list[float](), list[float]()
        self._last, self._spent = perf_counter(), 0.0

    def timing(self, call: Callable[..., object]) -> Callable[..., object]:
        """A call whose time counts as after the passes."""

        def act(*arguments: object) -> object:
            began = perf_counter()
            result = call(*arguments)
            self._spent += perf_counter() - began
            return result

        return act

    def report(self, event: object) -> None:
        if isinstance(event, StepReport):
            now = perf_counter()
            self.steps.append(now - self._last)
            self.losses.append(event.loss)
            self.after.append(self._spent)
            self._last, self._spent = now, 0.0


def run_and_time(trainer: Trainer) -> tuple[dict[str, object], np.ndarray]:
    """What a run of a trainer took, and the numbers that it trained."""
    clock = Clock()
    for part, name in ((trainer.gradient, "end"), (trainer.optimiser, "clip")):
        vars(part)[name] = clock.timing(getattr(part, name))
    vars(trainer.optimiser)["step"] = clock.timing(trainer.optimiser.step)
    trainer.run(clock.report, progress=False)
    numbers = trainer.parameters.data.copy()
    seconds = median(clock.steps[_FIRST:])
    line = {
        "seconds": seconds,
        "each": [round(s, 5) for s in clock.steps],
        "after_passes": median(clock.after[_FIRST:]) / seconds,
        "losses": clock.losses,
        "digest": hashlib.sha256(numbers.tobytes()).hexdigest()[:16],
    }
    return line, numbers


def trainer_of(given: argparse.Namespace, where: str) -> Trainer:
    """A run of windows of random tokens."""
    device, split, n_slots = (*where.split("/"), "", "")[:3]
    shares = [float(share) for share in filter(None, split.split(","))]
    base = pyggml.load(given.model, device=device, split=shares or None)
    adapter = attach(base, LoraConfig())
    shape = (given.passes * given.batch * given.steps, given.tokens + 1)
    tokens = np.random.default_rng(0).integers(0, base.config.n_vocab, shape, np.int32)
    corpus = Corpus(Dataset(tokens, np.zeros(shape, np.int32)), None)
    config = TrainConfig(batch=given.batch, grad_accum=given.passes)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config)
    if n_slots:
        trainer.passes.limit_slots(int(n_slots))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--on", action="append", help="devices, with commas between them")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    first: tuple[float, np.ndarray] | None = None
    for where in given.on or ["cuda:0", "cuda:0,cuda:1"]:
        began = perf_counter()
        trainer = trainer_of(given, where)
        n_slots, layers = trainer.passes.n_slots, str(trainer.model.placement or "")
        line, numbers = run_and_time(trainer)
        trainer.free()
        seconds, before = first = first or (line["seconds"], numbers)
        apart = float(np.abs(numbers - before).max())
        line = {"on": where, **line, "times": seconds / line["seconds"], "apart": apart}
        line |= {"at_once": n_slots, "layers": layers, "all_seconds": perf_counter() - began}
        sys.stdout.write(json.dumps({**line, **about()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
