"""The gradient of recurrence.py: the tokens backwards, a block for one head or a few.

It needs the state before each token: every √T-th state is kept, and those between are made again.
The gradients of w, k, r, a and b are sums over the rows of a state, made in shared memory; v_i
belongs to one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, lanes_sum
from pyggml.backends.cuda.ops.recurrent.recurrence import (
    A,
    B,
    Factors,
    K,
    R,
    W,
    along,
    clear,
    power,
    steps,
)
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor

_MOST_SHARED = 48 << 10  # bytes of shared memory that every card gives a block
_THREADS = small(256, 4)  # 255 registers each are there


@dataclass(frozen=True)
class StateBlock:
    """(lanes, rows, heads) threads; each holds `columns` of `rows_each` rows of a state."""

    lanes: int
    rows: int
    heads: int
    columns: int
    rows_each: int

    @classmethod
    def of(cls, dv: int, dk: int, n_roles: int, n_alike: int) -> StateBlock:
        """For the gradient. n_alike: a multiple of the heads that a block may have."""
        lanes = min(LANES, power(dk))
        columns = -(-dk // lanes)
        most = max(1, _MOST_SHARED // (4 * n_roles * lanes * columns))
        threads = min(_THREADS, lanes * power(most + 1) // 2)
        rows = min(max(threads // lanes, 1), power(dv))
        heads = 1
        while n_alike % (2 * heads) == 0 and 2 * heads * rows * lanes <= threads // 2:
            heads *= 2
        rows = max(rows, LANES // (lanes * heads))  # a whole warp: all its lanes take part in sums
        return cls(lanes, rows, heads, columns, -(-dv // rows))

    @property
    def threads(self) -> tuple[int, int, int]:
        return self.lanes, self.rows, self.heads


@cache
def _from_result(factors: Factors) -> Any:
    coupled, early = factors.coupled, factors.early

    @device
    def from_result(s, ds, p, f, g, v, d):
        """What y_t gives to r, and of an early op to k and u; returns its share of v's."""
        turned = along(s, p, f, A) if coupled else ZERO
        of_v = ZERO
        for e in range(s.shape[1]):
            if early:
                own = d * f[A, e] * f[R, e]
                g[R, e] += d * (s[p, e] + v * f[A, e] * f[K, e])
                g[K, e] += v * own
                g[A, e] += d * v * f[K, e] * f[R, e]
                of_v += own * f[K, e]
            else:
                g[R, e] += d * (s[p, e] * f[W, e] + turned * f[B, e] + v * f[K, e])
                ds[p, e] += d * f[R, e]
        return of_v

    return from_result


@cache
def _row_back(factors: Factors) -> Any:
    coupled, early = factors.coupled, factors.early
    from_result = _from_result(factors)

    @device
    def back(s, ds, p, f, g, v, d):
        """dS_t -> dS_{t-1} of row p, s is S_{t-1}; adds to g. Returns the gradient of v."""
        of_v = from_result(s, ds, p, f, g, v, d)
        turned, d_turned = ZERO, ZERO
        if coupled:
            turned, d_turned = along(s, p, f, A), along(ds, p, f, B)
        for e in range(s.shape[1]):
            of_v += ds[p, e] * f[K, e]
            g[K, e] += v * ds[p, e]
            g[W, e] += s[p, e] * ds[p, e]
            if coupled:
                g[A, e] += d_turned * s[p, e]
                g[B, e] += turned * ds[p, e]
            ds[p, e] = ds[p, e] * f[W, e] + d_turned * f[A, e]
            if early:
                ds[p, e] += d * f[R, e]
        return lanes_sum(of_v)

    return back


@device
def _put(of_all, first, s, dv, dk):
    """The thread's part of a state to memory, whose row 0 begins at `first`."""
    for p in range(s.shape[0]):
        i = cuda.threadIdx.y + p * cuda.blockDim.y
        for e in range(s.shape[1]):
            j = cuda.threadIdx.x + e * cuda.blockDim.x
            if i < dv and j < dk:
                of_all[first + i * dk + j] = s[p, e]


@device
def _get(s, of_all, first, dv, dk):
    for p in range(s.shape[0]):
        i = cuda.threadIdx.y + p * cuda.blockDim.y
        for e in range(s.shape[1]):
            j = cuda.threadIdx.x + e * cuda.blockDim.x
            s[p, e] = of_all[first + i * dk + j] if i < dv and j < dk else ZERO


@device
def _add_rows(parts, first, n, width, j):
    total = ZERO
    for i in range(first, first + n):
        total += parts[i * width + j]
    return total


@device
def _sum_rows(g, mine, parts, t, dk, n_tokens, n_roles):
    """g at token t = the sums of all threads' `mine` (5, columns) over the rows of a block."""
    n_lanes, n_rows, n_heads = cuda.blockDim.x, cuda.blockDim.y, cuda.blockDim.z
    width, row = n_lanes * mine.shape[1], cuda.threadIdx.z * n_rows + cuda.threadIdx.y
    for role in range(n_roles):
        for e in range(mine.shape[1]):
            j = cuda.threadIdx.x + e * n_lanes
            parts[(role * n_heads * n_rows + row) * width + j] = mine[role, e]
    cuda.syncthreads()
    n_blocks, n_threads = cuda.gridDim.x, n_lanes * n_rows * n_heads
    for at in range(row * n_lanes + cuda.threadIdx.x, n_roles * n_heads * dk, n_threads):
        role, z, j = at // (n_heads * dk), at // dk % n_heads, at % dk
        first = role * n_heads * n_rows
        if role == W:  # each head's own; the others are sums over the heads of the block
            head = (t * n_blocks + cuda.blockIdx.x) * n_heads + z
            g[head * dk + j] = _add_rows(parts, first + z * n_rows, n_rows, width, j)
        elif z == 0:
            before = n_tokens * n_blocks * (n_heads + role - 1)
            total = _add_rows(parts, first, n_heads * n_rows, width, j)
            g[(before + t * n_blocks + cuda.blockIdx.x) * dk + j] = total
    cuda.syncthreads()


@cache
def _walk(factors: Factors) -> Any:
    """(advance, retreat): device functions that take all rows of a thread over one token."""
    fetch, step = steps(factors)
    back, value = _row_back(factors), factors.value

    @device
    def advance(s, f, src, sizes, t, h, dv, dk):
        fetch(f, src, sizes, t, h, dk)
        for p in range(s.shape[0]):
            i = cuda.threadIdx.y + p * cuda.blockDim.y
            step(s, p, f, value(src, sizes, t, h, i) if i < dv else ZERO)

    @device
    def retreat(s, ds, f, g, gv, dy, src, sizes, t, h, n_heads, dv, dk):
        """g (5, columns) becomes the thread's share of the factors' gradients."""
        fetch(f, src, sizes, t, h, dk)
        clear(g)
        for p in range(s.shape[0]):
            i = cuda.threadIdx.y + p * cuda.blockDim.y
            at, v, d = (t * n_heads + h) * dv + i, ZERO, ZERO
            if i < dv:
                v, d = value(src, sizes, t, h, i), dy[at]
            of_v = back(s, ds, p, f, g, v, d)
            if i < dv and cuda.threadIdx.x == 0:
                gv[at] = of_v

    return advance, retreat


@cache
def _backward(factors: Factors, block: StateBlock) -> Any:
    columns, rows_each, n_roles = block.columns, block.rows_each, factors.n_roles
    n_parts = n_roles * block.heads * block.rows * block.lanes * columns
    advance, retreat = _walk(factors)

    @kernel
    def backward(
        g, gv, dstate, states, src, sizes, dy, initial, positions, n_kept, length, n_heads, dv, dk
    ):
        s = cuda.local.array((rows_each, columns), np.float32)
        ds = cuda.local.array((rows_each, columns), np.float32)
        f = cuda.local.array((5, columns), np.float32)
        mine = cuda.local.array((5, columns), np.float32)
        parts = cuda.shared.array(n_parts, np.float32)
        h, n_tokens = cuda.blockIdx.x * cuda.blockDim.z + cuda.threadIdx.z, positions.size
        own, apart = h * dv * dk, n_heads * dv * dk  # of a state: the head's part, to the next one
        _get(s, initial, own, dv, dk)
        for t in range(n_tokens):
            if t % length == 0:
                _put(states, t // length * apart + own, s, dv, dk)
            if positions[t] == 0:
                clear(s)
            advance(s, f, src, sizes, t, h, dv, dk)
        clear(ds)
        for mark in range(n_kept - 1, -1, -1):
            first, last = mark * length, min((mark + 1) * length, n_tokens)
            _get(s, states, mark * apart + own, dv, dk)
            for t in range(first, last):
                if positions[t] == 0:
                    clear(s)
                _put(states, (n_kept + t - first) * apart + own, s, dv, dk)
                advance(s, f, src, sizes, t, h, dv, dk)
            for t in range(last - 1, first - 1, -1):
                _get(s, states, (n_kept + t - first) * apart + own, dv, dk)
                retreat(s, ds, f, mine, gv, dy, src, sizes, t, h, n_heads, dv, dk)
                if positions[t] == 0:
                    clear(ds)
                _sum_rows(g, mine, parts, t, dk, n_tokens, n_roles)
        _put(dstate, own, ds, dv, dk)

    return backward


@dataclass(frozen=True)
class Gradient:
    """The gradient of a node's recurrence, and where it leaves that of the factors.

    n_alike: heads whose gradients of k and r are wanted as one sum, in groups of so many heads.
    """

    factors: Factors
    state: Tensor
    n_tokens: int
    n_alike: int = 1

    @property
    def block(self) -> StateBlock:
        _, dv, dk = self.state.shape
        return StateBlock.of(dv, dk, self.factors.n_roles, self.n_alike)

    @property
    def n_blocks(self) -> int:
        return self.state.shape[0] // self.block.heads

    @property
    def _marks(self) -> tuple[int, int]:
        """(how many states are kept, how many tokens lie between two of them)."""
        length = isqrt(max(self.n_tokens - 1, 0)) + 1
        return -(-self.n_tokens // length), length

    @property
    def _starts(self) -> list[int]:
        """Where the gradients of w, k, r, a, b begin in scratch, in numbers, and where they end."""
        n_heads, _, dk = self.state.shape
        rows = [n_heads, *(self.n_blocks for _ in range(self.factors.n_roles - 1))]
        return [self.n_tokens * dk * sum(rows[:i]) for i in range(len(rows) + 1)]

    @property
    def n_bytes(self) -> int:
        """Of scratch."""
        return 4 * (self._starts[-1] + sum(self._marks) * self.state.n_elements)

    def of_factors(self, site: CudaSite) -> list[Any]:
        """The gradients of w (T, H, dk), then of k, r, … (T, n_blocks, dk), where bind puts them.

        u's stands for a's.
        """
        floats, starts = site.scratch.view(np.float32), self._starts
        return [floats[a:b] for a, b in pairwise(starts)]

    def bind(self, site: CudaSite, positions: Any, dy: Any, src: tuple, sizes: tuple) -> Call:
        """Compute them, the gradient of v as the node's result, that of the state as `saved[0]`."""
        floats = site.scratch.view(np.float32)
        g, states = floats[: self._starts[-1]], floats[self._starts[-1] : self.n_bytes // 4]
        run, arguments = _backward(self.factors, self.block), (*self._marks, *self.state.shape)
        return launch(
            run, self.n_blocks, self.block.threads, site.stream, g, site.out, site.saved[0],
            states, src, sizes, dy, site.src[0], positions, *arguments,
        )  # fmt: skip
