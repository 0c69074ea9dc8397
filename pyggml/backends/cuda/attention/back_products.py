"""Products of attention's backward pass, by four warps together (group_ptx.py) or by each warp."""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.attention.fragments import (
    add_product,
    as_left,
    clear,
    held_at,
    readers,
)
from pyggml.backends.cuda.code import group_ptx, ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.runtime.driver import cuda

BR = BC = 64  # queries of a block that makes dq, keys of one that makes dk and dv


def step_of(in_groups: bool) -> int:
    """Rows of the other side that a block takes at a time."""
    return 64 if in_groups else 32


@cache
def _products_of_groups(head_size: int) -> tuple[Any, Any, Any]:
    """(two_by_row, scores, across_rows) of `_products` and `_key_products`; A and A' lie first in
    the tile."""
    n, at_too = step_of(in_groups=True), 2 * BR * head_size
    by_rows, down_rows = group_ptx.by_rows(n, head_size, 2), group_ptx.down_rows(head_size, n)

    @device
    def two_by_row(s, held, dp, held_too, tile, right, right_too, _):
        by_rows((s, dp), tile, (0, at_too), (right, right_too))

    @device
    def scores(s, dp, tile, at_values, right, right_too):
        by_rows((s, dp), tile, (0, at_values), (right, right_too))

    @device
    def across_rows(sums, p, tile, right, _):
        down_rows(sums, p, tile, right)

    return two_by_row, scores, across_rows


@cache
def _products(head_size: int) -> tuple[Any, Any]:
    """(two_by_row, across_rows): s = A·Bᵀ and dp = A'·B'ᵀ in turns, so that sums which wait for
    nothing of each other follow each other, with A and A' in registers; sums += p·B."""
    _, right, across = readers(head_size)
    steps = head_size // 16

    @device
    def two_by_row(s, held, dp, held_too, tile, at, at_too, n):
        clear(s, n // 8)
        clear(dp, n // 8)
        for c in range(steps):
            a, a_too = held_at(held, c), held_at(held_too, c)
            for j in range(n // 16):
                b, b_too = right(tile, at, 16 * j, c), right(tile, at_too, 16 * j, c)
                add_product(s, 2 * j, a, b[0], b[1])
                add_product(s, 2 * j + 1, a, b[2], b[3])
                add_product(dp, 2 * j, a_too, b_too[0], b_too[1])
                add_product(dp, 2 * j + 1, a_too, b_too[2], b_too[3])

    @device
    def across_rows(sums, p, tile, at, n):
        for j in range(n // 16):
            a = as_left(p, j)
            for c in range(steps):
                b = across(tile, at, 16 * j, c)
                add_product(sums, 2 * c, a, b[0], b[1])
                add_product(sums, 2 * c + 1, a, b[2], b[3])

    return two_by_row, across_rows


def products_by(head_size: int, in_groups: bool) -> tuple[Any, ...]:
    """(two_by_row, scores, across_rows), and what waits for their factors."""
    if in_groups:
        return *_products_of_groups(head_size), group_ptx.await_copies
    two_by_row, across_rows = _products(head_size)
    return two_by_row, _key_products(head_size), across_rows, ptx.await_copies


@device
def write_rows(out, sums, row, n_rows, head, n_heads, head_size, put, first):
    """The lane's numbers of rows `row` and `row` + 8, of a matrix that begins at row `first`."""
    for r in range(2):
        if row + 8 * r < n_rows:
            at = (np.int64(first + row + 8 * r) * n_heads + head) * head_size
            at += (cuda.threadIdx.x & 3) << 1
            for i in range(head_size // 8):
                put(out, at + 8 * i, sums[i, 2 * r], sums[i, 2 * r + 1])


@cache
def _key_products(head_size: int) -> Any:
    (left, right, _), n = readers(head_size), step_of(in_groups=False)

    @device
    def scores(s, dp, tile, at_values, at_queries, at_gradients):
        """s = K·Qᵀ and dp = V·dOᵀ, of the warp's 16 keys and n queries, in turns."""
        clear(s, n // 8)
        clear(dp, n // 8)
        row = 16 * (cuda.threadIdx.x >> 5)
        for c in range(head_size // 16):
            a, a_too = left(tile, 0, row, c), left(tile, at_values, row, c)
            for j in range(n // 16):
                b = right(tile, at_queries, 16 * j, c)
                b_too = right(tile, at_gradients, 16 * j, c)
                add_product(s, 2 * j, a, b[0], b[1])
                add_product(s, 2 * j + 1, a, b[2], b[3])
                add_product(dp, 2 * j, a_too, b_too[0], b_too[1])
                add_product(dp, 2 * j + 1, a_too, b_too[2], b_too[3])

    return scores
