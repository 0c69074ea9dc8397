"""Rows of texts and labels → the class that a model takes each text for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.errors import DataError, first_names
from pyggml.look.confusion import Confusion
from pyggml.lora.data import Encoding
from pyggml.lora.data.classes import encode_class
from pyggml.lora.data.labels import Labels
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.data.records.rows import ClassRow
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.passes import Continuation, Hear, log_probs, unheard
from pyggml.model import Model
from pyggml.models.stack import LABELS, FilePairs
from pyggml.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClassAnswers(Answers):
    """`log_probs` of each text are those of the labels' tokens; `answers` the texts' classes."""

    labels: Labels
    answers: np.ndarray

    @property
    def confusion(self) -> Confusion:
        guesses = np.array([p.argmax() for p in self.log_probs], np.int64)
        return Confusion.of(self.answers, guesses, len(self.labels))


def labels_of(models: Iterable[Model]) -> Labels | None:
    """The labels that an adapter of one of these models was trained with, or the model; None if
    none was. Raises DataError for a file that does not hold labels where it says so."""
    for model in models:
        of_files = [(p.name, p.labels) for p in model.adapters[::-1] if isinstance(p, FilePairs)]
        for name, text in (*of_files, (model.file.path, model.file.get(LABELS))):
            if text is None:
                continue
            try:
                return Labels.read(text, model.config.n_vocab)
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
    return None


def labels_in(rows: Sequence[ClassRow], tokenizer: Tokenizer) -> Labels:
    """The labels that these rows would be trained with."""
    names = {row.label for row in rows}
    words = {n: tuple(tokenizer.encode(f" {n}", add_special=False)) for n in names}
    return Labels.choose(words, tokenizer)


def classify(
    model: Model,
    rows: Sequence[ClassRow],
    labels: Labels,
    encoding: Encoding,
    most: int,
    cut: bool,
    report: Hear = unheard,
) -> ClassAnswers:
    """The classes that a model takes texts for, of at most so many tokens; cut: of a longer text
    the end is left out.

    Raises DataError for rows of other labels, and for texts that are too long, by place.
    """

    def ids(row: ClassRow) -> tuple[int, ...]:
        if row.label not in labels.tokens:
            names = first_names(labels.names, 10)
            raise BadValue(f"has the label {row.label[:40]!r}, wanted one of {names}")
        document = encode_class(row, model.tokenizer, encoding)
        assert document.trained is not None
        text = tuple(document.ids[: int(np.argmax(document.trained))])
        if len(text) > most and not cut:
            raise BadValue(f"has {len(text)} tokens, wanted at most {most}: --long cut cuts texts")
        return text[:most]

    texts = map_rows(rows, ids)
    tokens = labels.tokens.values()
    asked = [Continuation((*text, token), len(text)) for text in texts for token in tokens]
    scores = np.concatenate(log_probs(model, asked, report)).reshape(-1, len(labels))
    answers = np.array([labels.names.index(row.label) for row in rows])
    right = {"acc": scores.argmax(axis=1) == answers}
    return ClassAnswers([*scores], [*scores], right, labels=labels, answers=answers)
