"""Rows of texts that belong together → how near a model puts them, among all texts of the file.

measure    the positive of an anchor is
nearest    the nearest of all positives and negatives of the file, but copies of the anchor
of_10      among the ten nearest
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.chat.messages import BadValue
from pyggml.lora.data import Encoding
from pyggml.lora.data.reading.files import map_rows
from pyggml.lora.data.records.rows import GroupRow
from pyggml.lora.data.tokens.long_text import whole
from pyggml.lora.evaluate.choices import Answers
from pyggml.lora.evaluate.passes import Hear, unheard
from pyggml.model import Model

_AT_ONCE = 256  # texts between two reports


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NearestAnswers(Answers):
    """`log_probs` are the cosines of each anchor and its positive; ranks (n,) int64 from 1."""

    ranks: np.ndarray

    @property
    def reciprocal(self) -> float:
        """The mean of 1 / rank (MRR)."""
        return float(np.mean(1 / self.ranks))


def find_nearest(
    model: Model,
    rows: Sequence[GroupRow],
    encoding: Encoding,
    most: int,
    cut: bool,
    report: Hear = unheard,
) -> NearestAnswers:
    """Where the positive of each row lies among the texts that are nearest to its anchor, by the
    cosines of vectors that are pooled as the model's adapter learned, or its file says.

    Texts have at most so many tokens; cut: of a longer one the end is left out. Raises DataError
    for texts that are too long, by place.
    """

    def tokens(text: str) -> list[int]:
        ids = whole(text, model.tokenizer, encoding.parses(plain=False))
        if len(ids) > most and not cut:
            raise BadValue(f"has {len(ids)} tokens, wanted at most {most}: --long cut cuts texts")
        return ids[:most]

    def ids_of(row: GroupRow) -> list[list[int]]:
        return [tokens(text) for text in (row.anchor, row.positive, *row.negatives)]

    numbers = dict[tuple[int, ...], int]()
    of_rows = [
        [numbers.setdefault(tuple(ids), len(numbers)) for ids in texts]
        for texts in map_rows(rows, ids_of)
    ]
    vectors = _unit_vectors(model, [*numbers], report)
    asked, right = (np.array([texts[i] for texts in of_rows]) for i in (0, 1))
    candidates = np.unique([number for texts in of_rows for number in texts[1:]])
    cosines = vectors[asked] @ vectors[candidates].T
    own = np.take_along_axis(cosines, np.searchsorted(candidates, right)[:, None], axis=1)
    nearer = (cosines > own) & (candidates != asked[:, None])
    ranks = 1 + nearer.sum(axis=1)
    measures = {"nearest": ranks == 1, "of_10": ranks <= 10}
    return NearestAnswers([*own], [*own], measures, ranks=ranks)


def _unit_vectors(model: Model, texts: Sequence[Sequence[int]], report: Hear) -> np.ndarray:
    """Vectors (n, n_embd) of length 1."""
    embedder, vectors = model.embedder(), list[np.ndarray]()
    n = -(-len(texts) // _AT_ONCE)
    for i in range(n):
        vectors += embedder(texts[i * _AT_ONCE : (i + 1) * _AT_ONCE])
        report(i + 1, n)
    return np.stack(vectors)
