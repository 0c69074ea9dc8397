"""The figures of a file as a table: a line for each model, and below it how it differs from the
first."""

from collections.abc import Sequence

from pyggml.cli.commands.eval.files import File, TokenResult, are_comparable
from pyggml.cli.terminal.lines import Line, confusion_lines, say_lines
from pyggml.cli.terminal.show import plural, printable, say
from pyggml.look.intervals import clustered_proportion, proportion
from pyggml.lora.data.reading.expand import shown_path
from pyggml.lora.evaluate import MEASURES, Answers, Interval, compare_answers, compare_tokens
from pyggml.lora.evaluate.classes import ClassAnswers
from pyggml.lora.evaluate.groups import NearestAnswers
from pyggml.lora.evaluate.rows import GROUPS, PAIRS, WRITTEN

NOTE = "[a, b]: 95 % confidence interval; +/-: standard error"


def show(file: File, names: Sequence[str], results: Sequence[Answers | TokenResult]) -> None:
    """Print what all models made of a file."""
    answers = [r for r in results if isinstance(r, Answers)]
    tokens = [r for r in results if isinstance(r, TokenResult)]
    say(f"{shown_path(file.path)}: {_about(file, tokens)}\n")
    called = [printable(name) for name in names]
    say_lines(_of_answers(file, called, answers) if answers else _of_tokens(called, tokens))
    say()
    for name, result in zip(called, answers, strict=False):
        if isinstance(result, NearestAnswers):
            say(f"{name}: mean reciprocal rank {result.reciprocal:.4f}\n")
        if isinstance(result, ClassAnswers):
            say(f"{name}: F1 {_percent(result.confusion.macro_f1)}, the mean of classes\n")
            say_lines(confusion_lines(result.confusion, result.labels.names))
            say()


def _about(file: File, results: Sequence[TokenResult]) -> str:
    if not results:
        if file.kind in (WRITTEN, GROUPS):
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


def _of_tokens(names: Sequence[str], results: Sequence[TokenResult]) -> list[Line]:
    lines: list[Line] = [("", "perplexity", "tokens right")]
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


def _of_answers(file: File, names: Sequence[str], results: Sequence[Answers]) -> list[Line]:
    measures = _measures(results)
    lines: list[Line] = [("", *measures)]
    for name, answers in zip(names, results, strict=True):
        shares = (proportion(int(answers.right[m].sum()), len(answers.right[m])) for m in measures)
        lines.append((name, *map(_share, shares)))
        lines += _of_categories(file, answers, measures)
        if answers is not results[0]:
            differences = compare_answers(answers, results[0])
            lines.append((_against(names), *(_difference(differences[m].share) for m in measures)))
            counts = ((differences[m].won, differences[m].lost) for m in measures)
            lines.append(("  won, lost", *(f"{won}, {lost}" for won, lost in counts)))
    return lines


def _of_categories(file: File, answers: Answers, measures: Sequence[str]) -> list[Line]:
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
    measures = [m for m in MEASURES if m in results[0].right]
    if "acc_bytes" in measures and all(
        (r.right["acc_bytes"] == r.right["acc_norm"]).all() for r in results
    ):
        measures.remove("acc_bytes")
    return measures


def _against(names: Sequence[str]) -> str:
    return f"  against {names[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(interval: Interval) -> str:
    return f"{_percent(interval.value)}  [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _difference(interval: Interval, unit: str = "") -> str:
    value, low, high = (100 * x for x in (interval.value, interval.low, interval.high))
    return f"{value:+.1f}{unit}  [{low:+.1f}, {high:+.1f}]"
