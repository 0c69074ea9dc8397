"""Preference rows → which of its two answers a model prefers, by what is learned of each.

measure     the chosen answer has the greater
acc         log-probability
acc_token   mean log-probability of its tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.lora.data import Encoding
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.data.records.rows import PreferenceRow
from pyggml.lora.data.tokens.documents import Document
from pyggml.lora.data.windows.answers import documents_of
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.passes import Continuation, Hear, log_probs, unheard
from pyggml.model import Model


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """What follows a prompt, and which of its tokens count."""

    scored: Continuation
    counts: np.ndarray


Pair = tuple[Tail, Tail]  # chosen and rejected


def encode_pairs(
    rows: Sequence[PreferenceRow], model: Model, encoding: Encoding, most: int, cut: bool
) -> list[Pair]:
    """The tokens of each pair, at most `most` that are read; cut: of a longer one the beginning is
    left out, else it is refused. Raises DataError for those that cannot be read, by place."""

    def pair(row: PreferenceRow) -> Pair:
        both = documents_of(row, model.tokenizer, encoding)
        n_cut = _n_cut(both, most, cut)
        chosen, rejected = (_tail(document, n_cut) for document in both)
        return chosen, rejected

    return map_rows(rows, pair)


def _n_cut(both: Sequence[Document], most: int, cut: bool) -> int:
    """Tokens that are left out at the beginning of both answers."""
    longest = max(map(len, both)) - 1
    if longest > most and not cut:
        raise BadValue(
            f"has {longest} tokens to be read, wanted at most {most}: --long cut leaves out the "
            "beginning"
        )
    n_cut = max(longest - most, 0)
    if n_cut and n_cut >= min(_first(document) for document in both):
        raise BadValue(f"has an answer that does not fit into the {most} tokens to be read")
    return n_cut


def _first(document: Document) -> int:
    """The first token that counts; the very first one is predicted after no other."""
    assert document.trained is not None
    counts = np.flatnonzero(document.trained[1:])
    if not len(counts):
        raise BadValue("has an answer without a token that counts")
    return int(counts[0]) + 1


def _tail(document: Document, n_cut: int) -> Tail:
    assert document.trained is not None
    first = _first(document)
    ids = tuple(int(i) for i in document.ids[n_cut:])
    return Tail(Continuation(ids, first - n_cut), np.asarray(document.trained[first:]))


def prefer(model: Model, pairs: Sequence[Pair], report: Hear = unheard) -> Answers:
    """Which answers a model prefers."""
    tails = [tail for pair in pairs for tail in pair]
    scores = log_probs(model, [tail.scored for tail in tails], report)
    counted = [s[tail.counts] for s, tail in zip(scores, tails, strict=True)]
    sums = np.array([s.sum() for s in counted]).reshape(-1, 2)
    means = np.array([s.mean() for s in counted]).reshape(-1, 2)
    right = {name: by[:, 0] > by[:, 1] for name, by in (("acc", sums), ("acc_token", means))}
    return Answers([*sums], [*means], right)
