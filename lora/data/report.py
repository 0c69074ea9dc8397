"""A report on the rows of a run before it trains: what is there twice, in training and validation
both, empty or cut, how long rows are, and in which scripts and languages they are written.

row             a part of a document in one window; of plain text, a window
duplicate       a row of the same tokens as an earlier one
near duplicate  one that shares four in five of its sequences of five tokens with an earlier one, by
                MinHash (Broder 1997): 32 hashes, compared where 4 of them agree in one of 8 bands.
                Sequences that more than a fifth of all rows have, as a system message, do not count
empty           an answer of which nothing but its end is learned
cut             an answer whose last token ends no turn, unless it goes on in the next window
script          that of most letters of what a row teaches, by the names of characters in Unicode
language        that of what a row teaches, where it is long enough to tell
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pyggml.lora.data.languages import languages
from pyggml.lora.data.prompts import Prompts
from pyggml.lora.data.tokens.encode import TEXT
from pyggml.lora.data.windows.batches import READS, Corpus, Dataset
from pyggml.lora.data.windows.units import Units, as_words, first_learned
from pyggml.tokenizer import Tokenizer

MOST = 5_000  # rows that are looked at, spread over all
_READ = 500  # of these, that are read for their script and language
_SHOWN, _SHOWN_TOKENS = 3, 24  # examples of a finding, and tokens of each
_GRAM, _HASHES, _BANDS, _ALIKE = 5, 32, 8, 0.8
_COMMON = 0.2  # share of rows from which on a sequence is boilerplate
_TOKENS = 64  # learned ones of a row, that its script and language are told by


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about some rows: what, how many, and what is learned of the first few."""

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
    absent               what was looked for and is in no row
    """

    n_rows: int
    n_held_out: int
    n_read: int
    lengths: tuple[int, ...]
    answers: tuple[int, ...]
    scripts: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """The languages of some rows, spread over all.

    shares     share of these rows by ISO 639 code, the most frequent first
    untold     share of those whose language cannot be told: too short, or no prose
    findings   rows in a language that few have
    """

    shares: tuple[tuple[str, float], ...]
    untold: float
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _ReportRow:
    ids: np.ndarray
    learned: np.ndarray
    is_held_out: bool
    goes_on: bool


@lru_cache(maxsize=1)  # it is printed, and recorded
def data_report(corpus: Corpus, tokenizer: Tokenizer) -> DataReport:
    """The report on the windows of a corpus."""
    rows, units = _sample(corpus, MOST)
    said = _Findings(rows, tokenizer)
    said.repeats(nearly=corpus.kind != "text")
    are_learned = not isinstance(corpus.train, Prompts)
    if corpus.kind != "text" and are_learned and READS not in corpus.about:
        said.answers(whole=not any(TEXT in file.notes for file in corpus.files))
    scripts = said.scripts()
    return DataReport(
        len(units[0]),
        len(units[1]) if len(units) > 1 else 0,
        len(rows),
        _quantiles([len(row.ids) for row in rows]),
        _quantiles([int(row.learned.sum()) for row in rows] * are_learned),
        scripts,
        tuple(finding for finding in said.all if finding.n),
        tuple(finding.what for finding in said.all if not finding.n),
    )


@lru_cache(maxsize=1)
def language_report(corpus: Corpus, tokenizer: Tokenizer) -> LanguageReport:
    """The languages of a corpus. Apart from the report: no first step waits for it."""
    said = _Findings(_sample(corpus, _READ)[0], tokenizer)
    codes = languages(said.texts(range(len(said.rows))))
    counts, n = Counter(code for code in codes if code), max(len(codes), 1)
    said.rare("in a language that few rows have", codes, range(len(codes)))
    return LanguageReport(
        tuple((code, round(count / n, 4)) for code, count in counts.most_common()),
        round(1 - counts.total() / n, 4) if codes else 0.0,
        tuple(finding for finding in said.all if finding.n),
    )


def _sample(corpus: Corpus, most: int) -> tuple[list[_ReportRow], list[Units]]:
    """Rows of both parts of a corpus, spread over all, and all that these parts have."""
    parts = [(corpus.train, False)]
    parts += [] if corpus.validation is None else [(corpus.validation, True)]
    units = [Units.of(data) for data, _ in parts]
    n_all = sum(map(len, units))
    rows = [
        row
        for (data, is_held_out), unit in zip(parts, units, strict=True)
        for row in _rows(data, unit, is_held_out, most * len(unit) // max(n_all, most) or len(unit))
    ]
    return rows, units


def _rows(data: Dataset, units: Units, is_held_out: bool, n: int) -> Iterator[_ReportRow]:
    for i in units.spread(n):
        yield _ReportRow(*units.tokens(data, int(i)), is_held_out, units.goes_on(data, int(i)))


def _quantiles(values: Sequence[int]) -> tuple[int, ...]:
    """The least, the median, the 90 % quantile and the greatest; none of no values."""
    if not values:
        return ()
    return tuple(int(v) for v in np.quantile(values, (0, 0.5, 0.9, 1), method="nearest"))


class _Findings:
    """What is said of some rows."""

    def __init__(self, rows: Sequence[_ReportRow], tokenizer: Tokenizer) -> None:
        self.rows, self._tokenizer = rows, tokenizer
        self.all: list[Finding] = []

    def _add(self, what: str, which: Sequence[int] | np.ndarray) -> None:
        rows_shown = (self.rows[i] for i in which[:_SHOWN])
        first = (first_learned(row.ids, row.learned, _SHOWN_TOKENS) for row in rows_shown)
        shown = tuple(as_words(self._tokenizer.decode(ids)) for ids in first)
        self.all.append(Finding(what, len(which), shown))

    def repeats(self, nearly: bool) -> None:
        """Rows that stand there twice, or nearly so, and those held out that are trained on."""
        first, seen = np.arange(len(self.rows)), dict[bytes, int]()
        for i, row in enumerate(self.rows):
            first[i] = seen.setdefault(row.ids.tobytes(), i)
        near = _nearest([row.ids for row in self.rows]) if nearly else first
        again, alike = first < np.arange(len(first)), near < np.arange(len(near))
        both = np.array([row.is_held_out for row in self.rows], np.bool_)
        across = both & ~both[first], both & ~both[near]
        self._add("repeating an earlier one", np.flatnonzero(again & ~across[0]))
        if nearly:
            which = np.flatnonzero(alike & ~again & ~across[1])
            self._add("nearly repeating an earlier one", which)
        self._add("held out and trained on too", np.flatnonzero(across[0]))
        if nearly:
            which = np.flatnonzero(across[1] & ~across[0] & ~again)
            self._add("held out, and nearly the same as one trained on", which)

    def answers(self, whole: bool) -> None:
        """Answers that are empty, and those that nothing ends. whole: no row is a text."""
        ends = [self._tokenizer.is_eog(int(row.ids[-1])) for row in self.rows]
        if whole:
            empty = [i for i, row in enumerate(self.rows) if ends[i] and row.learned.sum() < 2]
            self._add("with an empty answer", empty)
        ends = [end or row.goes_on for end, row in zip(ends, self.rows, strict=True)]
        cut = [i for i, row in enumerate(self.rows) if not ends[i] and row.learned[-1]]
        self._add("whose answer ends in no token that ends a turn", cut)

    def scripts(self) -> tuple[tuple[str, float], ...]:
        """The share of rows in each script, of some that are spread over all."""
        n = min(len(self.rows), _READ)
        which = [i * len(self.rows) // n for i in range(n)]
        scripts = [_script(text) for text in self.texts(which)]
        self.rare("in a script that few rows have", scripts, which)
        counts = Counter(script for script in scripts if script)
        whole = max(counts.total(), 1)
        return tuple((script, round(n / whole, 4)) for script, n in counts.most_common())

    def texts(self, which: Sequence[int]) -> Iterator[str]:
        """What some rows teach, up to 64 tokens of each; all of a row that teaches nothing."""
        for row in (self.rows[i] for i in which):
            ids = row.ids[row.learned] if row.learned.any() else row.ids
            yield self._tokenizer.decode(ids[:_TOKENS])

    def rare(self, what: str, kinds: Sequence[str], which: Sequence[int]) -> None:
        """Rows of a kind that at most a twentieth of them have; "": of none. Nothing where no kind
        has more."""
        counts = Counter(kind for kind in kinds if kind)
        usual = {kind for kind, n in counts.items() if n > len(kinds) / 20}
        each = zip(which, kinds, strict=True)
        rare = [i for i, kind in each if kind and kind not in usual]
        self._add(what, rare if usual else [])


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
