"""The path `unfused`: a softmax between two products, for scores with extras.

A row of scores belongs to one query and head. SCORE_ROWS of them are made at a time, over all keys
that any of them sees. Heads that share a key head are rows of one product.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.jit.simd import dot, exp32, fill
from pyggml.kernels import gemm
from pyggml.kernels.attention.extras import extras_of, scores_back, scores_forward, seen_keys
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Backward, Forward

SCORE_ROWS = 192  # rows of scores that exist at once: 3 MiB with 4096 keys
_ZERO = np.float32(0)

# -- kernels over the rows of a part ------------------------------------------------------------


@parallel
def _rows_forward(p, lse, extras, first, first_key, head, repeats):
    """p (n, keys from `first_key` on) holds q·k and becomes probabilities.

    Row m is query first + m // repeats of head + m % repeats.
    """
    for m in prange(p.shape[0]):
        t, h = first + m // repeats, head + m % repeats
        start, stop = seen_keys(extras, t)
        fill(p[m, : start - first_key], _ZERO)
        fill(p[m, stop - first_key :], _ZERO)
        scores_forward(p[m, start - first_key : stop - first_key], lse, extras, h, t, start, stop)


@parallel
def _rows_back(p, ds, o, do, lse, delta, extras, first, first_key, head, repeats):
    """p: q·k becomes probabilities. ds: do·v becomes d(loss)/d(q·k). Writes delta (H, T)."""
    for m in prange(p.shape[0]):
        t, h = first + m // repeats, head + m % repeats
        start, stop = seen_keys(extras, t)
        delta[h, t] = dot(o[m], do[m])
        for row in (p[m], ds[m]):
            fill(row[: start - first_key], _ZERO)
            fill(row[stop - first_key :], _ZERO)
        p_row = p[m, start - first_key : stop - first_key]
        ds_row = ds[m, start - first_key : stop - first_key]
        scores_back(p_row, ds_row, lse, delta, extras, h, t, start, stop)


@kernel
def _sinks_back(dsinks, sinks, lse, delta):
    for h in range(dsinks.size):
        total = np.float64(0)
        for t in range(lse.shape[1]):
            total -= exp32(sinks[h] - lse[h, t]) * delta[h, t]
        dsinks[h] = total


# -- parts of the scores ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ScorePart:
    """The scores of some queries and the heads that share a key head, over a range of keys."""

    group: int
    heads: slice
    queries: slice
    first_key: int
    stop_key: int  # the one past the last

    @property
    def keys(self) -> tuple[slice, int]:
        """Where in k and v its keys are."""
        return slice(self.first_key, self.stop_key), self.group

    @property
    def origin(self) -> tuple[int, int, int, int]:
        """Its first query, key and head, and heads to a query."""
        repeats = self.heads.stop - self.heads.start
        return self.queries.start, self.first_key, self.heads.start, repeats

    def rows_of(self, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """These queries and heads of x (T, H, D) as gapless rows, in the memory of `rows`."""
        part = x[self.queries, self.heads]
        filled = rows[: part.shape[0] * part.shape[1]]
        np.copyto(filled.reshape(part.shape), part)
        return filled

    def put(self, x: np.ndarray, rows: np.ndarray) -> None:
        """Write rows to where `rows_of` reads them."""
        part = x[self.queries, self.heads]
        np.copyto(part, rows.reshape(part.shape))

    def scores(self, memory: np.ndarray, n_rows: int) -> np.ndarray:
        """Memory for one number per row and key."""
        n_keys = self.stop_key - self.first_key
        return memory.reshape(-1)[: n_rows * n_keys].reshape(n_rows, n_keys)


def _parts(a: Forward) -> Iterator[_ScorePart]:
    n_queries, n_keys, n_groups = a.q.shape[0], a.k.shape[0], a.k.shape[1]
    repeats = a.q.shape[1] // n_groups
    step = _queries_at_once(repeats)
    for group in range(n_groups):
        heads = slice(group * repeats, (group + 1) * repeats)
        for first in range(0, n_queries, step):
            span = a.span[first : first + step]
            first_key = min(int(span[:, 0].min()), n_keys - 1)
            stop_key = max(int(span[:, 1].max()), first_key + 1)
            yield _ScorePart(group, heads, slice(first, first + len(span)), first_key, stop_key)


def _queries_at_once(repeats: int) -> int:
    """How many queries make up about SCORE_ROWS rows with `repeats` heads each."""
    return max(1, SCORE_ROWS // repeats)


def _multiply(
    c: np.ndarray, a: np.ndarray, b: np.ndarray, scratch: Scratch, accumulate: bool = False
) -> None:
    """c (M, N) (+)= a (M, K) · b (N, K)ᵀ."""
    gemm.strided(c[None], a[None], b[None], scratch["products"], accumulate)()


# -- forward ------------------------------------------------------------------------------------


def _takes(p: AttentionProblem) -> bool:
    return p.reads_floats


def _n_rows(p: AttentionProblem) -> int:
    """Rows of the largest part."""
    return min(p.n_queries, _queries_at_once(p.repeats)) * p.repeats


def _product(m: int, n: int, k: int, a_in_columns: bool, b_in_columns: bool) -> int:
    """Scratch of a product of m rows or fewer, summed over k numbers or fewer."""
    p = gemm.Problem("strided", m, n, k, a_in_columns=a_in_columns, b_in_columns=b_in_columns)
    return gemm.scratch_bytes(p, fewer_rows=True)


def _forward_products(p: AttentionProblem) -> int:
    """Scratch for the scores, q·kᵀ, and for their product with v; either may be of either size."""
    n = _n_rows(p)
    return max(
        scratch
        for d in (p.head_size, p.value_size)
        for scratch in (
            _product(n, p.n_keys, d, False, False),
            _product(n, d, p.n_keys, False, True),
            _product(n, d, 1, True, True),  # a single column of scores
        )
    )


def _backward_products(p: AttentionProblem) -> int:
    """Scratch for these two, and for dk and dv: products of scores and rows in columns."""
    wider = max(p.head_size, p.value_size)
    return max(_forward_products(p), _product(p.n_keys, wider, _n_rows(p), True, True))


def _forward_layout(p: AttentionProblem) -> Layout:
    n = _n_rows(p)
    return Layout(
        products=Array((_forward_products(p),), np.uint8),
        scores=Array((n, p.n_keys)),
        q=Array((n, p.head_size)),
        o=Array((n, p.value_size)),
    )


def _forward(a: Forward, scratch: Scratch) -> None:
    extras = extras_of(a)
    for part in _parts(a):
        q = part.rows_of(a.q, scratch["q"])
        scores, o = part.scores(scratch["scores"], len(q)), scratch["o"][: len(q)]
        _multiply(scores, q, a.k[part.keys], scratch)
        _rows_forward(scores, a.lse, extras, *part.origin)
        _multiply(o, scores, a.v[part.keys].T, scratch)
        part.put(a.o, o)


FORWARD: AttentionPath[Forward] = AttentionPath(
    "unfused", False, _takes, _forward_layout, lambda p, a, scratch: Call(_forward, a, scratch)
)

# -- backward -----------------------------------------------------------------------------------


def _backward_layout(p: AttentionProblem) -> Layout:
    n = _n_rows(p)
    return Layout(
        products=Array((_backward_products(p),), np.uint8),
        **dict.fromkeys(("s", "ds"), Array((n, p.n_keys))),
        **dict.fromkeys(("q", "dq"), Array((n, p.head_size))),
        **dict.fromkeys(("o", "do"), Array((n, p.value_size))),
        dk=Array((p.n_keys, p.head_size)),  # of one key head
        dv=Array((p.n_keys, p.value_size)),
        delta=Array((p.n_heads, p.n_queries)),
    )


def _backward(a: Backward, scratch: Scratch) -> None:
    for part in _parts(a):
        if part.queries.start == 0:
            scratch["dk"].fill(0)
            scratch["dv"].fill(0)
        _part_back(a, part, scratch)
        if part.queries.stop == len(a.q):
            np.copyto(a.dk[:, part.group], scratch["dk"])
            np.copyto(a.dv[:, part.group], scratch["dv"])
    _sinks_back(a.dsinks, a.sinks, a.lse, scratch["delta"])


def _part_back(a: Backward, part: _ScorePart, scratch: Scratch) -> None:
    q, o, do = (
        part.rows_of(x, scratch[name]) for name, x in (("q", a.q), ("o", a.o), ("do", a.do))
    )
    n, keys = len(q), slice(part.first_key, part.stop_key)
    s, ds, dq = part.scores(scratch["s"], n), part.scores(scratch["ds"], n), scratch["dq"][:n]
    _multiply(s, q, a.k[part.keys], scratch)
    _multiply(ds, do, a.v[part.keys], scratch)
    _rows_back(s, ds, o, do, a.lse, scratch["delta"], extras_of(a), *part.origin)
    _multiply(dq, ds, a.k[part.keys].T, scratch)
    _multiply(scratch["dk"][keys], ds.T, q.T, scratch, accumulate=True)
    _multiply(scratch["dv"][keys], s.T, do.T, scratch, accumulate=True)
    part.put(a.dq, dq)


BACKWARD: AttentionPath[Backward] = AttentionPath(
    "unfused", False, _takes, _backward_layout, lambda p, a, scratch: Call(_backward, a, scratch)
)
