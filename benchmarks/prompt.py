"""Reading a prompt, in seconds: what generation does before its first token.

usage: prompt.py MODEL.gguf [--tokens 512] [--steps 5] [--compute auto|int8|bf16|f32] [--in-turns]

Each prompt is read into an empty cache. Prints a JSON line: the median over the steps, the first of
which, which may compile, does not count. Where python imports another revision, it times that.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import pyggml
from pyggml.generation import Session
from pyggml.model import COMPUTE_TYPES

from machine import about, median_seconds, peak_rss_gb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compute", choices=COMPUTE_TYPES, default="auto")
    parser.add_argument("--in-turns", action="store_true", help="wait for a line before a step")
    options = parser.parse_args()
    model = pyggml.load(options.model, compute=options.compute)
    tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, options.tokens)
    session = Session(model, options.tokens + 1)

    def read() -> None:
        session.truncate(0)
        session.feed(tokens)

    taken = median_seconds(read, options.steps, options.in_turns)
    result = {
        "benchmark": "prompt",
        "model": options.model.rsplit("/", 1)[-1],
        "compute": model.backend.compute,
        "tokens": options.tokens,
        "seconds": round(taken, 4),
        "tokens_per_second": round(options.tokens / taken, 1),
        "peak_rss_gb": round(peak_rss_gb(), 2),
        **about("pyggml", "numba", "numpy"),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
