"""Documents → windows, the documents one after the other."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pyggml.lora.data.tokens import spill
from pyggml.lora.data.tokens.documents import Document, Documents
from pyggml.lora.data.windows.batches import Dataset

_INT32 = 1 << 31


def pack(
    documents: Documents | Sequence[Document],
    ctx: int,
    whole: bool = False,
    folder: Path | None = None,
    alone: bool = False,
) -> Dataset:
    """Windows of documents laid one after the other; windows without any target are left out.

    whole    no document goes on in the next window; each has at most ctx + 1 tokens
    alone    no two documents share a window
    folder   the place of arrays too large for memory, see `spill`
    """
    if not isinstance(documents, Documents):
        documents = Documents.of(documents, folder)
    width = ctx + 1
    starts, n = _places(documents.lengths, width, whole, alone)
    masked = documents.trained is not None
    tokens = spill.empty((n,), np.int32, folder)
    owner = spill.empty((n,), np.int32, folder)
    kind = np.bool_ if documents.trained is None else documents.trained.dtype.type
    trained = spill.empty((n,), kind, folder) if masked else None
    for first in range(0, n, spill.BLOCK):
        span = slice(first, min(first + spill.BLOCK, n))
        tokens[span] = 0
        owner[span] = -1 - np.arange(span.start, span.stop) % _INT32
        if trained is not None:
            trained[span] = True
    for which in _runs(documents.lengths):
        source, target, number = _moves(documents, starts, which)
        tokens[target] = documents.ids[source]
        owner[target] = number
        if trained is not None and documents.trained is not None:
            trained[target] = documents.trained[source]
    windows = Dataset(
        tokens.reshape(-1, width),
        owner.reshape(-1, width),
        None if trained is None else trained.reshape(-1, width),
    )
    return _with_targets(windows)


def _places(lengths: np.ndarray, width: int, whole: bool, alone: bool) -> tuple[np.ndarray, int]:
    """The start of each document in the windows, and the number of tokens in the windows."""
    if alone:
        lengths = lengths + -lengths % width
    ends = np.cumsum(lengths)
    starts, n = ends - lengths, int(ends[-1]) if len(ends) else 0
    if whole and not alone:
        n = 0
        for i, length in enumerate(lengths.tolist()):
            room = -n % width or width  # in the window under way
            n += room if length > room else 0
            starts[i] = n
            n += length
    return starts, n + -n % width


def _runs(lengths: np.ndarray) -> Iterator[slice]:
    """Groups of consecutive documents: about a block of tokens each, or one longer document."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = int(ends[first] - lengths[first])
        last = int(np.searchsorted(ends, before + spill.BLOCK, "right"))
        yield slice(first, max(last, first + 1))
        first = max(last, first + 1)


def _moves(
    documents: Documents, starts: np.ndarray, which: slice
) -> tuple[slice | np.ndarray, slice | np.ndarray, np.ndarray | int]:
    """For some documents: where their tokens are, where they go, and each document's number."""
    lengths = documents.lengths[which]
    if len(lengths) == 1:  # it may be all of a large file
        source, target, n = int(documents.starts[which.start]), int(starts[which.start]), lengths[0]
        return slice(source, source + n), slice(target, target + n), which.start
    number = np.repeat(np.arange(len(lengths)), lengths)
    inside = np.arange(len(number)) - (np.cumsum(lengths) - lengths)[number]
    source = documents.starts[which][number] + inside
    return source, starts[which][number] + inside, which.start + number


def _with_targets(windows: Dataset) -> Dataset:
    """The windows with at least one target, moved up in place."""
    kept = 0
    parts = [windows.tokens, windows.documents]
    parts += [] if windows.trained is None else [windows.trained]
    done = 0
    for block in windows.blocks():
        has = np.flatnonzero(block.targets().any(axis=1))
        if kept < done or len(has) < len(block):
            for array in parts:
                array[kept : kept + len(has)] = array[done + has]
        kept, done = kept + len(has), done + len(block)
    return windows.part(slice(kept))


def join(datasets: Sequence[Dataset], folder: Path | None = None) -> Dataset:
    """The windows of several datasets of the same ctx."""
    if len(datasets) == 1:
        return datasets[0]
    n, width = sum(map(len, datasets)), datasets[0].ctx + 1
    masked = any(d.trained is not None for d in datasets)
    tokens = spill.empty((n, width), np.int32, folder)
    owner = spill.empty((n, width), np.int32, folder)
    is_weighted = any(d.trained is not None and d.trained.dtype != np.bool_ for d in datasets)
    kind = np.float32 if is_weighted else np.bool_
    trained = spill.empty((n, width), kind, folder) if masked else None
    repeats = np.ones(n)
    at = 0
    for part in (block for dataset in datasets for block in dataset.blocks()):
        span = slice(at, at + len(part))
        tokens[span], owner[span] = part.tokens, part.documents
        if trained is not None:
            trained[span] = True if part.trained is None else part.trained
        repeats[span] = 1.0 if part.repeats is None else part.repeats
        at += len(part)
    return Dataset(tokens, owner, trained, None if (repeats == 1).all() else repeats)


def held_out(lengths: Sequence[int], share: float, shuffle: bool) -> list[int]:
    """Documents whose tokens come nearest to this share of all, chosen one by one.

    shuffle: in an order that is drawn, the same for as many documents; else from the last to the
    first. They never have more than half of all, so one document at least is left.
    """
    whole, taken, chosen = sum(lengths), 0, list[int]()
    n = len(lengths) if share else 0
    order = np.random.default_rng(n).permutation(n).tolist() if shuffle else reversed(range(n))
    for i in order:
        more = taken + lengths[i]
        if abs(more - share * whole) <= abs(taken - share * whole) and 2 * more <= whole:
            taken = more
            chosen.append(i)
    return chosen
