"""What a run says of its rows before it begins: what was added to them and what was left out."""

from collections.abc import Sequence

from pyggml.cli.terminal.row_losses import RowLoss
from pyggml.cli.terminal.show import plural, row
from pyggml.lora import Corpus, Trainer
from pyggml.lora.data.report import DataReport, LanguageReport
from pyggml.lora.data.tokens.encode import ENDED, TEXT
from pyggml.tokenizer import Tokenizer

_SHOWN, _SHARES = 3, 5


def say_rows(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Print how rows of text end, and which rows are longer than a window."""
    n_texts, n_ended = (_n_noted(corpus, note) for note in (TEXT, ENDED))
    if n_texts and n_ended:
        end = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.eot_id
        name = tokenizer.token_bytes(int(end or 0), special=True).decode(errors="replace")
        said = f"{plural(n_ended, 'row')} of text, each ends in {name} once"
        row("texts", f"{said} (--no-end-of-text: as it is)")
    elif n_texts:
        row("texts", f"{plural(n_texts, 'row')} of text, without an end of text")
    for file in corpus.files:
        if file.n_dropped:
            row("", f"{plural(file.n_dropped, 'row')} longer than a window left out")
        if file.n_truncated:
            row("", f"{plural(file.n_truncated, 'row')} longer than a window cut at its end")


def say_report(report: DataReport, languages: LanguageReport | None = None) -> None:
    """Print what may be wrong with the rows; with their languages also what they are, and how some
    begin."""
    in_full = languages is not None
    findings = [*report.findings, *(languages.findings if languages else ())]
    read = f" ({report.n_read:,} were looked at)" * (
        report.n_read < report.n_rows + report.n_held_out
    )
    if in_full and report.lengths:
        said = "{:,} to {:,}, half up to {:,}, 9 of 10 up to {:,}"
        lengths = ("tokens", report.lengths), ("learned", report.answers)
        for what, (least, half, most, longest) in (each for each in lengths if each[1]):
            row(what, f"{said.format(least, longest, half, most)} in a row{read}")
        scripts = (f"{name} {100 * share:.3g} %" for name, share in report.scripts[:_SHARES])
        row("scripts", ", ".join(scripts) or "no letters")
    if languages:
        row("languages", _shares(languages))
    for i, finding in enumerate(findings):
        row("" if i else "findings", f"{plural(finding.n, 'row')} {finding.what}{read}")
        for text in finding.examples if in_full else ():
            row("", f"  {text}")
    if in_full and not findings:
        row("findings", "none: no row is there twice, in part or on both sides, empty or cut")


def _shares(languages: LanguageReport) -> str:
    shares = [f"{code} {100 * share:.3g} %" for code, share in languages.shares[:_SHARES]]
    untold = f"{100 * languages.untold:.3g} % too short to tell, or no prose"
    return ", ".join([*shares, *([untold] if languages.untold else [])])


def say_row_losses(rows: Sequence[RowLoss]) -> None:
    """Print the rows with the highest loss before training, and with the lowest."""
    n = min(_SHOWN, len(rows) // 2)
    for label, shown in (("highest", rows[:n]), ("lowest", rows[len(rows) - n :])):
        for i, each in enumerate(shown):
            losses = " → ".join(f"{loss:.2f}" for loss in each.losses)
            row("" if i else label, f"{losses}  {each.text}")
    row("", f"mean loss of a row before training, of {plural(len(rows), 'row')} spread over all")


def say_validation(trainer: Trainer) -> None:
    """Print how much of what is held out a validation reads, and why not all."""
    sample = trainer.validation
    if sample is None:
        return
    rows, kind = trainer.objective.rows, trainer.corpus.kind
    word = "row" if rows == "training" and kind != "text" else "window"
    word = "prompt" if rows == "prompts" else word
    times = f"about {plural(sample.n_times, 'time')}, {100 * sample.share:.0f} % of the run"
    if sample.is_all:
        row("validation", f"all of {plural(sample.n_held_out, word)} held out, {times}")
        return
    said = f"a sample of {sample.n_read:,} of {plural(sample.n_held_out, word)} held out, spread"
    asked = "" if trainer.config.val_windows else " (--val-windows for more)"
    row("validation", f"{said} over all; {times}{asked}")
    row("", "± is where the loss of all of them lies with 95 % confidence")


def _n_noted(corpus: Corpus, note: str) -> int:
    return sum(file.notes[note][0] for file in corpus.files if note in file.notes)
