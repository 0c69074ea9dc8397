"""What looking inside costs: passes that are read, patched or batched beside plain ones, in turns.

usage: inside.py MODEL.gguf [--tokens 512] [--texts 4] [--rounds 9] [--compute f32|auto|int8|bf16]

plain      model.logits of a text
captured   the same while a trace reads the residual stream after every block
patched    the same while a trace replaces that stream after one block at one token
batched    model.logits of several texts of as many tokens, as a share of a pass of each
swept      model.sweep, which patches as above: a cell, of which as many share a pass as it takes
gradient   model.grad of a logit difference by the stream after every block

Each is all that a call does: graph, plan, binding, run, results. Prints a JSON line for each, then
the table of docs/looking-inside.md. `ratio` is the median over the rounds of a pass's time to that
of the plain pass of its round, whose order is random; the first round, which may compile, does not
count. LIMITS are the most that the ratios may be.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

import pyggml
from pyggml import At
from pyggml.model import COMPUTE_TYPES

from machine import about

LIMITS = {"captured": 1.1, "patched": 1.1, "batched": 1.1, "swept": 1.1, "gradient": 3.0}
WORDS = {
    "captured": "reading `blk.*.out`",
    "patched": "replacing `blk.N.out` at one token",
    "batched": "{texts} texts in one pass, each",
    "swept": "a cell of a sweep that replaces it",
    "gradient": "`grad` of a logit difference by `blk.*.out`",
}
N_CELLS = 8  # of a sweep that is timed


def difference(t: Any) -> Any:
    """A logit difference at the last token."""
    return t["logits"][-1, 7] - t["logits"][-1, 5]


def passes_of(
    model: pyggml.Model, n_tokens: int, n_texts: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """By name, what is timed, and as how many passes it counts."""
    texts = [*np.random.default_rng(0).integers(0, model.config.n_vocab, (n_texts, n_tokens))]
    ids, name = texts[0], f"blk.{model.config.n_layer // 2}.out"
    with model.trace(name) as t:
        model.logits(texts[-1])
    patch = {name: At(t[name], tokens=[n_tokens // 2])}
    sweep = model.sweep(difference, ids, name)

    def read_streams() -> None:
        with model.trace("blk.*.out"):
            model.logits(ids)

    def patch_stream() -> None:
        with model.trace(replace=patch):
            model.logits(ids)

    return {
        "plain": (lambda: model.logits(ids), 1),
        "captured": (read_streams, 1),
        "patched": (patch_stream, 1),
        "batched": (lambda: model.logits(texts), n_texts),
        "swept": (lambda: [*sweep([{"replace": patch}] * N_CELLS)], N_CELLS),
        "gradient": (lambda: model.grad(difference, ids, "blk.*.out"), 1),
    }


def rounds_of(
    passes: dict[str, tuple[Callable[[], object], int]], n: int
) -> list[dict[str, float]]:
    """Seconds of each pass, round by round."""
    rng, rounds = np.random.default_rng(1), []
    for _ in range(n + 1):
        taken = {}
        for name in map(str, rng.permutation(list(passes))):
            run, n_passes = passes[name]
            began = perf_counter()
            run()
            taken[name] = (perf_counter() - began) / n_passes
        rounds.append(taken)
    return rounds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compute", choices=COMPUTE_TYPES, default="f32")
    options = parser.parse_args()

    model = pyggml.load(options.model, compute=options.compute)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "products round")
        rounds = rounds_of(passes_of(model, options.tokens, options.texts), options.rounds)
    ratios = {name: median(r[name] / r["plain"] for r in rounds) for name in rounds[0]}
    for name in ("plain", *LIMITS):
        result = {
            "benchmark": "inside",
            "model": Path(options.model).name,
            "compute": model.backend.compute,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "kind": name,
            "seconds": round(median(r[name] for r in rounds), 4),
            "ratio": round(ratios[name], 3),
            **about("pyggml", "numba", "numpy"),
        }
        print(json.dumps(result))
    print("\n| pass | of a plain one | limit |\n|---|---|---|")
    for name, limit in LIMITS.items():
        print(f"| {WORDS[name].format(texts=options.texts)} | {ratios[name]:.2f} | {limit} |")


if __name__ == "__main__":
    main()
