"""The output layer and its loss, a slice of the vocabulary after the other.

With z = h·wᵀ, for each row, over slices as attention goes over tiles of keys:

    m = max_v z_v    rest = Σ_v∉targets e^(z_v − m)    o = Σ_v∉targets e^(z_v − m) · slope_v · w_v

slope is 1, or that of the cap. m, rest and o are those so far; where m rises, the others are
scaled. So only the logits of a slice exist, in the caches, and each row of w is unpacked once for
many positions. With the probabilities that are wanted, q_s of target s and q_rest of all others:

    norm = rest + Σ_s e^(z_s − m)    p = e^(z − m) / norm    p_rest = rest / norm
    Q = Σ_s q_s + q_rest, commonly 1
    L = −weight · (Σ_s q_s · log p_s + q_rest · log p_rest)          β above 0: see ops.loss.soft
    dL/dh = weight · ((Q − q_rest / p_rest) · o / norm + Σ_s (Q · p_s − q_s) · slope_s · w_s)

The targets' own terms are added in float32: rounded beside small ones they would cost their
accuracy. Where q_s is 1 for one target, L is its cross entropy.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.jit import JIT, kernel, parallel, prange
from pyggml.jit.scratch import Array, Scratch
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels import gemm
from pyggml.kernels.attention.softmax import MASKED
from pyggml.kernels.formulas import inline_formula
from pyggml.kernels.gemm.microkernel import call_block
from pyggml.kernels.kernel import Compute
from pyggml.ops.layout.rows import gather_rows
from pyggml.ops.loss.soft import cases
from pyggml.quants import UNPACK

ROWS = 2048  # positions of a chunk: each unpacks all of w
# Of the logits that exist at once: they stay in the caches. 512 positions of the 0.6B model took
# 450 ms with 2 MiB, 459 with 4, 474 with 8, 489 with 16; 2,048 took 1,705 with 4, 1,732 with 8 and
# 1,791 with 16 (one thread of a Zen 5). Fewer rows of w than FEWEST are few tasks for many threads.
SLICE_BYTES, FEWEST = 4 << 20, 1024
STEP = 512  # rows of w in whole passes of a backward product (pyggml.kernels.gemm.int8_tile)
_ZERO, _ONE = np.float32(0), np.float32(1)
_LEAST = np.float32(np.finfo(np.float32).tiny)  # that `rest` is taken to be
_softcap, _softcap_back = inline_formula(SOFTCAP), inline_formula(SOFTCAP_BACK)

# -- kernels --------------------------------------------------------------------------------------


@kernel
def _exponentials(row, top):
    """row = e^(row − top); their sum."""
    total = _ZERO
    for j in range(row.size):
        row[j] = exp32(row[j] - top)
        total += row[j]
    return total


@kernel
def _capped_exponentials(row, top, cap):
    """row = e^(row − top) times the slope of the cap; the sum without slopes."""
    total = _ZERO
    for j in range(row.size):
        e = exp32(row[j] - top)
        total += e
        row[j] = _softcap_back(row[j], e, cap)
    return total


@kernel
def _cap(row, cap):
    for j in range(row.size):
        row[j] = _softcap(row[j], cap)


def _slice_kernel(capped: bool) -> Callable[..., None]:
    """With or without a cap; only what a process needs is compiled."""
    has_cap = np.bool_(capped)

    @parallel
    def take_slice(z, m, rest, target_logits, dh, targets, first, cap):
        """The logits z of rows `first` … of w become exponentials, 0 for the targets; the first
        slice begins m and rest, others find o, in dh, and scale it where m rises."""
        for i in prange(z.shape[0]):
            row = z[i]
            if has_cap:
                _cap(row, cap)
            top = row_max(row)
            for s in range(targets.shape[1]):
                target = targets[i, s] - first
                if 0 <= target < row.size:
                    target_logits[i, s] = row[target]
                    row[target] = MASKED
            if first == 0:
                m[i], rest[i] = MASKED, _ZERO
            if not top <= m[i]:
                factor = exp32(m[i] - top)
                rest[i] *= factor
                m[i] = top
                if first > 0:
                    o = dh[i]
                    for j in range(o.size):
                        o[j] *= factor
            if not has_cap:
                rest[i] += _exponentials(row, m[i])
                continue
            rest[i] += _capped_exponentials(row, m[i], cap)
            for s in range(targets.shape[1]):  # whose slope is not finite here
                target = targets[i, s] - first
                if 0 <= target < row.size:
                    row[target] = _ZERO

    return take_slice


_TAKE_SLICE = {capped: _slice_kernel(capped) for capped in (False, True)}


def _slopes_kernel(capped: bool) -> Callable[..., None]:
    has_cap = np.bool_(capped)

    @parallel
    def take_slopes(z, m, factor, targets, factors, first, cap):
        """The logits z of rows `first` … of w become their slopes."""
        for i in prange(z.shape[0]):
            row = z[i]
            if has_cap:
                _cap(row, cap)
                _capped_exponentials(row, m[i], cap)
            else:
                _exponentials(row, m[i])
            for j in range(row.size):
                row[j] *= factor[i]
            for s in range(targets.shape[1]):
                target = targets[i, s] - first
                if 0 <= target < row.size:
                    row[target] = factors[i, s]

    return take_slopes


_TAKE_SLOPES = {capped: _slopes_kernel(capped) for capped in (False, True)}


@parallel
def _add_rows(o, rows, table, targets, factors, unpack, n_blocks):
    """o += Σ_s factors_s · the row of w of target s; rows: scratch, one for each position."""
    for i in prange(o.shape[0]):
        for s in range(targets.shape[1]):
            call_block(unpack, rows[i].ctypes.data, table[targets[i, s]].ctypes.data, n_blocks)
            for j in range(o.shape[1]):
                o[i, j] += factors[i, s] * rows[i, j]


def _add_targets(
    o: np.ndarray, rows: np.ndarray, w: gemm.Weight, targets: np.ndarray, factors: np.ndarray
) -> None:
    """o (n, K) += Σ_s factors (n, k) · the targets' rows of w; rows (n, K) is overwritten."""
    table, unpack = w.data.view(np.uint8).reshape(len(w.data), -1), UNPACK[w.dtype.name]
    n_blocks = o.shape[1] // w.dtype.block
    if JIT:
        _add_rows(o, rows, table, targets, factors, unpack.address, n_blocks)
        return
    for ids, share in zip(targets.T, factors.T, strict=True):
        gather_rows(rows, table, ids, (), unpack, n_blocks)
        o += share[:, None] * rows


# -- a chunk of positions -------------------------------------------------------------------------


def slice_rows(n: int, n_vocab: int) -> int:
    """Rows of w in a slice, for chunks of n positions."""
    return min(n_vocab, max(FEWEST, SLICE_BYTES // (4 * n) // STEP * STEP))


def arrays(
    n: int, k: int, n_targets: int, w: Tensor, compute: Compute, gradient: bool
) -> dict[str, Array]:
    """Scratch for a chunk of up to n positions of k numbers and so many targets."""
    n_vocab, kind = w.shape[0], w.dtype
    rows = slice_rows(n, n_vocab)
    sizes = {rows, n_vocab % rows or rows}
    forward = [gemm.Problem("mul_mat", n, v, k, kind, compute) for v in sizes]
    backward = [gemm.Problem("out_prod", n, k, v, kind, compute) for v in sizes if gradient]
    most = max(gemm.scratch_bytes(p, fewer_rows=True) for p in (*forward, *backward))
    packed = max(gemm.packing(p)[0] for p in forward)
    return {
        "z": Array((n * rows,)), "m": Array((n,)), "rest": Array((n,)),
        "target_logits": Array((n, n_targets)), "products": Array((most,), np.uint8),
        "packed": Array((packed,), np.uint8),
    }  # fmt: skip


class Goals(NamedTuple):
    """What is wanted of n positions: of k targets each, and of all other tokens together."""

    targets: np.ndarray  # (n, k) int32
    shares: np.ndarray  # (n, k + 1) float32, the probabilities of these and of the others
    weights: np.ndarray  # (n,) float32


class Slice(NamedTuple):
    """A slice of the vocabulary, bound for a number of positions."""

    first: int  # row of w
    z: np.ndarray  # (n, rows): its logits
    make: Call
    add: Call | None  # their share of o, with a gradient


def bind_slices(
    w: gemm.Weight, h: np.ndarray, o: np.ndarray | None, n_most: int, own: Scratch
) -> list[Slice]:
    """The slices for h (n, K) and o (n, K); own: `arrays` for n_most positions or more."""
    (n, k), n_vocab, slices = h.shape, len(w.data), []
    rows = slice_rows(n_most, n_vocab)
    packed: tuple[int, str] | None = None
    for v in range(0, n_vocab, rows):
        part, width = replace(w, data=w.data[v : v + rows]), min(rows, n_vocab - v)
        z = own["z"][: n * width].reshape(n, width)
        form = gemm.packing(gemm.Problem("mul_mat", n, width, k, w.dtype, w.compute))
        fits = 0 < form[0] <= own["packed"].size
        packing = gemm.Packing(own["packed"], form == packed) if fits else None
        make = gemm.mul_mat(z, h, part, own["products"], False, packing)
        add = None if o is None else gemm.out_prod(o, z, part, own["products"], v > 0)
        slices.append(Slice(v, z, make, add))
        packed = form
    return slices


def run(
    slices: list[Slice],
    w: gemm.Weight,
    rows: tuple[np.ndarray, np.ndarray],
    goals: Goals,
    how: tuple[np.float32, float],
    own: Scratch,
) -> tuple[np.ndarray, int]:
    """(losses (n,), how many positions have their first target on top); with a gradient, o becomes
    that. rows: h, which is overwritten, and o; how: the cap and β of the loss."""
    (h, o), n = rows, len(rows[0])
    gradient, cap = slices[0].add is not None, how[0]
    take_slice = _TAKE_SLICE[bool(cap)]
    sums = o if gradient else np.empty((n, 0), np.float32)
    m, rest, logits = (own[name][:n] for name in ("m", "rest", "target_logits"))
    for part in slices:
        part.make()
        take_slice(part.z, m, rest, logits, sums, goals.targets, part.first, cap if cap else _ONE)
        if part.add is not None:
            part.add()
    losses, factor, factors = _factors(m, rest, logits, goals, how)
    if gradient:
        o *= factor[:, None]
        _add_targets(o, h, w, goals.targets, factors)
    return goals.weights * losses, int(np.count_nonzero(logits[:, 0] == m))


def _factors(
    m: np.ndarray,
    rest: np.ndarray,
    logits: np.ndarray,
    goals: Goals,
    how: tuple[np.float32, float],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(losses (n,), f (n,) with dL/dz_v = f · e^(z_v − m) · slope_v of all v but targets, dL/dz_s
    (n, k) of these) after all slices."""
    (_, shares, weights), (cap, beta) = goals, how
    with np.errstate(all="ignore"):  # logits may not be finite
        above, rest = logits - m[:, None], np.maximum(rest, _LEAST)
        e = np.exp(above)
        norm = rest + e.sum(axis=1)
        log_p = np.column_stack([above, np.log(rest)]) - np.log(norm)[:, None]
        losses, shares = cases(shares, log_p, beta)
        mass, q, q_rest = shares.sum(axis=1), shares[:, :-1], shares[:, -1]
        factor = weights * (mass / norm - q_rest / rest)
        factors = weights[:, None] * (mass[:, None] * e / norm[:, None] - q)
        factors = SOFTCAP_BACK(logits, factors, cap=float(cap)) if cap else factors
    return losses, factor, factors.astype(np.float32)


def run_slopes(
    slices: list[Slice],
    rows: np.ndarray,
    goals: Goals,
    how: tuple[np.float32, float],
    own: Scratch,
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row of w, dL/dz (n, rows) of these) of one slice after the other, which are made
    twice: once for what all of them have in common. rows: h, which stays."""
    n, cap = len(rows), how[0]
    take_slice, take_slopes = _TAKE_SLICE[bool(cap)], _TAKE_SLOPES[bool(cap)]
    m, rest, logits = (own[name][:n] for name in ("m", "rest", "target_logits"))
    none = np.empty((n, 0), np.float32)
    for part in slices:
        part.make()
        take_slice(part.z, m, rest, logits, none, goals.targets, part.first, cap if cap else _ONE)
    _, factor, factors = _factors(m, rest, logits, goals, how)
    for part in slices:
        part.make()
        take_slopes(
            part.z, m, factor.astype(np.float32), goals.targets, factors, part.first,
            cap if cap else _ONE,
        )  # fmt: skip
        yield part.first, part.z
