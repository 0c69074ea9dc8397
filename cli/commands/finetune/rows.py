"""What a run says of its rows before it begins: what was added to them and what was left out."""

from pyggml.cli.terminal.show import plural, printable, row
from pyggml.lora import Corpus, Trainer
from pyggml.lora.data.encode import ENDED, TEXT
from pyggml.tokenizer import Tokenizer


def say_rows(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Print how rows of text end, and which rows are longer than a window."""
    n_texts, n_ended = (_n_noted(corpus, note) for note in (TEXT, ENDED))
    if n_texts and n_ended:
        end = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.eot_id
        name = printable(
            tokenizer.token_bytes(int(end or 0), special=True).decode(errors="replace")
        )
        row("texts", f"{plural(n_ended, 'row')} of text, each ends in {name} once")
    elif n_texts:
        row("texts", f"{plural(n_texts, 'row')} of text, without an end of text")
    for file in corpus.files:
        if file.n_dropped:
            row("", f"{plural(file.n_dropped, 'row')} longer than a window left out")
        if file.n_truncated:
            row("", f"{plural(file.n_truncated, 'row')} longer than a window learned up to its end")


def say_validation(trainer: Trainer) -> None:
    """Print how much of what is held out a validation reads, and why not all."""
    sample = trainer.validation
    if sample is None:
        return
    is_rows = trainer.objective.rows == "training" and trainer.corpus.kind != "text"
    word = "row" if is_rows else "window"
    times = f"about {plural(sample.n_times, 'time')}, {100 * sample.share:.2g} % of the run"
    if sample.is_all:
        row("validation", f"all of {plural(sample.n_held_out, word)} held out, {times}")
        return
    said = f"a sample of {sample.n_read:,} of {plural(sample.n_held_out, word)} held out, spread"
    asked = "" if trainer.config.val_windows else " (--val-windows for more)"
    row("validation", f"{said} over all; {times}{asked}")
    row("", "± is where the loss of all of them lies with 95 % confidence")


def _n_noted(corpus: Corpus, note: str) -> int:
    return sum(file.notes[note][0] for file in corpus.files if note in file.notes)
