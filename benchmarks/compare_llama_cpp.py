"""pyggml and llama.cpp side by side in one process: prompt, generation, perplexity; in turns.

usage: compare_llama_cpp.py MODEL.gguf … [--tokens 512] [--generate 32] [--rounds 5]
                            [--text FILE --chunks 4]

Needs llama-cpp-python beside pyggml; both use as many threads. A prompt is one sequence of random
tokens, generation goes on after it, one token at a time. Medians over the rounds; ratios above 1
mean that pyggml is faster. Prints a JSON line for each model, then a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np

import pyggml
from pyggml import threads
from pyggml.generation import Session
from pyggml.lora.evaluate import perplexity
from pyggml.model import Model

from machine import about

CTX = 512
LONGEST = 8  # characters that a token stands for, at most, on average


def seconds(work: Callable[[], Any]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


class Ours:
    """A cache that is emptied before each prompt."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        self.model, self.session = model, Session(model, n_ctx)

    def prompt(self, ids: np.ndarray) -> None:
        self.session.truncate(0)
        self.session.feed(ids)

    def generate(self, ids: np.ndarray) -> None:
        for token in ids:
            self.session.feed([int(token)])

    def chunks(self, text: str, n: int) -> None:
        for window in perplexity(self.model, text, CTX):
            if window.chunk >= n:
                return


class Theirs:
    """llama.cpp through its low-level wrapper."""

    def __init__(self, path: str, n_ctx: int) -> None:
        n = threads.get()
        self.llama = llama_cpp.Llama(
            path, n_ctx=n_ctx, n_batch=512, n_ubatch=512, n_threads=n, n_threads_batch=n,
            verbose=False,
        )  # fmt: skip

    def prompt(self, ids: np.ndarray) -> None:
        self.llama.reset()
        self.llama.eval(ids.tolist())

    def generate(self, ids: np.ndarray) -> None:
        for token in ids:
            self.llama.eval([int(token)])

    def chunks(self, text: str, n: int) -> None:
        """What its perplexity tool computes: logits of the second half of every chunk."""
        ids = self.llama.tokenize(text.encode(), add_bos=False)
        context, n_vocab = self.llama.ctx, self.llama.n_vocab()
        batch = llama_cpp.llama_batch_init(CTX, 0, 1)
        batch.n_tokens = CTX
        for chunk in range(n):
            for i, token in enumerate(ids[chunk * CTX : (chunk + 1) * CTX]):
                batch.token[i], batch.pos[i] = token, i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = CTX // 2 <= i < CTX - 1
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            assert llama_cpp.llama_decode(context, batch) == 0
            for i in range(CTX // 2, CTX - 1):
                logits = llama_cpp.llama_get_logits_ith(context, i)
                z = np.ctypeslib.as_array(logits, (n_vocab,))
                np.log(np.exp(z - z.max()).sum())
        llama_cpp.llama_batch_free(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--chunks", type=int, default=4)
    options = parser.parse_args()
    print(f"{'':<28}{'pyggml':>10}{'llama.cpp':>11}{'ratio':>7}")
    for path in options.models:
        compare(path, options)


def compare(path: str, options: argparse.Namespace) -> None:
    """One model's JSON line and rows."""
    n_ctx = options.tokens + options.generate
    model = pyggml.load(path)
    sides = Ours(model, n_ctx), Theirs(path, n_ctx)
    rng = np.random.default_rng(0)
    prompt, further = (
        rng.integers(0, model.config.n_vocab, n).astype(np.int32)
        for n in (options.tokens, options.generate)
    )
    jobs: dict[str, tuple[int, Callable[[Any], None]]] = {
        "prompt": (options.tokens, lambda side: side.prompt(prompt)),
        "generation": (options.generate, lambda side: side.generate(further)),
    }
    if options.text:
        text = options.text.read_text(encoding="utf-8")[: options.chunks * CTX * LONGEST]
        jobs["perplexity"] = (options.chunks * CTX, lambda side: side.chunks(text, options.chunks))
    times_of: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in jobs}
    for i in range(1 + options.rounds):  # the first compiles
        for name, (_, work) in jobs.items():
            for side, times in zip(sides, times_of[name], strict=True):
                taken = seconds(lambda side=side, work=work: work(side))
                times += [taken] if i else []
    result: dict[str, Any] = {"benchmark": "llama.cpp", "model": Path(path).name}
    lines = []
    for name, (n, _) in jobs.items():
        ours, theirs = (n / median(times) for times in times_of[name])
        result[name] = {"pyggml": round(ours, 2), "llama.cpp": round(theirs, 2)}
        lines.append(
            f"{Path(path).stem + ' ' + name:<28}{ours:>10.1f}{theirs:>11.1f}{ours / theirs:>7.2f}"
        )
    print(json.dumps(result | about("pyggml", "llama-cpp-python", "numba")))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
