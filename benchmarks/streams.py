"""Streams of two servers in turns: `pyggml serve` and llama.cpp's `llama-server`, same model.

`serving.py MODEL --against LLAMA_SERVER` runs it and prints two tables. In the first, for each
number of streams, which begin together with prompts of their own:

tokens/s      of all streams, from the moment they were sent to the last token
first token   seconds from there, the median of the streams and the last one

In the second a long prompt arrives while streams are written. A gap is the time between two tokens
of a stream; p99 is that of all gaps between the long prompt's arrival and its first token.

Each figure is the median of the turns; a first turn, in which kernels may compile, does not count.
The server whose turn it is not is stopped: streams whose client has gone take no time of the other.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import numpy as np

from pyggml import load

Times = list[float]  # when a request was sent, and when each of its events came


class RacingServer:
    """A server in a process of its own, at a free port. command: without its port."""

    def __init__(self, command: Sequence[str], bias: Mapping[str, float]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        port = self.address.rpartition(":")[2]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([*command, "--port", port], stdout=quiet, stderr=quiet)
        self.bias = bias
        while not self._is_ready():
            if self.process.poll() is not None:
                raise SystemExit(f"{command[0]} ended: {' '.join(command)}")
            time.sleep(0.2)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Lets it run in this block, and stops it again."""
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def events(self, prompt: Sequence[int], n_tokens: int) -> Iterator[float]:
        """When the request was sent, and when each token came. Ends of generation are forbidden."""
        connection = http.client.HTTPConnection(self.address, timeout=600)
        how = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1}
        body = {"prompt": prompt, "max_tokens": n_tokens, "stream": True, "logit_bias": self.bias}
        yield perf_counter()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(how | body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode())
        n = 0
        for line in answer:  # a last one without a token has the counts
            if line.startswith(b"data: {") and n < n_tokens:
                n += 1
                yield perf_counter()
        connection.close()


def race(options: argparse.Namespace) -> None:
    """Start both, take turns, print the tables."""
    model = load(options.model)
    n_vocab, most = model.config.n_vocab, model.config.n_ctx
    bias = {str(i): -1000.0 for i in range(n_vocab) if model.tokenizer.is_eog(i)}
    del model
    rng = np.random.default_rng(1)
    allowed = np.setdiff1d(np.arange(n_vocab), [int(i) for i in bias])
    n_long = min(options.long, most - 2)
    if n_long < options.long:
        print(f"the model's context holds {n_long} tokens of the long prompt's {options.long}")
    n_ctx = max(n_long + 2, options.prompt + _written(options) + 1)
    servers = {name: RacingServer(c, bias) for name, c in _commands(options, n_ctx).items()}

    def prompts(n: int, n_tokens: int) -> list[list[int]]:
        return [[int(i) for i in ids] for ids in rng.choice(allowed, (n, n_tokens))]

    together: dict[tuple[int, str], list[tuple[float, ...]]] = {}
    beside: dict[str, list[tuple[float, ...]]] = {}
    try:
        for server in servers.values():
            server.process.send_signal(signal.SIGSTOP)
        for turn in range(options.rounds + 1):
            for n in options.race:
                for name, server in servers.items():
                    with server.turn():
                        told = _of_streams(server, prompts(n, options.prompt), options.tokens)
                    together.setdefault((n, name), []).extend([told] if turn else [])
            for name, server in servers.items():
                short, (long,) = prompts(options.streams, options.prompt), prompts(1, n_long)
                with server.turn():
                    told = _beside_a_long_prompt(server, short, long, _written(options))
                beside.setdefault(name, []).extend([told] if turn else [])
    finally:
        for server in servers.values():
            server.end()
    _print_tables(together, beside, n_long, options.streams)


def _written(options: argparse.Namespace) -> int:
    """Tokens of the streams beside a long prompt: more than there is time for."""
    return int(8 * options.tokens)


def _commands(options: argparse.Namespace, n_ctx: int) -> dict[str, list[str]]:
    n = max(*options.race, options.streams + 1)
    threads = ["--threads", str(options.threads or 2)]
    own = [sys.executable, "-P", "-m", "pyggml.cli", "serve", "-m", str(options.model), *threads]
    theirs = [options.against, "-m", str(options.model), "--host", "127.0.0.1", *threads]
    return {
        "pyggml serve": [*own, "--parallel", str(n), "--ctx", str(n_ctx)],
        "llama-server": [*theirs, "--parallel", str(n), "--ctx-size", str(n * n_ctx)],
    }


def _of_streams(
    server: RacingServer, prompts: Sequence[list[int]], n_tokens: int
) -> tuple[float, ...]:
    """Tokens a second, the median and the last first token's seconds."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        times = [*pool.map(lambda prompt: [*server.events(prompt, n_tokens)], prompts)]
    first = [each[1] - each[0] for each in times]
    seconds = max(each[-1] for each in times) - min(each[0] for each in times)
    n = sum(len(each) - 1 for each in times)
    return n / seconds, median(first), max(first)


def _beside_a_long_prompt(
    server: RacingServer, prompts: Sequence[list[int]], long: list[int], n_tokens: int
) -> tuple[float, ...]:
    """Milliseconds: the median gap before, the median and the p99 of gaps while the long prompt is
    read; seconds to its first token."""
    told: list[Times] = [[] for _ in prompts]
    is_over = threading.Event()

    def write(i: int) -> None:
        for moment in server.events(prompts[i], n_tokens):
            told[i].append(moment)
            if is_over.is_set():
                return  # the client is gone, and so is the stream

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = [pool.submit(write, i) for i in range(len(prompts))]
        while min(map(len, told)) < 33:
            time.sleep(0.005)
        sent, first = server.events(long, 1)
        time.sleep(0.05)
        is_over.set()
        for stream in streams:
            stream.result()
    ends = np.concatenate([np.array(each[2:]) for each in told])
    gaps = 1000 * np.concatenate([np.diff(each[1:]) for each in told])
    before, during = gaps[ends < sent], gaps[(ends >= sent) & (ends <= first + 0.02)]
    p99 = np.quantile(during, 0.99)
    return float(np.median(before)), float(np.median(during)), float(p99), first - sent


def _print_tables(
    together: Mapping[tuple[int, str], Sequence[tuple[float, ...]]],
    beside: Mapping[str, Sequence[tuple[float, ...]]],
    n_long: int,
    n_streams: int,
) -> None:
    of = {
        key: [median(turn) for turn in zip(*turns, strict=True)] for key, turns in together.items()
    }
    print("| streams | server | tokens/s | of llama-server | first token, s | the last one's, s |")
    print("|---|---|---|---|---|---|")
    for (n, name), (rate, first, last) in of.items():
        share = rate / of[n, "llama-server"][0]
        print(f"| {n} | {name} | {rate:.0f} | {share:.2f} | {first:.3f} | {last:.3f} |")
    print(f"\nWhile {n_streams} streams are written, a prompt of {n_long} tokens arrives:\n")
    head = "gap before, ms | gap, ms | p99, ms | p99 of the gap | p99 of the gap before"
    print(f"| server | {head} | first token, s |\n|---|---|---|---|---|---|---|")
    for name, turns in beside.items():
        before, gap, p99, first = _medians(turns)
        ratios = f"{p99 / gap:.1f} | {p99 / before:.1f}"
        print(f"| {name} | {before:.1f} | {gap:.1f} | {p99:.1f} | {ratios} | {first:.2f} |")


def _medians(turns: Sequence[tuple[float, ...]]) -> list[float]:
    return [median(figures) for figures in zip(*turns, strict=True)]
