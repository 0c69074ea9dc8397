"""Passages: a text of any length in pieces that a model reads, and their activations by name.

windows_of      a text → windows of token ids
activations_of  windows → the activations of each
activation_rows a text → so many rows of activations, to train on

A text is token ids (T,), a string that is the text itself, or the Path of a file, which is read
piece by piece.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pyggml.errors import ConfigError, DataError, NotFiniteError, cause_of
from pyggml.files import open_regular
from pyggml.graph import Graph
from pyggml.lab.linear import exact
from pyggml.look.control import AFTER_FIRST
from pyggml.model import Model
from pyggml.models import Inputs, Taps, build
from pyggml.models.batch_rows import BatchRows
from pyggml.models.taps import check_names
from pyggml.models.texts import Ids, fill
from pyggml.runtime import Program, bind, schedule

Text = Ids | str | Path
Passage = tuple[np.ndarray, dict[str, np.ndarray]]
_Pass = tuple[Inputs, Taps, Program]
_PIECE = 1 << 16  # bytes of a file that are tokenised at a time
_PASS = 512  # tokens that are computed at a time, if a window has no more


def windows_of(model: Model, text: Text, n_window: int = 128) -> Iterator[np.ndarray]:
    """The windows of a text one after the other: token ids (n_window,) int32, the last maybe fewer.

    Each window of a string or a file starts with BOS where the vocabulary puts one before a text;
    of ids that are given, none is added. A file is tokenised in pieces that end with a line, so
    that white space there may get other tokens than in the whole.

    Raises ConfigError for a window outside [2, the model's context], DataError for ids outside the
    vocabulary and for files that cannot be read or are no UTF-8.
    """
    if not 2 <= n_window <= model.config.n_ctx:
        raise ConfigError(
            f"n_window is {n_window}, wanted 2 to the {model.config.n_ctx} of the model's context"
        )
    if not isinstance(text, str | Path):
        ids = model.check_tokens(text)
        yield from (ids[i : i + n_window] for i in range(0, len(ids), n_window))
        return
    t, held = model.tokenizer, list[int]()
    before = [t.bos_id] if t.add_bos and t.bos_id is not None else []
    n = n_window - len(before)
    for piece in _pieces(text):
        held += t.encode(piece, add_special=False)
        for _ in range(len(held) // n):
            yield np.array(before + held[:n], np.int32)
            held = held[n:]
    if held:
        yield np.array(before + held, np.int32)


def whole_windows(model: Model, text: Text, n_window: int) -> Iterator[np.ndarray]:
    """Those of `windows_of` that have n_window tokens."""
    return (w for w in windows_of(model, text, n_window) if len(w) == n_window)


def _pieces(text: str | Path) -> Iterator[str]:
    """A string whole; a file in pieces that end with a line, where it has lines."""
    if isinstance(text, str):
        yield text
        return
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    try:
        with open_regular(text) as file:
            while raw := file.read(_PIECE):
                lines, end, rest = (rest + decoder.decode(raw)).rpartition("\n")
                if end:
                    yield lines + end
                elif len(rest) >= _PIECE:
                    yield rest
                    rest = ""
        yield rest + decoder.decode(b"", final=True)
    except OSError as error:
        raise DataError(f"{text}: cannot be read: {cause_of(error)}") from None
    except ValueError as error:  # UnicodeDecodeError, and NUL in a path
        raise DataError(f"{text}: is no text in UTF-8: {error}") from None


def activations_of(model: Model, windows: Iterable[Ids], *patterns: str) -> Iterator[Passage]:
    """(ids (T,), activations (T, …) float32 by name) of each window, with what traces change.

    patterns: of names, with * and ?. Several windows share a pass; products are exact, and no
    logits are computed unless they are among the names. Raises ConfigError for patterns that name
    nothing, DataError for windows that are none or too long, NotFiniteError for activations that
    are no numbers.
    """
    model = exact(model)
    check_names(patterns, model.activations)
    bound: dict[tuple[int, ...], _Pass] = {}
    for texts in _packs_of_windows(model, windows):
        lengths = tuple(map(len, texts))
        if lengths not in bound:
            bound = {lengths: _bind(model, BatchRows(lengths), patterns)}
        inputs, taps, program = bound[lengths]
        fill(inputs, *texts)
        program()
        arrays = {n: BatchRows(lengths).arrays(n, program.read(t)) for n, t in taps.read.items()}
        for i, ids in enumerate(texts):
            own = {name: rows[i] for name, rows in arrays.items()}
            if wrong := [name for name, a in own.items() if not np.isfinite(a).all()]:
                raise NotFiniteError(f"{wrong[0]} holds NaN or infinity, wanted numbers")
            yield ids, own


def _packs_of_windows(model: Model, windows: Iterable[Ids]) -> Iterator[list[np.ndarray]]:
    """Windows in groups that share a pass."""
    held: list[np.ndarray] = []
    for given in windows:
        ids = model.check_tokens(given)
        if len(ids) > model.config.n_ctx:
            raise DataError(
                f"a text of {len(ids)} tokens, wanted at most the {model.config.n_ctx} of the "
                "model's context"
            )
        if held and sum(map(len, held)) + len(ids) > _PASS:
            yield held
            held = []
        held.append(ids)
    if held:
        yield held


def _bind(model: Model, batch: BatchRows, patterns: Sequence[str]) -> _Pass:
    """A program that computes these activations, and nothing behind them."""
    inputs = replace(Inputs.empty(sum(batch.lengths), max(batch.lengths)), batch=batch)
    taps = Taps(patterns, [e for trace in model.traces for e in trace.edits])
    build(model.parts, inputs, model.adapters, taps=taps)
    return inputs, taps, bind(schedule(Graph.of(*taps.read.values()), model.devices), model.release)


def activation_rows(
    model: Model,
    text: Text,
    *names: str,
    n_rows: int,
    n_window: int = 128,
    positions: slice = AFTER_FIRST,
) -> dict[str, np.ndarray]:
    """The first rows of activations of a text, (n_rows, n) float32 by name: those of the tokens at
    `positions` of each window, the first one left out by default.

    They are held in memory: 4 · n_rows · n bytes for each name. Raises DataError for a text that
    has fewer, and what `windows_of` and `activations_of` do.
    """
    if n_rows < 1:
        raise ConfigError(f"n_rows is {n_rows}, wanted 1 or more")
    rows: dict[str, np.ndarray] = {}
    n = 0
    for _, arrays in activations_of(model, windows_of(model, text, n_window), *names):
        for name, a in arrays.items():
            flat = a.reshape(len(a), -1)[positions][: n_rows - n]
            kept = rows.setdefault(name, np.empty((n_rows, flat.shape[1]), np.float32))
            kept[n : n + len(flat)] = flat
        n += len(flat)
        if n == n_rows:
            return rows
    raise DataError(f"the text has {n:,} rows of activations, wanted {n_rows:,}")
