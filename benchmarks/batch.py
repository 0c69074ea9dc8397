"""How a batch of sequences serves: streams at once, and prompts that begin alike.

usage: batch.py MODEL.gguf … [--streams 8] [--prompt 448] [--generate 24] [--rounds 3]
                             [--cache-type f16|q8_0]

Tokens are random. Each round measures, in turns: one sequence in a session, as `generate` writes
it; the same in a batch of many slots, alone; all slots at once; the time to the first token of a
prompt, and of one that differs in its last four tokens. Medians over the rounds; prints a JSON line
for each model, then a table.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from time import perf_counter

import numpy as np

import pyggml
from pyggml.generation import Batch, Session

from machine import about


class Serving:
    """A session and a batch over one model."""

    def __init__(self, path: str, options: argparse.Namespace) -> None:
        self.options, self.model = options, pyggml.load(path)
        self.rng = np.random.default_rng(0)
        n_ctx = options.prompt + options.generate + 1
        kind = options.cache_type
        self.session = Session(self.model, n_ctx, kind)
        self.batch = Batch(self.model, options.streams, n_ctx, kind)

    def ids(self, n: int) -> np.ndarray:
        return self.rng.integers(0, self.model.config.n_vocab, n)

    def session_speed(self) -> float:
        """Tokens a second of one sequence in a session."""
        self.session.truncate(0)
        self.session.feed(self.ids(self.options.prompt))
        began = perf_counter()
        for token in self.ids(self.options.generate):
            self.session.feed([token]).argmax()
        return self.options.generate / (perf_counter() - began)

    def batch_speed(self, n: int) -> float:
        """Tokens a second of n sequences in the batch, together."""
        slots = [self.batch.open() for _ in range(n)]
        for slot in slots:
            self.batch.feed({slot: self.ids(self.options.prompt)})
        began = perf_counter()
        for tokens in self.ids(n * self.options.generate).reshape(-1, n, 1):
            logits_of = self.batch.feed(dict(zip(slots, tokens, strict=True)))
            for logits in logits_of.values():
                logits.argmax()
        taken = perf_counter() - began
        for slot in slots:
            slot.close()
        return n * self.options.generate / taken

    def first_tokens(self) -> tuple[float, float]:
        """Seconds to the first token of a new prompt, and of one that differs at its end."""
        prompt = self.ids(self.options.prompt)
        times = []
        for text in (prompt, [*prompt[:-4], *self.ids(4)]):
            began = perf_counter()
            slot = self.batch.open(text)
            self.batch.feed({slot: text[slot.n_past :]})[slot].argmax()
            times.append(perf_counter() - began)
            slot.close()
        return times[0], times[1]


def measure(path: str, options: argparse.Namespace) -> dict[str, float]:
    """Medians of one model."""
    serving = Serving(path, options)
    rounds = []
    for i in range(1 + options.rounds):  # the first compiles
        first, again = serving.first_tokens()
        speeds = (
            serving.session_speed(),
            serving.batch_speed(1),
            serving.batch_speed(options.streams),
        )
        rounds += [(*speeds, first, again)] if i else []
    session, alone, together, first, again = (
        median(column) for column in zip(*rounds, strict=True)
    )
    return {
        "session tokens/s": session,
        "batch of one tokens/s": alone,
        "streams tokens/s": together,
        "streams : one": together / session,
        "first token s": first,
        "first token, cached s": again,
        "cached : uncached": again / first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-type", choices=["f16", "q8_0"], default="f16")
    options = parser.parse_args()
    for path in options.models:
        medians = {name: round(n, 3) for name, n in measure(path, options).items()}
        line = {"benchmark": "batch", "model": path, "cache": options.cache_type, **medians}
        print(json.dumps(line | about("pyggml", "numba")))
        for name, n in medians.items():
            print(f"{name:<26}{n:>10.3f}")


if __name__ == "__main__":
    main()
