"""Token windows → batches.

A window is ctx + 1 tokens: ctx inputs, each with its next token as target; windows do not overlap.
Documents lie one after the other in the windows, but no token attends to another document or is its
target. A batch is windows one after the other in one row of tokens; `span` keeps them apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from pyggml.graph.arrays import write
from pyggml.lora.data.reading.sources import FileSummary
from pyggml.lora.data.tokens.spill import BLOCK, blocks
from pyggml.models import Inputs
from pyggml.models.texts import both_ways

B = TypeVar("B", bound="WindowBatch")


@dataclass(frozen=True, slots=True, eq=False)
class WindowBatch:
    """T = windows · ctx tokens as `pyggml.models.Inputs` wants them.

    tokens, positions, targets (T,) int32, span (T, 2) int32; weights (T,) float32 are 1 / number of
    trained tokens of the whole step (a token's weight / the sum of all), or 0 where the next token
    is none of this document. length (T,) float32: of each token's document the tokens that have a
    next one in the window, as many as a pass over that document alone has.
    """

    tokens: np.ndarray
    positions: np.ndarray
    span: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    length: np.ndarray

    @property
    def weight(self) -> float:
        """How much the batch counts in its step."""
        return float(self.weights.sum(dtype=np.float64))

    def fill(self, inputs: Inputs) -> None:
        """Give it to a graph of as many tokens."""
        for name in ("tokens", "positions", "length"):
            write(getattr(inputs, name), getattr(self, name))
        write(inputs.span, self.span if inputs.causal else both_ways(self.span))

    def to_batch_of(self, kind: type[B], **more: Any) -> B:
        """The same tokens as a batch of another kind, with what that has besides."""
        return kind(**{name: getattr(self, name) for name in WindowBatch.__slots__} | more)


@dataclass(frozen=True, slots=True, eq=False)
class Dataset:
    """Windows: `tokens`, and the number of each token's document; both (n, ctx + 1) int32.

    A window that is not full ends in documents of one token, which have no target.

    trained   (n, ctx + 1) bool, whether each token is learned as a target; None: all are; float32
              0 to 1 where some weigh less than others in the loss
    repeats   (n,) float64, how often an epoch reads each window, see `order`; None: once
    lengths   (n,) int64, the first tokens of a window that are computed: no target is behind them;
              None: all
    """

    tokens: np.ndarray
    documents: np.ndarray
    trained: np.ndarray | None = None
    repeats: np.ndarray | None = None
    lengths: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_read(self) -> int:
        """The number of windows that each epoch reads."""
        return len(self) if self.repeats is None else len(self.order(0, 0))

    @property
    def ctx(self) -> int:
        return int(self.tokens.shape[1]) - 1

    def part(self, which: slice | np.ndarray) -> Self:
        """Some of the windows, with what each has."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        arrays = {n: value[which] for n, value in own.items() if isinstance(value, np.ndarray)}
        return type(self)(**arrays)

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """All that the windows are, for a digest."""
        return self.tokens, self.documents, self.trained, self.repeats, self.lengths

    def targets(self) -> np.ndarray:
        """(n, ctx) bool: where the next token is of the same document, and learned."""
        same = np.asarray(self.documents[:, 1:] == self.documents[:, :-1])
        return same if self.trained is None else same & (self.trained[:, 1:] != 0)

    def shares(self) -> np.ndarray:
        """(n, ctx) how much each target weighs: bool, or float32 where some weigh less."""
        targets = self.targets()
        if self.trained is None or self.trained.dtype == np.bool_:
            return targets
        return np.asarray(targets * self.trained[:, 1:])

    def n_targets(self, windows: Sequence[int] | np.ndarray | None = None) -> int:
        """Trained tokens of these windows, or of all."""
        if windows is None:
            return sum(int(np.count_nonzero(part.targets())) for part in self.blocks())
        return int(np.count_nonzero(self.part(np.asarray(windows, np.int64)).targets()))

    def blocks(self) -> Iterator[Dataset]:
        """All windows, part by part, as views: for passes over more than fits in memory."""
        n = max(BLOCK // (self.ctx + 1), 1)
        for first in range(0, len(self), n):
            yield self.part(slice(first, first + n))

    def n_computed(self, windows: Sequence[int] | np.ndarray | None = None) -> int:
        """How many tokens a pass over these windows, or over all, computes; padding counts."""
        n = len(self) if windows is None else len(windows)
        if self.lengths is None:
            return n * self.ctx
        return int((self.lengths if windows is None else self.lengths[windows]).sum())

    def order(self, seed: int, epoch: int, step: int = 1) -> np.ndarray:
        """The windows in the order in which this epoch reads them, a function of nothing else.

        step: windows that are read together. If windows differ in length, those of a step are about
        as long as each other; the steps come in any order. What is left of an epoch, less than a
        step, is of any length, and last.

        A window of 2.25 repeats is read twice, and once more in every fourth epoch: of all windows
        with as many repeats each epoch reads the next quarter, at least one.
        """
        rng = np.random.default_rng([seed, epoch])
        shuffled = rng.permutation(len(self) if self.repeats is None else self._read(seed, epoch))
        if self.lengths is None:
            return shuffled
        whole, rest = np.split(shuffled, [len(shuffled) // step * step])
        by_length = whole[np.argsort(self.lengths[whole], kind="stable")]
        return np.concatenate([rng.permutation(by_length.reshape(-1, step)).reshape(-1), rest])

    def _read(self, seed: int, epoch: int) -> np.ndarray:
        """The windows that an epoch reads, each as often as `repeats` says."""
        assert self.repeats is not None
        read = []
        for i, repeats in enumerate(np.unique(self.repeats)):
            windows, whole = np.flatnonzero(self.repeats == repeats), int(repeats)
            read.append(np.repeat(windows, whole))
            if repeats > whole:
                n = max(round(float(repeats - whole) * len(windows)), 1)
                turns = np.random.default_rng([seed, 0, i]).permutation(windows)
                read.append(turns[(epoch * n + np.arange(n)) % len(turns)])
        return np.concatenate(read)

    def batches(
        self, windows: Sequence[int] | np.ndarray, size: int, which: range | None = None
    ) -> Iterator[WindowBatch]:
        """The batches of one step over these windows, `size` in each; the last is filled up. Those
        whose number is not in `which` have no tokens.

        A window that only fills up has weight 0 throughout. Where windows have lengths, they are
        taken from the shortest to the longest, and a batch is as long as its longest.
        """
        shares = self.part(np.asarray(windows, np.int64)).shares()
        is_count = shares.dtype == np.bool_
        total = max(int(np.count_nonzero(shares)), 1) if is_count else shares.sum(dtype=np.float64)
        for i, group in enumerate(self.batch_windows(windows, size)):
            yield self._batch(group, size, total) if which is None or i in which else _NO_TOKENS

    def batch_windows(self, windows: Sequence[int] | np.ndarray, size: int) -> list[np.ndarray]:
        """The windows in each of these batches."""
        order = np.asarray(windows, np.int64)
        if self.lengths is not None:
            order = order[np.argsort(self.lengths[order], kind="stable")]
        return [order[first : first + size] for first in range(0, len(order), size)]

    def _batch(self, windows: Sequence[int] | np.ndarray, size: int, total: float) -> WindowBatch:
        part = self.part(np.asarray(windows, np.int64))
        ctx = self.ctx if part.lengths is None else int(part.lengths.max())
        tokens = np.zeros((size, ctx + 1), np.int32)
        documents = np.tile(no_documents(ctx + 1), (size, 1))
        weights = np.zeros((size, ctx), np.float32)
        tokens[: len(windows)] = part.tokens[:, : ctx + 1]
        documents[: len(windows)] = part.documents[:, : ctx + 1]
        weights[: len(windows)] = part.shares()[:, :ctx] / np.float32(total)
        column = np.arange(ctx, dtype=np.int32)
        is_first = np.diff(documents[:, :-1], axis=1, prepend=documents[:, :1] - 1) != 0
        start = np.maximum.accumulate(np.where(is_first, column, 0), axis=1)
        is_last = np.diff(documents, axis=1) != 0
        ends = np.where(is_last, column, np.int32(ctx))[:, ::-1]
        length = np.minimum.accumulate(ends, axis=1)[:, ::-1] - start
        row = np.arange(size, dtype=np.int32)[:, None] * ctx
        span = np.stack([row + start, np.broadcast_to(row + column + 1, start.shape)], axis=-1)
        return WindowBatch(
            tokens=tokens[:, :-1].reshape(-1),
            positions=(column - start).reshape(-1).astype(np.int32),
            span=span.reshape(-1, 2).astype(np.int32),
            targets=tokens[:, 1:].reshape(-1),
            weights=weights.reshape(-1),
            length=length.reshape(-1).astype(np.float32),
        )


_NO_TOKENS = WindowBatch(*6 * [np.empty(0)])


@dataclass(frozen=True, slots=True)
class FileWindows:
    """The windows of one file, those to train on and those held out."""

    train: Dataset
    validation: Dataset
    summary: FileSummary


READS = "reads"  # a key of `Corpus.about`: rows of texts that no answers are learned of


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Windows to train on, windows held out (None if there are none), and what each file held.

    left_out   files of folders that were not read, each with the reason
    about      the settings that made them, which a resumed run must share
    """

    train: Dataset
    validation: Dataset | None
    files: tuple[FileSummary, ...] = ()
    left_out: tuple[tuple[Path, str], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[Dataset]:
        """The windows to train on, and those held out if there are any."""
        return [part for part in (self.train, self.validation) if part is not None]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths in which windows are computed, ascending."""
        of_parts = [[p.ctx] if p.lengths is None else p.lengths for p in self.parts]
        return tuple(np.unique(np.concatenate(of_parts)).tolist())

    @property
    def n_documents(self) -> int:
        return sum(f.n_documents for f in self.files)

    @property
    def n_held_out(self) -> int:
        """How many documents are held out; of a text that is cut, windows are."""
        return sum(f.n_held_out for f in self.files)

    @property
    def kind(self) -> str:
        """The format of the files; "" if there are several."""
        kinds = {f.kind for f in self.files}
        return kinds.pop() if len(kinds) == 1 else ""

    def digest(self) -> str:
        """SHA-256 of every window: two runs with the same digest read the same numbers."""
        digest = hashlib.sha256()
        for part in self.parts:
            for array in part.arrays:
                if array is not None:
                    digest.update(repr(array.shape).encode())
                    for block in blocks(array):
                        digest.update(block.tobytes())
        return digest.hexdigest()


def no_documents(n: int) -> np.ndarray:
    """Numbers of n documents of one token each, all different; they fill up a window."""
    return -1 - np.arange(n, dtype=np.int32)
