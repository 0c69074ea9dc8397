"""Questions a second: pyggml's beside those of llama-perplexity --hellaswag, same items, in turns.

usage: choices.py MODEL.gguf QUESTIONS LLAMA_PERPLEXITY [--n 40] [--rounds 3]

QUESTIONS are rows of four choices each (docs/evaluation.md). llama.cpp is timed as a program, on
all items and on four of them: the difference leaves out start and loading. Medians over the rounds;
a ratio above 1 means that pyggml is faster. Prints a JSON line and both shares of right answers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import pyggml
from pyggml import threads
from pyggml.lora.data import QuestionRow, Schema, read_rows
from pyggml.lora.evaluate import Answers, QuestionFormat, choose, encode_questions

from machine import about

FEW = 4


class Theirs:
    """llama-perplexity on a file in its own form: prompt, number, four endings, each on a line."""

    def __init__(self, program: str, model: str, rows: list[QuestionRow], folder: Path) -> None:
        self.words = [program, "-m", model, "--hellaswag", "-t", str(threads.get()), "-f"]
        self.files = [folder / f"{n}.txt" for n in (FEW, len(rows))]
        for path, n in zip(self.files, (FEW, len(rows)), strict=True):
            lines = [x for r in rows[:n] for x in (r.prompt, str(r.answer), *r.choices)]
            path.write_text("".join(" ".join(line.split()) + "\n" for line in lines), "utf-8")

    def seconds(self) -> tuple[float, float]:
        """For the items beyond the first few; and the share of all that are right, in percent."""
        times, last = [], 0.0
        for path in self.files:
            began = perf_counter()
            ended = subprocess.run([*self.words, str(path)], capture_output=True, check=True)
            times.append(perf_counter() - began)
            last = float(re.findall(rb"^\d+\t([\d.]+)%", ended.stdout, re.M)[-1])
        return times[1] - times[0], last


def seconds_of(work: Callable[[], Answers]) -> tuple[float, Answers]:
    began = perf_counter()
    answers = work()
    return perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("program")
    parser.add_argument("--n", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    rows = [
        r for r in read_rows(options.questions, Schema("question"))[1] if isinstance(r, QuestionRow)
    ]
    rows = [r for r in rows if len(r.choices) == 4][: options.n]
    model = pyggml.load(options.model)
    ours, theirs = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        other = Theirs(options.program, options.model, rows, Path(folder))
        for i in range(1 + options.rounds):  # the first compiles

            def work() -> Answers:
                return choose(model, encode_questions(rows, model.tokenizer, QuestionFormat()))

            taken, answers = seconds_of(work)
            ours += [taken] if i else []
            taken, share = other.seconds()
            theirs += [taken] if i else []
    a, b = len(rows) / median(ours), (len(rows) - FEW) / median(theirs)
    result = {"benchmark": "choices", "model": Path(options.model).name, "questions": len(rows)}
    result |= {"pyggml": round(a, 2), "llama.cpp": round(b, 2), "ratio": round(a / b, 2)}
    print(json.dumps(result | about("pyggml", "numba")))
    print(f"right: {100 * answers.right['acc_token'].mean():.1f} % and {share:.1f} %")


if __name__ == "__main__":
    main()
