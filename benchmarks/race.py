"""A race against llama.cpp, ik_llama.cpp and PEFT: each side in a process of its own, in turns.

usage: race.py MODEL.gguf … [--llama-bench PATH] [--ik-llama-bench PATH] [--peft-python PATH]
               [--prompt 512] [--generate 32] [--after 0,512] [--steps 128,512] [--rounds 5]
               [--dtypes bf16,f32] [--size 0.6B] [--write docs/figures.md]

In every round each side loads the model, warms up and measures; nothing else runs meanwhile. Of
peers the best configuration counts, row by row: llama.cpp with flash attention and without,
ik_llama.cpp with repacked weights and without, PEFT eager and compiled, in each dtype, at as many
layers as the file has. Medians over the rounds; a ratio above 1 means that pyggml is faster. The
share is that of the machine's limit, measured in the same run: of its bandwidth for a token, of its
bfloat16 peak for prompt and step. All sides have as many threads, of the cores that are named.

--write replaces the part of a page between `<!-- race CPU, cores -->` and `<!-- end of race -->`,
or adds it. Where pyggml is held below what the CPU has (PYGGML_ISA), hold peers likewise: builds
without those instructions, and ONEDNN_MAX_CPU_ISA for PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from step import peak_flops

import pyggml
from pyggml import threads
from pyggml.generation import Session
from pyggml.model import Model

from machine import about

HERE = Path(__file__).parent
Rows = dict[str, float]  # a row's name -> tokens per second


# -- pyggml's side: a process of its own ----------------------------------------------------------


def ours(options: argparse.Namespace) -> None:
    """Measure one model in this process; prints the rows as JSON."""
    model = pyggml.load(options.models[0])
    rng = np.random.default_rng(0)
    depths = [int(n) for n in options.after.split(",")]
    session = Session(model, max(options.prompt, *depths) + options.generate + 1)
    rows: Rows = {}

    def seconds(ids: np.ndarray, at_once: bool) -> float:
        began = perf_counter()
        for part in [ids] if at_once else ids.reshape(-1, 1):
            session.feed(part)
        return perf_counter() - began

    def draw(n: int) -> np.ndarray:
        return rng.integers(0, model.config.n_vocab, n)

    session.feed(draw(options.prompt))
    session.feed(draw(1))
    session.truncate(0)
    rows[f"prompt of {options.prompt}"] = options.prompt / seconds(draw(options.prompt), True)
    for depth in depths:
        session.truncate(0)
        if depth:
            session.feed(draw(depth))
        rows[_token_row(depth)] = options.generate / seconds(draw(options.generate), False)
    print(json.dumps(rows))


def _token_row(depth: int) -> str:
    return f"a token after {depth}" if depth else "a token from nothing"


# -- the sides of a race --------------------------------------------------------------------------


def run_ours(model: str, options: argparse.Namespace) -> Rows:
    given = ("--prompt", options.prompt, "--generate", options.generate, "--after", options.after)
    command = [sys.executable, __file__, model, "--ours", *map(str, given)]
    return dict(json.loads(_output(command).splitlines()[-1]))


def run_llama_bench(program: str, flags: tuple[str, ...], model: str, options: Any) -> Rows:
    """One run of a llama-bench; its own warm-up comes before what it measures."""
    n, n_tokens, is_ik = str(threads.get()), str(options.generate), "-rtr" in flags
    rows: Rows = {}
    for depth in map(int, options.after.split(",")):
        sizes = ("-p", "0", "-n", n_tokens, "-d", str(depth))
        if depth == 0:
            sizes = ("-p", str(options.prompt), "-n", n_tokens)
        elif is_ik:  # which has no -d
            sizes = ("-p", "0", "-n", "0", "-gp", f"{depth},{n_tokens}")
        command = [program, "-m", model, "-t", n, "-r", "1", "-o", "json", *sizes, *flags]
        for test in json.loads(_output(command)):
            name = _token_row(depth) if test["n_gen"] else f"prompt of {options.prompt}"
            rows[name] = test["avg_ts"]
    return rows


def run_steps(python: str, script: str, arguments: list[str], tokens: int) -> Rows:
    """One run of step.py or peft_step.py."""
    command = [python, str(HERE / script), *arguments, "--tokens", str(tokens), "--steps", "2"]
    lines = [line for line in _output(command).splitlines() if line.startswith("{")]
    return {f"step of {tokens}": json.loads(lines[-1])["tokens_per_second"]}


def _output(command: list[str]) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
    environment["OMP_NUM_THREADS"] = str(threads.get())  # PyTorch's
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return done.stdout


def sides(model: str, n_layer: int, options: argparse.Namespace) -> dict[tuple[str, str], Any]:
    """(who, configuration) -> a function that runs that side once; PEFT's model has n_layer."""
    runs: dict[tuple[str, str], Any] = {("pyggml", ""): lambda: run_ours(model, options)}
    for who, program, flags in (
        ("llama.cpp", options.llama_bench, (("-fa", "0"), ("-fa", "1"))),
        ("ik_llama.cpp", options.ik_llama_bench, (("-rtr", "0"), ("-rtr", "1"))),
    ):
        for each in flags if program else ():
            runs[who, " ".join(each)] = lambda p=program, f=each: run_llama_bench(
                p, f, model, options
            )
    for tokens in [int(n) for n in options.steps.split(",") if n]:
        runs["pyggml", f"step {tokens}"] = lambda n=tokens: run_steps(
            sys.executable, "step.py", [model], n
        )
        for dtype in options.dtypes.split(",") if options.peft_python else ():
            for compiled in ([], ["--compile"]):
                shape = ["--size", options.size, "--layers", str(n_layer)]
                arguments = ["--dtype", dtype, *shape, *compiled]
                runs["PEFT", f"{' '.join(arguments)} {tokens}"] = lambda a=arguments, n=tokens: (
                    run_steps(options.peft_python, "peft_step.py", a, n)
                )
    return runs


# -- the machine's limits -------------------------------------------------------------------------


def bandwidth() -> float:
    """Bytes a second that all threads read from memory, the best of seven times."""
    parts = np.array_split(np.ones(1 << 26, np.int64), threads.get())
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(7):
            began = perf_counter()
            sum(pool.map(np.max, parts))
            best = max(best, sum(p.nbytes for p in parts) / (perf_counter() - began))
    return best


def used_of(model: Model) -> dict[str, float]:
    """The share of each tensor that a token is multiplied with: of experts those that it uses."""
    kind = model.file.get("general.architecture")
    used, every = (
        model.file.get(f"{kind}.{name}", 1) or 1 for name in ("expert_used_count", "expert_count")
    )
    names = {n for n in model.parts.weights if n != "token_embd.weight"}
    names.add(f"{model.parts.output_name}.weight")  # a tied embedding serves as the output matrix
    return {name: used / every if "_exps" in name else 1.0 for name in names}


def share(row: str, speed: float, limits: dict[str, float]) -> float:
    """The part of the machine's limit that this speed is."""
    if row.startswith("a token"):
        return speed * limits["bytes"] / limits["bandwidth"]
    flop = 4 if row.startswith("step") else 2
    return speed * flop * limits["weights"] / limits["peak"]


# -- the race -------------------------------------------------------------------------------------


def race(path: str, options: argparse.Namespace) -> list[str]:
    """The table's lines of one model; every result is printed as it comes."""
    model = pyggml.load(path)
    weights, shares = model.parts.weights, used_of(model)
    limits = {
        "bandwidth": bandwidth(),
        "peak": peak_flops(model.backend.compute),
        "bytes": sum(weights[n].n_bytes * part for n, part in shares.items()),
        "weights": sum(prod(weights[n].shape) * part for n, part in shares.items()),
    }
    n_layer = model.config.n_layer
    del model, weights
    speeds: defaultdict[tuple[str, str], defaultdict[str, list[float]]]
    speeds = defaultdict(lambda: defaultdict(list))
    every = sides(path, n_layer, options)
    for _ in range(options.rounds):
        for side, run in every.items():
            for row, speed in run().items():
                speeds[side][row].append(speed)
                print(json.dumps({"side": " ".join(side), "row": row, "speed": speed}), flush=True)
    rows = dict.fromkeys(row for by_row in speeds.values() for row in by_row)
    return [line for row in rows for line in _lines(Path(path).stem, row, speeds, limits)]


def _lines(name: str, row: str, speeds: Any, limits: dict[str, float]) -> list[str]:
    medians = {side: median(by[row]) for side, by in speeds.items() if row in by}
    mine = max(v for (who, _), v in medians.items() if who == "pyggml")
    others = {side: v for side, v in medians.items() if side[0] != "pyggml"}
    best = max(others, key=lambda side: others[side], default=None)
    against = f"{others[best]:.1f} ({' '.join(best)})" if best else "–"
    ratio = f"{mine / others[best]:.2f}" if best else "–"
    part = share(row, mine, limits)
    return [f"| {name} | {row} | {mine:.1f} | {against} | {ratio} | {part:.2f} |"]


HEAD = ["| model | row | pyggml, tokens/s | the best other | ratio | share of the limit |"]
HEAD += ["|---|---|---|---|---|---|"]


def write(page: Path, machine: str, cores: str, lines: list[str]) -> None:
    """Put the table into its part of a page, beside those of other machines."""
    begin, end = f"<!-- race {machine}, {cores} -->", "<!-- end of race -->"
    part = "\n".join([begin, f"{machine}, {cores}:", "", *HEAD, *lines, end])
    text = page.read_text("utf-8")
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.S)
    text = pattern.sub(lambda _: part, text) if pattern.search(text) else f"{text}\n{part}\n"
    page.write_text(text, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--llama-bench")
    parser.add_argument("--ik-llama-bench")
    parser.add_argument("--peft-python")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--after", default="0,512")
    parser.add_argument("--steps", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--ours", action="store_true", help="measure in this process")
    options = parser.parse_args()
    if options.ours:
        ours(options)
        return
    machine = about()["cpu"]
    cores = f"{threads.get()} of its {os.cpu_count()} cores, a thread on each"
    lines = [line for path in options.models for line in race(path, options)]
    print("\n".join([f"{machine}, {cores}", *HEAD, *lines]))
    if options.write:
        write(options.write, machine, cores, lines)


if __name__ == "__main__":
    main()
