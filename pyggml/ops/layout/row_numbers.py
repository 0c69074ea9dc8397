"""The numbers of rows in a table: checked, spread over batches, and shared out to threads."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32, I64
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel
from pyggml.jit.tasks import SHARE, code_for, launch, tuple_stage
from pyggml.ops.expect import check_ids, expect_type


def expect_ids(name: str, ids: Tensor) -> None:
    """Raise ShapeError if ids are of another type than I32 and I64. name: of the op"""
    if ids.dtype is not I64:
        expect_type(name, "ids", ids, I32)


def check_batch(name: str, ids: Tensor, batch: Shape) -> None:
    """Raise ShapeError if the first axes of ids are not those of batches, repeated."""
    first = ids.shape[: len(batch)]
    if len(first) < len(batch) or any(
        i == 0 or n == 0 or n % i for n, i in zip(batch, first, strict=True)
    ):
        raise ShapeError(f"{name}: ids is {ids!r}, whose first axes do not divide {list(batch)}")


def row_numbers(op_name: str, ids: np.ndarray, batch: Shape, n_rows: int) -> np.ndarray:
    """The row of each id, (n,) int64, counted over all batches one after the other."""
    check_ids(op_name, ids, n_rows)
    if not batch:
        return ids.reshape(-1).astype(np.int64)
    counts = [n // i for n, i in zip(batch, ids.shape, strict=False)]
    spread = np.tile(ids, (*counts, *(1,) * (ids.ndim - len(batch)))).reshape(prod(batch), -1)
    return (spread + n_rows * np.arange(len(spread))[:, None]).reshape(-1)


@kernel
def are_rows(numbers, n_rows, rising):
    """Whether all numbers are rows; rising: and in order, none of them twice."""
    before = -1
    for number in numbers:
        if not (before if rising else -1) < number < n_rows:
            return False
        before = number
    return True


def _check_task(arguments, task, thread):
    ids, n_rows, rising, n_shares, word = arguments[0]
    word[0] = n_shares if are_rows(ids, n_rows, rising) else -1


def by_shares(
    task: Callable, values: tuple[Any, ...], n_rows: int, rising: bool, instead: Callable[[], None]
) -> Call:
    """The call of a task that takes a share of some rows. It reads these values, of which the third
    are the rows' numbers, and how many rows a share has.

    instead: what is done if a number is no row or, where that is asked for, they do not rise
    """
    ids, per = values[2], max(1, SHARE // max(1, values[0].shape[1]))
    word = np.zeros(1, np.int64)
    check = ids, n_rows, int(rising), -(-ids.size // per), word
    values = *values, per
    return Call(
        launch,
        tuple_stage(code_for(_check_task, check), check, 1),
        tuple_stage(code_for(task, values), values, word, instead),
    )


def ids_by_batch(ids: np.ndarray, batch: Shape) -> Iterator[tuple[Shape, np.ndarray]]:
    """For the references: (batch, the ids of that batch)."""
    for b in np.ndindex(*batch):
        yield b, ids[tuple(i % n for i, n in zip(b, ids.shape, strict=False))]
