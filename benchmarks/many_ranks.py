"""What many ranks would give: a simulation of their steps, made of parts that are measured.

usage: many_ranks.py MODEL.gguf [--tokens 128] [--batch 1] [--passes 4] [--steps 20] [--ranks 1,2,4]
                     [--device cpu|cuda]
       many_ranks.py --pass-seconds S --gradient-mb MB [--k 1] [--hosts 8,64,1000] [--gbits 10,100]
       [--years 3] [--restart 180] [--limit 1800] [--silent 0.1] [--spread 0.98,1,1.05]

The first form measures the parts here: passes of processes that know nothing of each other, as many
as there will be ranks, each with a rank's share of the passes; exchanges of ranks that compute
nothing. It puts them together, and holds the step that it foretells against steps of the same
processes as ranks: a JSON line for each number of them. Where each has a card of its own, what the
ranks tell each other of their losses goes beside the sum. Of --rounds those count in which others
took less than 3 % of the processors' time.

The second form is about hosts with a rank each, k passes a step, which scatter about the median by
the quantiles of --spread, by default those measured (`SPREAD`). A line for each number of hosts and
network: the step, the speed beside so many hosts by themselves, the interval of checkpoints, and
the goodput: the share of time that goes into steps that count, if hosts fail once in so many years.
One that dies costs the restart, one that falls silent (a share of them) --rank-timeout's limit too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
from ranks import measures, trainer_of

from pyggml.backends.cpu import CPU
from pyggml.lora import StepReport
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.data import WindowBatch
from pyggml.lora.ranks import ALONE, Ranks, ranks_of_process
from pyggml.lora.ranks.device import device_of_rank
from pyggml.lora.ranks.local import start
from pyggml.lora.trainer.gradient import StepGradient
from pyggml.runtime import Devices
from pyggml.runtime.choice import backends_of

SMALL, OF_LOSSES = 4, 2  # small exchanges of a step: to go on, two of the losses, before the sum
MESSAGE = 30e-6  # seconds from host to host over TCP
_MOST_OF_OTHERS = 0.03  # of the processors' time, in a round that counts
# How far a pass is from the median: quantiles 0, 1/8, …, 1 of 160 passes of two processes that
# computed beside each other on two cores of a shared machine.
SPREAD = (0.958, 0.984, 0.99, 0.994, 1.0, 1.006, 1.014, 1.026, 1.252)


@dataclass(frozen=True)
class Link:
    """A network. message: seconds of one from host to host; bandwidth: bytes/s of a host."""

    message: float
    bandwidth: float

    def seconds(self, n_ranks: int, n_bytes: float, k: float) -> float:
        """The exchanges of a step: small ones in log₂ R turns there and back, and parts of
        gradients from each to each. A gradient has n_bytes, a rank k of them."""
        if n_ranks == 1:
            return 0.0
        n_messages = 2 * SMALL * ceil(log2(n_ranks)) + 2 * (n_ranks - 1)
        return n_messages * self.message + sent_bytes(n_ranks, n_bytes, k) / self.bandwidth


def sent_bytes(n_ranks: int, n_bytes: float, k: float) -> float:
    """What a rank sends in a step: its k gradients in parts, then its part of the sum."""
    return n_bytes * (k + 1) * (n_ranks - 1) / n_ranks


def steps(
    passes: np.ndarray, n: int, n_ranks: int, beside: float, share_cores: bool = False
) -> np.ndarray:
    """(400,) seconds of steps of n passes, which are drawn from some that were measured: a step
    ends with the slowest rank. Where ranks share cores, a rank that ends leaves them to the others,
    so the mean counts. beside: what each takes beside its passes, and for the exchanges."""
    drawn = np.random.default_rng(0).choice(passes, (400, n))
    ends = [n * r // n_ranks for r in range(n_ranks + 1)]
    shares = np.stack([drawn[:, a:b].sum(1) for a, b in pairwise(ends)])
    return (shares.mean(axis=0) if share_cores else shares.max(axis=0)) + beside


@dataclass(frozen=True)
class Failures:
    """between: seconds from one failure of a host to its next; silent: the share after which the
    others wait for `limit`; restart: seconds until the run steps again; save: of a checkpoint."""

    between: float
    silent: float = 0.1
    limit: float = 1800.0
    restart: float = 180.0
    save: float = 5.0

    def interval(self, n_hosts: int) -> float:
        """Seconds between checkpoints that lose least (Young)."""
        return float(np.sqrt(2 * self.save * self.between / n_hosts))

    def goodput(self, step: float, n_hosts: int, every: int, n: int = 4000) -> float:
        """The share of time that goes into steps that count, over n failures. every: steps between
        checkpoints; what was made after the last one is lost."""
        rng = np.random.default_rng(0)
        up = rng.exponential(self.between / n_hosts, n)
        kept = np.floor(up / (every * step + self.save)) * every * step
        down = self.restart + self.limit * (rng.random(n) < self.silent)
        return float(kept.sum() / (up + down).sum())


# -- parts that are measured here -----------------------------------------------------------------


def measure_passes(given: argparse.Namespace, ranks: Ranks) -> dict[str, list[float]]:
    """Seconds of each pass, and of a step beside them, of processes that have a run each."""
    given = argparse.Namespace(**vars(given) | {"passes": -(-given.passes // ranks.size)})
    trainer = trainer_of(given, ALONE, int(given.batch), device_of_rank(given.device, ranks))
    begin, passes, rests = trainer.passes.begin, list[float](), list[float]()

    def begin_timed(batch: WindowBatch, alone: bool) -> Callable[[], float]:
        first, end = perf_counter(), begin(batch, alone)

        def end_timed() -> float:
            loss = end()
            passes.append(perf_counter() - first)
            return loss

        return end_timed

    vars(trainer.passes)["begin"] = begin_timed
    began = [perf_counter()]

    def note(report: object) -> None:
        if isinstance(report, StepReport):
            rests.append(perf_counter() - began[-1] - sum(passes[-given.passes :]))
            if len(rests) == 3:
                ranks.any(False)  # from here on all compute beside each other
            began.append(perf_counter())

    trainer.run(note, progress=False)
    trainer.free()
    told = ranks.texts(json.dumps(passes[3 * given.passes :]))
    every = [seconds for text in told for seconds in json.loads(text)]
    return {"passes": every, "rest": rests[3:], "n_bytes": [trainer.parameters.data.nbytes]}


def measure_exchange(
    given: argparse.Namespace, ranks: Ranks, n_bytes: int
) -> dict[str, list[float]]:
    """Seconds of a small exchange, and of the sum of gradients that no cache holds, of ranks that
    are all here."""
    seconds: dict[str, list[float]] = {"small": [], "sum": []}
    device = device_of_rank(given.device, ranks)
    devices = Devices([*backends_of(device), CPU()])
    parameters = Parameters({"a": (n_bytes // 4, 1)})
    gradient = StepGradient(parameters, devices, ranks)
    elsewhere = np.ones((2, 1 << 23), np.float32)
    with devices.holding(*parameters.buffers["gradient"]):
        for _ in range(30):
            gradient.begin()
            for _ in ranks.share(given.passes):
                gradient.next()
            elsewhere[0] += elsewhere[1]
            ranks.any(False)
            began = perf_counter()
            ranks.any(False)
            between = perf_counter()
            gradient.end(given.passes)
            seconds["sum"].append(perf_counter() - between)
            seconds["small"].append(between - began)
    return seconds


def be_one(given: argparse.Namespace) -> None:
    """Measure the parts, and the step that they make, as one of some processes; the first starts
    the others, and prints."""
    ranks = ranks_of_process()
    begins = ranks.size == 1 and given.of > 1
    with start(given.of, [sys.executable, *sys.argv]) if begins else nullcontext(ranks) as group:
        told = measure_passes(given, group)
        if group.size > 1:
            told |= measure_exchange(given, group, int(told["n_bytes"][0]))
        (line,) = measures(given, group)
        if group.is_first:
            print(json.dumps({**told, "step": cast(list[float], line["each"])[3:]}))


def measured_parts(given: argparse.Namespace, n: int) -> tuple[dict[str, list[float]], float]:
    """(Seconds of each part, as the first of n processes that this one starts has measured them,
    the share of all processors' time that others took meanwhile)."""
    words = [sys.executable, *sys.argv, f"--of={n}"]
    env = {**os.environ} | ({"NUMBA_NUM_THREADS": "1"} if given.device == "cpu" else {})
    before = _processor_seconds()
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
    every, busy, own = (b - a for a, b in zip(before, _processor_seconds(), strict=True))
    parts = dict(json.loads([x for x in done.stdout.splitlines() if x.startswith("{")][-1]))
    return parts, (busy - own) / every


def _processor_seconds() -> tuple[float, float, float]:
    """Seconds that this machine's processors have had, have been busy, or taken away, and have run
    this process and those that it has waited for."""
    times = np.array(Path("/proc/stat").read_text().split()[1:9], float) / os.sysconf("SC_CLK_TCK")
    return times.sum(), times.sum() - times[3:5].sum(), sum(os.times()[:4])


def foretell(given: argparse.Namespace) -> None:
    """A line for each number of ranks of this machine: the step foretold, and as it is, medians of
    the rounds that count. SystemExit if none does."""
    counts = [*map(int, given.ranks.split(","))]
    seen: dict[Any, list[float]] = defaultdict(list)
    shares: dict[int, list[float]] = defaultdict(list)
    for n in counts * given.rounds:
        parts, share = measured_parts(given, n)
        shares[n].append(share)
        for name, seconds in parts.items() if share < _MOST_OF_OTHERS else ():
            seen[name, n] += seconds
    for n in counts:
        if ("step", n) not in seen:
            raise SystemExit(f"others took {min(shares[n]):.0%} of the processors in each round")
        usual = {name: float(np.median(s)) for (name, m), s in seen.items() if m == n}
        passes = np.array(seen["passes", n])
        small, total = usual.get("small", 0.0), usual.get("sum", 0.0)
        on_cpu = given.device == "cpu"
        exchange = SMALL * small + total if on_cpu else small + max(total, OF_LOSSES * small)
        beside = usual["rest"] + exchange
        share_cores = on_cpu and n > len(os.sched_getaffinity(0))
        told = float(np.median(steps(passes, given.passes, n, beside, share_cores)))
        spread = np.quantile(passes / usual["passes"], np.arange(9) / 8).tolist()
        line = {"ranks": n, "foretold": told, "off": f"{told / usual['step'] - 1:+.1%}", **usual}
        line |= {"others": [round(s, 3) for s in shares[n]]}
        print(json.dumps({**line, "spread": [round(q, 3) for q in spread]}))


def of_hosts(given: argparse.Namespace) -> None:
    """A line for each number of hosts and each network."""
    spread = [*map(float, given.spread.split(","))]
    places = np.linspace(0, len(spread) - 1, 400)
    passes = given.pass_seconds * np.interp(places, range(len(spread)), spread)
    n_bytes, years = given.gradient_mb * 1e6, 365.25 * 86400 * given.years
    failing = Failures(years, given.silent, given.limit, given.restart, 3 * n_bytes / 1e9 + 1)
    for gbits in map(float, given.gbits.split(",")):
        link = Link(MESSAGE, gbits * 1e9 / 8)
        for n in map(int, given.hosts.split(",")):
            exchange = link.seconds(n, n_bytes, given.k)
            step = float(np.mean(steps(passes, n * given.k, n, exchange)))
            every = max(1, round(failing.interval(n) / step))
            line = {"hosts": n, "gbits": gbits, "step": step, "exchange": exchange}
            line["efficiency"] = given.k * float(passes.mean()) / step
            line |= {"checkpoint_every": every, "minutes_between": every * step / 60}
            line |= {"goodput": failing.goodput(step, n, every)}
            print(json.dumps({k: float(f"{v:.4g}") for k, v in line.items()}))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, nargs="?")
    numbers = {"tokens": 128, "passes": 4, "steps": 20, "rounds": 1}
    numbers |= {"k": 1, "of": 0}
    numbers |= {"years": 3.0, "restart": 180.0, "limit": 1800.0, "silent": 0.1}
    for name, usual in numbers.items():
        parser.add_argument(f"--{name}", type=type(usual), default=usual)
    parser.add_argument("--pass-seconds", type=float)
    parser.add_argument("--gradient-mb", type=float, default=100.0)
    texts = {
        "spread": ",".join(map(str, SPREAD)),
        "ranks": "1,2,4",
        "hosts": "8,64,1000",
        "gbits": "10,100",
        "device": "cpu",
        "batch": "1",
    }
    for name, text in texts.items():
        parser.add_argument(f"--{name}", default=text)
    given = parser.parse_args(words)
    (be_one if given.of else of_hosts if given.pass_seconds else foretell)(given)


if __name__ == "__main__":
    main()
