"""The card on the data of a run: how many rows have which fault, how long rows are, their
languages, and the rows with the highest and the lowest loss."""

from collections.abc import Mapping, Sequence
from typing import Any

from pyggml.cli.terminal.show import plural, printable

_MOST_ROWS = 5  # with the highest loss, and with the lowest
_MOST_LANGUAGES = 8

Record = Mapping[str, Any]


def data_card(records: Sequence[Record]) -> dict[str, Any] | None:
    """What the card shows; None of a run that has no report on its rows.

    rows        how many there are
    counts      what may be wrong with rows: text, n, examples; those that no row has last
    lengths     of rows and of what is learned: a name; the least, median, 90 % quantile, longest
    shares      of languages and scripts: a title, and names with their share
    losses      rows: a label, losses before and after, what is learned of it
    n_losses    of how many rows losses were measured

    Raises ValueError, TypeError or ArithmeticError for what no run writes.
    """
    told = [r["data"] for r in records if r["event"] == "run" and isinstance(r.get("data"), dict)]
    if not told or not told[-1].get("lengths"):
        return None
    data = told[-1]
    last = next((r for r in reversed(records) if r["event"] == "answers"), {})
    spoken = last["languages"] if isinstance(last.get("languages"), dict) else {}
    findings = [f for about in (data, spoken) for f in about.get("findings", ()) if _is_count(f)]
    losses = last.get("rows", ())
    return {
        "rows": _rows(data),
        "counts": [
            *map(_count, findings),
            *({"n": 0, "text": str(what), "examples": []} for what in data.get("absent", ())),
        ],
        "lengths": [
            (title, [f"{int(n):,}" for n in data.get(name, ())])
            for name, title in (("lengths", "tokens of a row"), ("answers", "learned of these"))
            if data.get(name)
        ],
        "shares": [
            (title, shares)
            for title, shares in (("languages", _languages(spoken)), ("scripts", _scripts(data)))
            if shares
        ],
        "losses": _ends(losses),
        "n_losses": len(losses),
    }


def _rows(data: Record) -> str:
    train, held_out, read = (int(data.get(key, 0)) for key in ("n_rows", "n_held_out", "n_read"))
    said = f"{plural(train, 'row')} to train on, {held_out:,} held out for validation"
    return said if read >= train + held_out else f"{said}; {read:,} of them were looked at"


def _is_count(finding: object) -> bool:
    return isinstance(finding, dict) and {"n", "what"} <= finding.keys()


def _count(finding: Record) -> dict[str, Any]:
    examples = [printable(str(text)) for text in finding.get("examples", ())]
    return {"n": int(finding["n"]), "text": str(finding["what"]), "examples": examples}


def _languages(spoken: Record) -> list[tuple[str, float]]:
    shares = [(str(code), float(share)) for code, share in spoken.get("shares", ())]
    untold = float(spoken.get("untold", 0))
    return [*shares[:_MOST_LANGUAGES], *([("too short to tell", untold)] if untold else [])]


def _scripts(data: Record) -> list[tuple[str, float]]:
    """Nothing where all rows have one."""
    shares = [(str(name), float(share)) for name, share in data.get("scripts", ())]
    return shares[:_MOST_LANGUAGES] if len(shares) > 1 else []


def _ends(losses: Sequence[Sequence[Any]]) -> list[tuple[str, list[str], str]]:
    """The rows with the highest losses and with the lowest."""
    n = min(_MOST_ROWS, len(losses) // 2)
    return [
        (label, ["no number" if x is None else f"{float(x):.3f}" for x in each], printable(text))
        for label, shown in (("highest", losses[:n]), ("lowest", losses[len(losses) - n :]))
        for text, *each in shown
    ]
