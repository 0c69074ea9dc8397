"""What `pyggml serve` costs through HTTP, beside `pyggml generate` in turns.

usage: serving.py MODEL [--rounds 5] [--tokens 128] [--prompt 512] [--streams 8] [--threads N]
                  [--device cpu]
       serving.py MODEL --against LLAMA_SERVER [--race 1 2 4 8 16 32] [--long 4096] [...]

The second one races it against llama-server (benchmarks/streams.py). The first one prints a JSON
line for each of

one      tokens a second of one stream; their ratio to those of generation in another process
many     tokens a second of several streams; their ratio to those of one
prefix   seconds to the first token of a prompt, new and cached

and, as "cpu", the same of the processor's time instead of the clock's: with --threads 1, where no
thread waits in a loop for others, it says how fast the program is even on a machine that is busy.

Ratios are medians of those of the rounds; every figure is a median of all rounds but the first,
in which kernels may compile. Streams begin with one random token, and ends of generation are
forbidden.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil

import pyggml.threads
from pyggml import load
from pyggml.generation import Sampling, complete

from machine import about
from streams import race
from turns import Runner

SHORT = 1  # tokens of the prompts of streams whose speed is measured


class Server:
    """A `pyggml serve` of its own process."""

    def __init__(self, options: argparse.Namespace, ends: Sequence[int]) -> None:
        n_ctx = options.prompt + options.tokens + SHORT
        command = [sys.executable, "-P", "-m", "pyggml.cli", "serve", "-m", str(options.model)]
        command += ["--port", "0", "--parallel", str(options.streams), "--ctx", str(n_ctx)]
        command += ["--threads", str(options.threads), "--device", options.device]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if address := re.search(r"serving +http://([^/]+)/v1", line):
                self.address = address[1]
                break
        else:
            raise SystemExit("the server did not start")
        self.bias = {str(end): -1000 for end in ends}
        self._times = psutil.Process(self.process.pid).cpu_times

    def cpu(self) -> float:
        """Seconds of the processor that it has used."""
        times = self._times()
        return float(times.user + times.system)

    def pieces(self, prompt: list[int], n_tokens: int) -> Iterator[float]:
        """When the request was sent, and when each piece came."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        body = {"prompt": prompt, "max_tokens": n_tokens, "stream": True, "seed": 1}
        sent = json.dumps(body | {"logit_bias": self.bias})
        yield perf_counter()
        connection.request("POST", "/v1/completions", sent)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        for line in answer:
            if line.startswith(b"data: {"):
                yield perf_counter()
        connection.close()


def random_prompt(rng: np.random.Generator, n: int, n_vocab: int, ends: Sequence[int]) -> list[int]:
    tokens = rng.integers(0, n_vocab, n)
    tokens[np.isin(tokens, ends)] = 0
    return [int(token) for token in tokens]


def rate(times: Sequence[Sequence[float]]) -> float:
    """Tokens a second, from the first piece of any stream to the last one of all."""
    first, last = min(each[1] for each in times), max(each[-1] for each in times)
    return (sum(len(each) - 1 for each in times) - 1) / (last - first)


def generate(options: argparse.Namespace) -> None:
    """The other process: generation as the command line does it, a run for every line it reads."""
    model = load(options.model, device=options.device)
    pyggml.threads.set(options.threads)
    ends = [id for id in range(model.config.n_vocab) if model.tokenizer.is_eog(id)]
    rng = np.random.default_rng(0)
    how = Sampling(seed=1, logit_bias=dict.fromkeys(ends, -1000))
    while True:
        print("ready", flush=True)
        if not sys.stdin.readline():
            return
        prompt = random_prompt(rng, SHORT, model.config.n_vocab, ends)
        both = [
            (perf_counter(), process_time()) for _ in complete(model, prompt, options.tokens, how)
        ]
        rates = [
            (len(both) - 1) / (last - first) for first, last in zip(both[0], both[-1], strict=True)
        ]
        print(json.dumps({"rates": rates}), flush=True)


def one_round(
    options: argparse.Namespace, server: Server, runner: Runner, rng: np.random.Generator, n: int
) -> dict[str, float]:
    """One measurement of everything; n is the number of tokens in the vocabulary."""
    ends = [int(end) for end in server.bias]
    rates = {}
    rates["generate"], rates["generate cpu"] = json.loads(runner.turn())["rates"]
    runner.wait()
    for name, n_streams in (("one", 1), ("many", options.streams)):
        prompts = [random_prompt(rng, SHORT, n, ends) for _ in range(n_streams)]
        before = server.cpu()
        with ThreadPoolExecutor(n_streams) as pool:
            rates[name] = rate([*pool.map(lambda p: [*server.pieces(p, options.tokens)], prompts)])
        rates[f"{name} cpu"] = n_streams * options.tokens / (server.cpu() - before)
    prompt = random_prompt(rng, options.prompt, n, ends)
    for name in ("new", "cached"):
        before = server.cpu()
        sent, first = server.pieces(prompt, 1)
        rates[name], rates[f"{name} cpu"] = first - sent, server.cpu() - before
    return rates


def report(options: argparse.Namespace, rounds: list[dict[str, float]]) -> Iterator[dict[str, Any]]:
    def of(name: str) -> float:
        return round(median(r[name] for r in rounds), 4)

    def ratio(name: str, to: str) -> float | None:
        """None where the processor's clock, of ten milliseconds, counted nothing."""
        ratios = [r[name] / r[to] for r in rounds if r[to]]
        return round(median(ratios), 3) if ratios else None

    for cpu in ("", " cpu"):
        kind = {"clock": cpu.strip() or "wall"}
        one, many, generated = f"one{cpu}", f"many{cpu}", f"generate{cpu}"
        new, cached = f"new{cpu}", f"cached{cpu}"
        speeds = {"tokens_per_second": of(one), "generate": of(generated)}
        yield {"what": "one", **kind, **speeds, "to_generate": ratio(one, generated)}
        speeds = {"streams": options.streams, "tokens_per_second": of(many)}
        yield {"what": "many", **kind, **speeds, "to_one": ratio(many, one)}
        seconds = {"tokens": options.prompt, "new": of(new), "cached": of(cached)}
        yield {"what": "prefix", **kind, **seconds, "cached_to_new": ratio(cached, new)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="as of `pyggml serve`, such as cuda")
    parser.add_argument("--in-turns", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--against", help="the path of llama-server")
    parser.add_argument("--race", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--long", type=int, default=4096)
    options = parser.parse_args()
    if options.against:
        race(options)
        return
    if options.in_turns:
        generate(options)
        return
    model = load(options.model)
    n_vocab = model.config.n_vocab
    ends = [id for id in range(n_vocab) if model.tokenizer.is_eog(id)]
    del model
    runner = Runner(sys.executable, Path(__file__), *sys.argv[1:])
    server = Server(options, ends)
    try:
        rng = np.random.default_rng(1)
        rounds = [
            one_round(options, server, runner, rng, n_vocab) for _ in range(options.rounds + 1)
        ]
    finally:
        server.process.terminate()
        runner.process.kill()
    for line in report(options, rounds[1:]):
        print(json.dumps({"benchmark": "serving", "model": options.model.name} | line))
    print(json.dumps({"benchmark": "serving", **about("pyggml", "starlette", "uvicorn")}))


if __name__ == "__main__":
    main()
