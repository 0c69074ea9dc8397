"""What a run says of its rows before it begins: what was added to them and what was left out."""

from pyggml.cli.terminal.show import plural, printable, row
from pyggml.lora import Corpus
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


def _n_noted(corpus: Corpus, note: str) -> int:
    return sum(file.notes[note][0] for file in corpus.files if note in file.notes)
