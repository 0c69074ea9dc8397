"""The figures of a file as a table: a line for each model, and below it how it differs from the
first."""

from collections.abc import Sequence

from pyggml.cli.commands.eval.files import File, TokenResult, are_comparable
from pyggml.cli.terminal.show import plural, printable, say
from pyggml.look.intervals import clustered_proportion, proportion
from pyggml.lora.evaluate import (
    MEASURES,
    Answers,
    Difference,
    Interval,
    compare_answers,
    compare_tokens,
)
from pyggml.lora.evaluate.rows import PAIRS, WRITTEN

NOTE = "[a, b]: 95 % confidence interval; +/-: standard error"
_Line = tuple[str, ...]


def show(file: File, names: Sequence[str], results: Sequence[Answers | TokenResult]) -> None:
    """Print what all models made of a file."""
    answers = [r for r in results if isinstance(r, Answers)]
    tokens = [r for r in results if isinstance(r, TokenResult)]
    say(f"{file.path}: {_about(file, tokens)}\n")
    called = [printable(name) for name in names]
    lines = _of_answers(file, called, answers) if answers else _of_tokens(called, tokens)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        say("   ".join(cells).rstrip())
    say()


def _about(file: File, results: Sequence[TokenResult]) -> str:
    if not results:
        if file.kind == WRITTEN:
            return file.about()
        if file.kind == PAIRS:
            return f"{file.about()}; by chance {_percent(file.chance)}"
        by_chance = f"by chance {_percent(file.chance)}"
        always = f"always the commonest answer {_percent(file.commonest)}"
        return f"{file.about()}; {by_chance}, {always}"
    counts = dict.fromkeys(f"{plural(r.total.n_tokens, 'token')} scored" for r in results)
    dropped = max(r.n_long for r in results)
    left_out = f", {dropped} too long and left out" if dropped else ""
    return f"{file.about()}{left_out}; {', '.join(counts)}"


def _of_tokens(names: Sequence[str], results: Sequence[TokenResult]) -> list[_Line]:
    lines: list[_Line] = [("", "perplexity", "tokens right")]
    first, *_ = results
    same = are_comparable(results)
    for name, r in zip(names, results, strict=True):
        share = clustered_proportion(r.scores.right, r.scores.documents)
        lines.append((name, f"{r.total.value:.4f} +/- {r.total.error:.4f}", _share(share)))
        if r is first:
            continue
        if same:
            ratio, right = compare_tokens(r.scores, first.scores)
            less = Interval(ratio.value - 1, ratio.low - 1, ratio.high - 1)
            lines.append((_against(names), _difference(less, " %"), _difference(right.share)))
        else:
            lines.append((_against(names), "other tokens: not comparable", ""))
    return lines


def _of_answers(file: File, names: Sequence[str], results: Sequence[Answers]) -> list[_Line]:
    measures = _measures(results)
    lines: list[_Line] = [("", *measures)]
    for name, answers in zip(names, results, strict=True):
        shares = (proportion(int(answers.right[m].sum()), len(answers.right[m])) for m in measures)
        lines.append((name, *map(_share, shares)))
        lines += _of_categories(file, answers, measures)
        if answers is not results[0]:
            differences = compare_answers(answers, results[0])
            lines.append((_against(names), *(_difference(differences[m].share) for m in measures)))
            lines.append(("  won, lost", *(_won(differences[m]) for m in measures)))
    return lines


def _of_categories(file: File, answers: Answers, measures: Sequence[str]) -> list[_Line]:
    """A line for each category, if there are several."""
    return [
        (
            f"  {printable(name) or 'none'} ({int(which.sum()):,})",
            *(
                _share(proportion(int(answers.right[m][which].sum()), int(which.sum())))
                for m in measures
            ),
        )
        for name, which in file.categories.items()
    ]


def _measures(results: Sequence[Answers]) -> list[str]:
    """The measures, without that by bytes where it says the same as that by characters."""
    known = [m for m in MEASURES if m in results[0].right]
    if "acc_bytes" in known and all(
        (r.right["acc_bytes"] == r.right["acc_norm"]).all() for r in results
    ):
        known.remove("acc_bytes")
    return known


def _against(names: Sequence[str]) -> str:
    return f"  against {names[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(interval: Interval) -> str:
    return f"{_percent(interval.value)}  [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _difference(interval: Interval, unit: str = "") -> str:
    value, low, high = (100 * x for x in (interval.value, interval.low, interval.high))
    return f"{value:+.1f}{unit}  [{low:+.1f}, {high:+.1f}]"


def _won(difference: Difference) -> str:
    return f"{difference.won}, {difference.lost}"
