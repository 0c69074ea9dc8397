"""A report on the rows of a run before it trains: what is there twice, in training and validation
both, empty or cut, how long rows are, and in which scripts they are written.

row             a part of a document in one window; of plain text, a window
duplicate       a row of the same tokens as an earlier one
near duplicate  one that shares four in five of its sequences of five tokens with an earlier one, by
                MinHash (Broder 1997): 32 hashes, compared where 4 of them agree in one of 8 bands.
                Sequences that more than a fifth of all rows have, as a system message, do not count
empty           an answer of which nothing but its end is learned
cut             an answer whose last token ends no turn
script          that of most letters of a row, by the names of characters in Unicode; languages of
                one script are not told apart
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pyggml.lora.data.encode import TEXT
from pyggml.lora.data.units import Units
from pyggml.lora.data.windows import Corpus, Dataset
from pyggml.tokenizer import Tokenizer

MOST = 5_000  # rows that are looked at, spread over all
_READ = 500  # of these, that are read for their script
_SHOWN, _SHOWN_TOKENS = 3, 24  # examples of a finding, and tokens of each
_GRAM, _HASHES, _BANDS, _ALIKE = 5, 32, 8, 0.8
_COMMON = 0.2  # share of rows from which on a sequence is boilerplate
_TOKENS = 32  # of a row that are looked at for its script


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about some rows: what, how many, and how the first few of them begin."""

    what: str
    n: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataReport:
    """What is found in the rows of a run.

    n_rows, n_held_out   rows to train on, and held out
    n_read               rows of both that were looked at, spread over all
    lengths, answers     tokens of the shortest row, the median, the 90 % quantile and the longest,
                         and the same of learned ones
    scripts              share of the rows by their script, the most frequent first
    findings             what may be wrong, nothing if all is well
    """

    n_rows: int
    n_held_out: int
    n_read: int
    lengths: tuple[int, ...]
    answers: tuple[int, ...]
    scripts: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    ids: np.ndarray
    learned: np.ndarray
    is_held_out: bool


@lru_cache(maxsize=1)  # it is printed, and recorded
def data_report(corpus: Corpus, tokenizer: Tokenizer) -> DataReport:
    """The report on the windows of a corpus."""
    parts = [(corpus.train, False)]
    parts += [] if corpus.validation is None else [(corpus.validation, True)]
    units = [Units.of(data) for data, _ in parts]
    n_all = sum(map(len, units))
    rows = [
        row
        for (data, is_held_out), some in zip(parts, units, strict=True)
        for row in _rows(data, some, is_held_out, MOST * len(some) // max(n_all, MOST) or len(some))
    ]
    said = _Findings(rows, tokenizer)
    said.repeats(nearly=corpus.kind != "text")
    if corpus.kind != "text":
        said.answers(whole=not any(TEXT in file.notes for file in corpus.files))
    scripts = said.scripts()
    return DataReport(
        *(len(units[0]), len(units[1]) if len(units) > 1 else 0, len(rows)),
        _quantiles([len(row.ids) for row in rows]),
        _quantiles([int(row.learned.sum()) for row in rows]),
        scripts,
        tuple(said.found),
    )


def _rows(data: Dataset, units: Units, is_held_out: bool, n: int) -> Iterator[_Row]:
    for i in units.spread(n):
        yield _Row(*units.tokens(data, int(i)), is_held_out)


def _quantiles(values: Sequence[int]) -> tuple[int, ...]:
    """The least, the median, the 90 % quantile and the greatest; none of no values."""
    if not values:
        return ()
    return tuple(int(v) for v in np.quantile(values, (0, 0.5, 0.9, 1), method="nearest"))


class _Findings:
    """What is said of some rows."""

    def __init__(self, rows: Sequence[_Row], tokenizer: Tokenizer) -> None:
        self._rows, self._tokenizer = rows, tokenizer
        self.found: list[Finding] = []

    def _add(self, what: str, which: Sequence[int] | np.ndarray) -> None:
        if len(which):
            first = (self._rows[i].ids[:_SHOWN_TOKENS] for i in which[:_SHOWN])
            shown = tuple(" ".join(self._tokenizer.decode(ids).split()) for ids in first)
            self.found.append(Finding(what, len(which), shown))

    def repeats(self, nearly: bool) -> None:
        """Rows that stand there twice, or nearly so, and those held out that are trained on."""
        first, seen = np.arange(len(self._rows)), dict[bytes, int]()
        for i, row in enumerate(self._rows):
            first[i] = seen.setdefault(row.ids.tobytes(), i)
        near = _nearest([row.ids for row in self._rows]) if nearly else first
        again, alike = first < np.arange(len(first)), near < np.arange(len(near))
        both = np.array([row.is_held_out for row in self._rows], np.bool_)
        across = both & ~both[first], both & ~both[near]
        names = "repeating an earlier one", "nearly repeating an earlier one"
        self._add(names[0], np.flatnonzero(again & ~across[0]))
        self._add(names[1], np.flatnonzero(alike & ~again & ~across[1]))
        self._add("held out and trained on too", np.flatnonzero(across[0]))
        self._add(
            "held out, and nearly the same as one trained on",
            np.flatnonzero(across[1] & ~across[0] & ~again),
        )

    def answers(self, whole: bool) -> None:
        """Answers that are empty, and those that nothing ends. whole: no row is a text."""
        ends = [self._tokenizer.is_eog(int(row.ids[-1])) for row in self._rows]
        if whole:
            empty = [i for i, row in enumerate(self._rows) if ends[i] and row.learned.sum() < 2]
            self._add("with an empty answer", empty)
        cut = [i for i, row in enumerate(self._rows) if not ends[i] and row.learned[-1]]
        self._add("whose answer ends in no token that ends a turn", cut)

    def scripts(self) -> tuple[tuple[str, float], ...]:
        """The share of rows in each script, of some that are spread over all."""
        n = min(len(self._rows), _READ)
        which = [i * len(self._rows) // n for i in range(n)]
        texts = (self._tokenizer.decode(self._rows[i].ids[:_TOKENS]) for i in which)
        scripts = [_script(text) for text in texts]
        counts = Counter(script for script in scripts if script)
        usual = {script for script, n in counts.items() if n > len(scripts) / 20}
        each = zip(which, scripts, strict=True)
        rare = [i for i, script in each if script and script not in usual]
        self._add("in a script that few rows have", rare if usual else [])
        whole = max(counts.total(), 1)
        return tuple((script, round(n / whole, 4)) for script, n in counts.most_common())


@lru_cache(maxsize=1 << 12)
def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "").split(" ", 1)[0]


def _script(text: str) -> str:
    """The script of most letters, such as Latin; "" without letters."""
    names = Counter(_script_of(c) for c in text if c.isalpha())
    return names.most_common(1)[0][0].capitalize() if names else ""


# -- near duplicates ----------------------------------------------------------------------------


def _nearest(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(n,): for each row the first that is nearly the same, itself if none is."""
    grams = [_grams(ids) for ids in rows]
    every = np.concatenate([*grams, np.zeros(0, np.uint64)])
    names, counts = np.unique(every, return_counts=True)
    common = names[counts > max(_COMMON * len(rows), 2 * _SHOWN)]
    rng = np.random.default_rng(0)
    factors = rng.integers(1, 1 << 63, (_HASHES, 1), np.uint64) | np.uint64(1)
    marks = np.zeros((len(rows), _HASHES), np.uint64)
    for i, gram in enumerate(grams):
        own = gram[~np.isin(gram, common)]
        marks[i] = _mix(own[None] * factors).min(axis=1) if len(own) else i
    nearest = np.arange(len(rows))
    for band in np.split(marks, _BANDS, axis=1):
        seen: dict[bytes, int] = {}
        for i, key in enumerate(map(bytes, np.ascontiguousarray(band))):
            j = seen.setdefault(key, i)
            if j < nearest[i] and (marks[i] == marks[j]).mean() >= _ALIKE:
                nearest[i] = j
    return nearest


def _grams(ids: np.ndarray) -> np.ndarray:
    """The hashes of a row's sequences of tokens, each once."""
    n = max(len(ids) - _GRAM + 1, 1)
    whole = np.full(n, len(ids) if len(ids) < _GRAM else 0, np.uint64)
    for k in range(min(_GRAM, len(ids))):
        whole = _mix(whole * np.uint64(0x9E3779B97F4A7C15) + ids[k : k + n].astype(np.uint64))
    return np.unique(whole)


def _mix(x: np.ndarray) -> np.ndarray:
    """Every bit of a number depends on all of its bits (splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
