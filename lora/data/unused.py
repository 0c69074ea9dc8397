"""Settings of the data that would do nothing, but for their defaults: with an objective that
compares answers, or with the rows that were read."""

from collections.abc import Mapping

from pyggml.errors import Fault
from pyggml.lora.config import DataConfig
from pyggml.lora.data.tokens.chats import CHAT
from pyggml.lora.data.tokens.encode import TEXT
from pyggml.lora.data.windows.batches import Corpus

_OF_ANSWERS = {
    "packing": "keeps whole answers together",
    "train_on": "scores the answers alone",
    "end_of_text": "has no rows of text",
}
OF_TEXTS = ("classes", "groups")  # rows of an objective that learns no answers
_ROWS = ("packing", "columns", "skip_bad_rows", "val_shuffle")
_LONG = ("long_chats",)
_CHATS = ("train_on", "chat_template", "chat_template_kwargs", "chat_date")
_TEXTS = ("end_of_text",)


def unused_by_classes(config: DataConfig, objective: str) -> list[Fault]:
    """Those that do nothing where this objective learns of texts as they are."""
    return _faults(
        config, dict.fromkeys((*_CHATS, *_TEXTS), f"{objective} reads texts as they are")
    )


def unused_by_answers(config: DataConfig, objective: str) -> list[Fault]:
    """Those that do nothing where this objective compares answers."""
    return _faults(config, {name: f"{objective} {why}" for name, why in _OF_ANSWERS.items()})


def unused_by_rows(corpus: Corpus, config: DataConfig) -> list[Fault]:
    """Those that do nothing with these files."""
    whys: dict[str, str] = {}
    n_texts = sum(f.notes[TEXT][0] for f in corpus.files if TEXT in f.notes)
    files = [f for f in corpus.files if f.kind != "text"]
    n_rows = sum(f.n_documents + f.n_dropped + f.skipped.total for f in files)
    if not any(CHAT in f.notes for f in corpus.files):
        whys |= dict.fromkeys(_CHATS, "no row is a chat")
    if not n_texts:
        whys |= dict.fromkeys(_TEXTS, "no row is a text")
    if n_texts == n_rows:
        whys |= dict.fromkeys(_LONG, "what is longer than a window goes on in the next")
    if not n_rows:
        whys |= dict.fromkeys(_ROWS, "plain text has no rows")
    return _faults(config, whys)


def _faults(config: DataConfig, whys: Mapping[str, str]) -> list[Fault]:
    usual = DataConfig()
    return [
        (name, f"is {getattr(config, name)}, but {why}: leave it out")
        for name, why in whys.items()
        if getattr(config, name) != getattr(usual, name)
    ]
