"""Tokens/s with guessed tokens and without, on code and on prose, and how many are accepted.

    python benchmarks/speculation.py -m model.gguf [--draft small.gguf] [--draft-max 2] [--turns 3]

Each side has a process of its own (benchmarks/turns.py); they take turns, and the median counts.
The prompts are the first tokens of a Python file and of a page of docs/, or of --text FILE. The
first answer of a side, in which programs are bound, does not count.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import pyggml
from pyggml.generation import Completion, Sampling, Session

from turns import Runner

ROOT = Path(__file__).parents[1]
SIDES = ("plain", "default", "ngram", "draft", "both")
NGRAM = {"plain": False, "default": None, "draft": False}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--draft-max", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--n-prompt", type=int, default=200)
    parser.add_argument("--n-tokens", type=int, default=256)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--text", action="append", help="instead of code and prose")
    parser.add_argument("--side", choices=SIDES, help="one side alone")
    parser.add_argument("--in-turns", action="store_true")
    return parser.parse_args()


def texts_of(given):
    """Name → text."""
    if given.text:
        return {path: Path(path).read_text("utf-8") for path in given.text}
    code, prose = ROOT / "pyggml/generation/batch.py", ROOT / "docs/reliability.md"
    return {"code": code.read_text("utf-8"), "prose": prose.read_text("utf-8")}


def measure(model, draft, given, text):
    """Seconds a token after the first, and the tokens drafted and accepted."""
    prompt = model.tokenizer.encode(text)[: given.n_prompt]
    ngram = NGRAM.get(given.side, True)
    how = Sampling(temperature=given.temp, seed=1, ngram=ngram, draft_max=given.draft_max)
    completion = Completion(model.tokenizer, how, prompt, given.n_tokens)
    session = Session(model, len(prompt) + given.n_tokens, draft=draft)
    pieces = session.pieces(completion, prompt)
    next(pieces)
    start = time.perf_counter()
    n = sum(1 for _ in pieces)
    seconds = (time.perf_counter() - start) / max(1, n)
    return seconds, session.speculator.n_drafted, session.speculator.n_accepted


def one_side(given):
    model = pyggml.load(given.model, compute=given.compute)
    uses_draft = given.side in ("draft", "both")
    draft = pyggml.load(given.draft, compute=given.compute) if uses_draft else None
    texts, seconds = texts_of(given), {}
    for turn in range(given.turns + 1):
        if given.in_turns:
            print("ready", flush=True)
            sys.stdin.readline()
        for name, text in texts.items():
            each, drafted, accepted = measure(model, draft, given, text)
            if turn:
                seconds.setdefault(name, []).append(each)
                counts = {"drafted": drafted, "accepted": accepted}
                seconds[name, "counts"] = counts
    told = {
        name: {"tokens_per_second": 1 / statistics.median(seconds[name])} | seconds[name, "counts"]
        for name in texts
    }
    print(json.dumps(told), flush=True)


def main():
    given = arguments()
    if given.side:
        one_side(given)
        return
    sides = SIDES if given.draft else SIDES[:3]
    runners = {
        side: Runner(sys.executable, Path(__file__), *sys.argv[1:], "--side", side)
        for side in sides
    }
    for _ in range(given.turns + 1):
        lines = {side: runner.turn() for side, runner in runners.items()}
    told = {side: json.loads(line) for side, line in lines.items()}
    print("| text | side | tokens/s | of plain | accepted of drafted |\n|---|---|---|---|---|")
    for name in told["plain"]:
        plain = told["plain"][name]["tokens_per_second"]
        for side in sides:
            each = told[side][name]
            speed, counts = each["tokens_per_second"], f"{each['accepted']} of {each['drafted']}"
            print(f"| {name} | {side} | {speed:.1f} | {speed / plain:.2f} | {counts} |")


if __name__ == "__main__":
    main()
