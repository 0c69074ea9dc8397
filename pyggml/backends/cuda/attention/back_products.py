"""Products of attention's backward pass, by four warps together (group_ptx.py) or by each warp."""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    add_product,
    clear,
    held_at,
    readers,
    sums_adder,
)
from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda

BR = BC = 64  # queries of a block that makes dq, keys of one that makes dk and dv


def step_of(in_groups: bool) -> int:
    """Rows of the other side that a block takes at a time."""
    return 64 if in_groups else 32


@cache
def _products_of_groups(head_size: int) -> tuple[Any, Any]:
    """(two_by_row, scores) as `_products` has them; A and A' lie first in the tile."""
    at_too = 2 * BR * head_size
    by_rows = group_ptx.by_rows(step_of(in_groups=True), head_size, 2)

    @device
    def two_by_row(s, held, dp, held_too, tile, right, right_too):
        by_rows((s, dp), tile, (0, at_too), (right, right_too))

    @device
    def scores(s, dp, tile, at_values, right, right_too):
        by_rows((s, dp), tile, (0, at_values), (right, right_too))

    return two_by_row, scores


@cache
def _products(head_size: int) -> tuple[Any, Any]:
    """(two_by_row, scores): s = A·Bᵀ and dp = A'·B'ᵀ in turns, so that sums which wait for nothing
    of each other follow each other. Of the first, A and A' are in registers; of the second K and V,
    of which a warp has 16 rows, and B and B' are queries and their gradients."""
    (left, right, _), n = readers(head_size), step_of(in_groups=False)

    @device
    def add_both(s, dp, a, a_too, tile, at, at_too, c):
        for j in range(n // 16):
            b, b_too = right(tile, at, 16 * j, c), right(tile, at_too, 16 * j, c)
            add_product(s, 2 * j, a, b[0], b[1])
            add_product(s, 2 * j + 1, a, b[2], b[3])
            add_product(dp, 2 * j, a_too, b_too[0], b_too[1])
            add_product(dp, 2 * j + 1, a_too, b_too[2], b_too[3])

    @device
    def two_by_row(s, held, dp, held_too, tile, at, at_too):
        clear(s, n // 8)
        clear(dp, n // 8)
        for c in range(head_size // 16):
            add_both(s, dp, held_at(held, c), held_at(held_too, c), tile, at, at_too, c)

    @device
    def scores(s, dp, tile, at_values, at_queries, at_gradients):
        clear(s, n // 8)
        clear(dp, n // 8)
        row = 16 * (cuda.threadIdx.x >> 5)
        for c in range(head_size // 16):
            a, a_too = left(tile, 0, row, c), left(tile, at_values, row, c)
            add_both(s, dp, a, a_too, tile, at_queries, at_gradients, c)

    return two_by_row, scores


def products_by(head_size: int, in_groups: bool) -> tuple[Any, ...]:
    """(two_by_row, scores, add_rows), and what waits for their factors."""
    two, source = (_products_of_groups, group_ptx) if in_groups else (_products, ptx)
    add_rows = sums_adder(head_size, step_of(in_groups), in_groups)
    return *two(head_size), add_rows, source.await_copies


@device
def write_rows(out, sums, row, n_rows, head, n_heads, head_size, put, first):
    """The lane's numbers of rows `row` and `row` + 8, of a matrix that begins at row `first`."""
    for r in range(2):
        if row + 8 * r < n_rows:
            at = (np.int64(first + row + 8 * r) * n_heads + head) * head_size
            at += (cuda.threadIdx.x & 3) << 1
            for i in range(head_size // 8):
                put(out, at + 8 * i, sums[i, 2 * r], sums[i, 2 * r + 1])
