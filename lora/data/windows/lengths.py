"""Lengths of windows that rows do not share: a batch holds no more than its longest window.

Graphs are planned and bound once for each length of a batch, so there are few lengths: those that
leave the least padding of all windows together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from pyggml.errors import DataError
from pyggml.lora.data.records.rows import RowPlace
from pyggml.lora.data.windows.batches import Dataset
from pyggml.sizes import round_up

N_LENGTHS = 4  # at most
_UNITS = 32  # a length is a multiple of so much of a window


def bucket(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The same windows, each with the length in which it is computed; all share few lengths."""
    filled = [_n_inputs(data) for data in datasets]
    lengths = few_lengths(np.concatenate(filled), datasets[0].ctx)
    return [
        replace(data, lengths=lengths[np.searchsorted(lengths, n)])
        for data, n in zip(datasets, filled, strict=True)
    ]


def few_lengths(filled: np.ndarray, ctx: int) -> np.ndarray:
    """At most N_LENGTHS ascending lengths, the last of which holds the longest window.

    filled: (n,) tokens that each window needs, at most ctx
    """
    unit = -(-ctx // _UNITS)
    rounded = np.minimum(round_up(filled, unit), ctx)
    distinct, counts = np.unique(rounded, return_counts=True)
    shorter, longest = distinct[:-1].tolist(), distinct[-1:].tolist()

    def n_computed(chosen: tuple[int, ...]) -> int:
        lengths = np.array([*chosen, *longest])
        return int(counts @ lengths[np.searchsorted(lengths, distinct)])

    choices = combinations(shorter, min(N_LENGTHS - 1, len(shorter)))
    return np.array([*min(choices, key=n_computed), *longest], np.int64)


def _n_inputs(data: Dataset) -> np.ndarray:
    """(n,) inputs of each window up to its last target, at least one."""
    blocks = (block.targets() for block in data.blocks())
    ends = [targets.shape[1] - targets[:, ::-1].argmax(axis=1) for targets in blocks]
    return np.concatenate([np.zeros(0, np.int64), *ends])


def check_lengths(
    lengths: np.ndarray, ctx: int, place: Callable[[int], RowPlace], note: str = ""
) -> None:
    """DataError for a row longer than a window: none is cut silently. lengths (n,): of each."""
    ways = "give a larger --ctx or shorter rows, or --long-chats drop, cut or truncate"
    refuse_longer(lengths, ctx + 1, place, f"those of a window of {ctx}: {ways}", note)


def refuse_longer(
    lengths: np.ndarray, most: int, place: Callable[[int], RowPlace], about: str, note: str = ""
) -> None:
    """DataError for rows of more than so many tokens, which names the longest; about: why no more,
    and what to do then."""
    n_long = np.count_nonzero(lengths > most)
    if n_long:
        i = int(lengths.argmax())
        rest = f", the most of {n_long} that are too long" if n_long > 1 else ""
        raise DataError(
            f"{place(i).file}: {place(i)} has {lengths[i]} tokens{note}{rest}, wanted at most "
            f"{most}, {about}"
        )
