"""The figures of a file as JSON: shares from 0 to 1, intervals of 95 %."""

from collections.abc import Sequence
from dataclasses import asdict
from math import sqrt
from typing import Any

from pyggml.cli.commands.eval.files import File, TokenResult, are_comparable
from pyggml.files.json_text import finite
from pyggml.look.intervals import clustered_proportion, proportion
from pyggml.lora.data.reading.expand import shown_path
from pyggml.lora.evaluate import Answers, Difference, Interval, compare_answers, compare_tokens
from pyggml.lora.evaluate.classes import ClassAnswers
from pyggml.lora.evaluate.groups import NearestAnswers
from pyggml.lora.evaluate.rows import CLASSES, GROUPS, QUESTIONS, WRITTEN

_Object = dict[str, Any]


def record(file: File, names: Sequence[str], results: Sequence[Answers | TokenResult]) -> _Object:
    """What all models made of a file."""
    answers = [r for r in results if isinstance(r, Answers)]
    tokens = [r for r in results if isinstance(r, TokenResult)]
    about: _Object = {"file": shown_path(file.path), "kind": file.kind, "n": len(file.rows)}
    if answers:
        if file.kind not in (WRITTEN, GROUPS):
            about["chance"] = file.chance
        if file.kind in (QUESTIONS, CLASSES):
            about["commonest"] = file.commonest
    models = [*(_of_answers(file, a) for a in answers), *map(_of_tokens, tokens)]
    against_first = [
        {measure: _difference(d) for measure, d in compare_answers(r, answers[0]).items()}
        for r in answers[1:]
    ]
    if tokens and are_comparable(tokens):
        against_first = [_tokens_against(r, tokens[0]) for r in tokens[1:]]
    named = [{"model": name, **m} for name, m in zip(names, models, strict=True)]
    differences = [
        {"model": name, "against": names[0], **d}
        for name, d in zip(names[1:], against_first, strict=False)
    ]
    return {**about, "models": named, "differences": differences}


def _of_answers(file: File, answers: Answers) -> _Object:
    figures: _Object = {name: _share(right) for name, right in answers.right.items()}
    kinds = file.categories.items()
    if kinds:
        figures["categories"] = {
            kind: {name: _share(right[which]) for name, right in answers.right.items()}
            for kind, which in kinds
        }
    if isinstance(answers, ClassAnswers):
        confusion, names = answers.confusion, answers.labels.names
        figures["macro_f1"] = confusion.macro_f1
        figures["f1"] = dict(zip(names, confusion.f1.tolist(), strict=True))
        figures["confusion"] = {"labels": names, "counts": confusion.counts.tolist()}
    if isinstance(answers, NearestAnswers):
        figures["mean_reciprocal_rank"] = answers.reciprocal
    if answers.texts:
        rights = answers.right["match"].tolist()
        pairs = zip(answers.texts, rights, strict=True)
        figures["answers"] = [{"text": text, "right": right} for text, right in pairs]
    return figures


def _share(right: Any) -> _Object:
    """A proportion; its standard error is lm-evaluation-harness's."""
    n = len(right)
    share = proportion(int(right.sum()), n)
    error = sqrt(share.value * (1 - share.value) / (n - 1)) if n > 1 else None
    return {**asdict(share), "stderr": error}


def _of_tokens(result: TokenResult) -> _Object:
    total, scores = result.total, result.scores
    return {
        "n_tokens": total.n_tokens,
        "n_dropped": result.n_long,
        "perplexity": {"value": finite(total.value), "stderr": finite(total.error)},
        "token_accuracy": asdict(clustered_proportion(scores.right, scores.documents)),
    }


def _tokens_against(ours: TokenResult, first: TokenResult) -> _Object:
    ratio, share = compare_tokens(ours.scores, first.scores)
    return {"perplexity_ratio": _interval(ratio), "token_accuracy": _difference(share)}


def _difference(d: Difference) -> _Object:
    return {**_interval(d.share), "won": d.won, "lost": d.lost}


def _interval(interval: Interval) -> _Object:
    return {name: finite(value) for name, value in asdict(interval).items()}
