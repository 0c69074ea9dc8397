"""PubMedQA's labelled questions → rows to train on, and the held-out half as rows and questions.

usage: python examples/pubmedqa/prepare.py pubmedqa-labeled.json [-o pubmedqa] [--context abstract]

The file is ori_pqal.json of https://github.com/pubmedqa/pubmedqa: 1,000 questions from titles of
papers, each with its abstract, the abstract's conclusion, and the answer yes, no or maybe. A seeded
half is trained on. It writes

    train.jsonl       500 rows: context and question are read, the answer is learned
    held-out.jsonl    the other 500
    held-out.txt      these as plain text, for llama.cpp's perplexity
    questions.jsonl   these as questions with three choices

The context is the conclusion ("reasoning-free" in the paper), or the abstract without it
("reasoning-required"), which is four times as long and far harder. The prompt has
lm-evaluation-harness's form, as pyggml eval makes it of the file itself.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

CHOICES = ("yes", "no", "maybe")
SEED, N_TRAIN = 13, 500


def prompt(record: Mapping[str, Any], context: str) -> str:
    """What the model reads before its answer."""
    parts = [record["LONG_ANSWER"]] if context == "conclusion" else record["CONTEXTS"]
    return "Abstract: {}\nQuestion: {}\nAnswer:".format("\n".join(parts), record["QUESTION"])


def row(record: Mapping[str, Any], context: str) -> dict[str, Any]:
    return {"prompt": prompt(record, context), "completion": f" {record['final_decision']}"}


def question(record: Mapping[str, Any], context: str) -> dict[str, Any]:
    asked = {"prompt": prompt(record, context), "choices": CHOICES}
    return {**asked, "answer": record["final_decision"]}


def halves(path: Path) -> tuple[list[Any], list[Any]]:
    """The records to train on and those held out, by their order and the seed alone."""
    records = list(json.loads(path.read_text("utf-8")).values())
    random.Random(SEED).shuffle(records)
    return records[:N_TRAIN], records[N_TRAIN:]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), "utf-8")
    print(f"{path}: {len(lines)} rows")


def plain(records: Iterable[Mapping[str, Any]], context: str) -> str:
    """Prompts and answers, with a blank line between two."""
    return "\n".join(f"{prompt(r, context)} {r['final_decision']}\n" for r in records)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="PubMedQA as rows and questions.")
    parser.add_argument("file", type=Path, help="pubmedqa-labeled.json (ori_pqal.json)")
    parser.add_argument("-o", "--output", type=Path, default=Path("pubmedqa"), help="folder")
    parser.add_argument("--context", choices=["conclusion", "abstract"], default="conclusion")
    args = parser.parse_args(words)

    args.output.mkdir(parents=True, exist_ok=True)
    train, held_out = halves(args.file)
    write(args.output / "train.jsonl", (row(r, args.context) for r in train))
    write(args.output / "held-out.jsonl", (row(r, args.context) for r in held_out))
    (args.output / "held-out.txt").write_text(plain(held_out, args.context), "utf-8")
    write(args.output / "questions.jsonl", (question(r, args.context) for r in held_out))


if __name__ == "__main__":
    main()
