"""The choice of experts in generation: the best of a softmax, and what they have of their sum.

A token waits for launches: so the choice is one. On a card with clusters the norm before it and the
router's product are part of it: the blocks of a cluster share out the rows of the router's matrix,
which they read before the launch before has ended, and send the scores to the first, which chooses.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.backends.cuda.code import cluster_ptx, ptx
from pyggml.backends.cuda.code.blocks import block_sum
from pyggml.backends.cuda.code.cluster_ptx import MOST_BLOCKS, has_clusters
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import lies_in_fours, load_four, store_four
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, sync_warp, warp_max, warp_sum
from pyggml.backends.cuda.ops.generation.products import reads_norm
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import (
    await_others,
    begins_early,
    early_kernel,
    follow,
    least_shared,
    release_others,
)
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import HAS_PTX, small
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor, leaf

# -- the choice -----------------------------------------------------------------------------------

_MOST_EXPERTS = 512  # 4 KiB of ranks
_INDICES = (1 << 31) - 1  # the bits of a rank that hold an index; those above hold a probability
_MINUS_INF = np.float32(-np.inf)


@device
def _rank(p, i):
    """The rank of a probability p at index i: of equal ones the lower index is before."""
    return (np.int64(ptx.bits_of(p)) << 31) | (_INDICES - i)


@device
def _choose(chosen, weights, row, x, at, n, n_used, least, greatest):
    """Of the n scores from x[at] on, by a warp: the n_used likeliest of their softmax, and their
    probabilities, divided by their sum between `least` and `greatest`."""
    ranks = cuda.shared.array(_MOST_EXPERTS, np.int64)
    picked = cuda.shared.array(_MOST_EXPERTS, np.float32)
    lane = np.int64(cuda.threadIdx.x)
    top, total = _MINUS_INF, ZERO
    for i in range(lane, n, LANES):
        top = max(top, x[at + i])
    top = warp_max(top)
    top = ZERO if top == _MINUS_INF else top
    for i in range(lane, n, LANES):
        total += math.exp(x[at + i] - top)
    total = warp_sum(total)
    share = ONE / total if total > ZERO else ZERO
    for i in range(lane, n, LANES):
        ranks[i] = _rank(math.exp(x[at + i] - top) * share, i)
    of_chosen = total - total  # NaN where a score is
    for j in range(n_used):
        best = np.int64(-1)
        for i in range(lane, n, LANES):
            best = max(best, ranks[i])
        best = warp_max(best)
        i, p = _INDICES - (best & _INDICES), ptx.as_float(np.uint32(best >> 31))
        if i % LANES == lane:
            ranks[i] = -1
            chosen[row * n_used + j] = i
            picked[j] = p
        of_chosen += p
    sync_warp()
    rate = ONE / min(max(of_chosen, least), greatest)
    for j in range(lane, n_used, LANES):
        weights[row * n_used + j] = picked[j] * rate
    sync_warp()  # before the next row's are picked


def _route(chosen, weights, x, n, n_used, least, greatest):
    """The choice for each row of x (rows, n), by a warp."""
    follow()
    for row in range(cuda.blockIdx.x, x.size // n, cuda.gridDim.x):
        _choose(chosen, weights, row, x, row * n, n, n_used, least, greatest)


def _chooses(m: Match, compute: Compute) -> bool:
    """The best of a softmax, and what they have of their sum."""
    (scores,), p = m.probabilities.src, m.probabilities.params
    plain = scores.is_contiguous and p["scale"] == 1 and not p["masked"]
    read = m.is_read(m.probabilities, m.weights, m.total, m.limited) or m.probabilities.saved
    of_row = m.total.shape == (m.chosen.shape[0], 1, 1)
    return plain and not read and of_row and scores.shape[-1] <= _MOST_EXPERTS


def _limits(limited: CudaSite) -> tuple[np.float32, np.float32]:
    """Of the sum of the chosen probabilities."""
    low, high = (limited.node.params[name] for name in ("low", "high"))
    return np.float32(low), np.float32(high)


def _bind_router(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    probabilities, chosen, *_, limited, share = sites
    n_rows, n_used = chosen.node.shape
    grid = small(max(1, min(n_rows, 1 << 16)))
    return launch(
        early_kernel(_route), grid, LANES, share.stream, chosen.out, share.out,
        probabilities.src[0], probabilities.node.shape[-1], n_used, *_limits(limited),
        shared_bytes=least_shared(),
    )  # fmt: skip


# -- with its norm and its product ----------------------------------------------------------------

_WARPS = 16  # of a block
_THREADS = _WARPS * LANES
_HELD = 16  # fours of a row of W that a lane holds
_FEW_ROWS = 8  # of x, each of which a cluster reads W for
_MOST_NUMBERS = 8192  # of a row of x: 32 KiB of shared memory


@device
def _norm(y, out, x, weights, row, k, eps, writes):
    """y = rms_norm(x[row]) · weights in shared memory, and in `out` if this block writes it."""
    parts = cuda.shared.array(_THREADS, np.float32)
    squares = ZERO
    for j in range(4 * cuda.threadIdx.x, k, 4 * _THREADS):
        a, b, c, d = load_four(x, row * k + j)
        squares += (a * a + b * b) + (c * c + d * d)
    r = ONE / math.sqrt(block_sum(squares, parts) / np.float32(k) + eps)
    for j in range(4 * cuda.threadIdx.x, k, 4 * _THREADS):
        (a, b, c, d), (p, q, s, t) = load_four(x, row * k + j), load_four(weights, j)
        a, b, c, d = a * r * p, b * r * q, c * r * s, d * r * t
        store_four(y, j, a, b, c, d)
        if writes:
            store_four(out, row * k + j, a, b, c, d)


@device
def _hold(held, w, row, first, k):
    """A lane's fours of a row of W, _HELD · LANES of them from `first` on; zeros after its end."""
    for i in range(_HELD):
        j = 4 * (first + cuda.threadIdx.x % LANES + i * LANES)
        a, b, c, d = ZERO, ZERO, ZERO, ZERO
        if j < k:
            a, b, c, d = load_four(w, row * k + j)
        held[i, 0], held[i, 1], held[i, 2], held[i, 3] = a, b, c, d


@device
def _product(held, y, first, k):
    """The lane's part of the product of these with y."""
    total = ZERO
    for i in range(_HELD):
        j = 4 * (first + cuda.threadIdx.x % LANES + i * LANES)
        if j < k:
            a, b, c, d = load_four(y, j)
            total += (held[i, 0] * a + held[i, 1] * b) + (held[i, 2] * c + held[i, 3] * d)
    return total


@cache
def _normed_router() -> Any:
    place, of_lane = cluster_ptx.clusters_of(MOST_BLOCKS), (_HELD, 4)

    def route(chosen, weights, out, x, of_norm, w, sizes, eps, least, greatest):
        """The choice for row blockIdx.y of x, by a cluster; out = rms_norm(x) · of_norm."""
        place()
        k, n, n_used, writes = sizes
        barrier = cuda.shared.array(1, np.uint64)
        scores = cuda.shared.array(_MOST_EXPERTS, np.float32)
        y = cuda.shared.array(0, np.float32)
        held = cuda.local.array(of_lane, np.float32)
        row, warp = np.int64(cuda.blockIdx.y), np.int64(cuda.threadIdx.x // LANES)
        if cuda.blockIdx.x == 0 and cuda.threadIdx.x == 0:
            cluster_ptx.expect_bytes(barrier, np.uint32(4 * n))
        cluster_ptx.arrive_in_cluster()
        expert, apart = warp * MOST_BLOCKS + cuda.blockIdx.x, MOST_BLOCKS * _WARPS
        if expert < n:
            _hold(held, w, expert, 0, k)
        await_others()
        _norm(y, out, x, of_norm, row, k, eps, writes and cuda.blockIdx.x == 0)
        cuda.syncthreads()
        release_others()
        cluster_ptx.await_cluster()
        first = np.int64(0)
        while expert < n:
            total = ZERO
            while first < k // 4:
                total += _product(held, y, first, k)
                first += _HELD * LANES
                if first < k // 4:
                    _hold(held, w, expert, first, k)
            total = warp_sum(total)
            if cuda.threadIdx.x % LANES == 0:
                cluster_ptx.send(scores, 4 * expert, barrier, np.uint32(0), total)
            expert, first = expert + apart, np.int64(0)
            if expert < n:
                _hold(held, w, expert, first, k)
        if cuda.blockIdx.x == 0 and warp == 0:
            cluster_ptx.await_bytes(barrier)
            _choose(chosen, weights, row, scores, 0, n, n_used, least, greatest)

    run = kernel(route, most_threads=_THREADS, shared_bytes=_dynamic_bytes(_MOST_NUMBERS))
    return begins_early(run, lambda arguments: arguments[4:6])


def _dynamic_bytes(k: int) -> int:
    """Of y, and what a launch that begins early asks for at least."""
    return max(4 * k, least_shared())


def _norms_and_chooses(m: Match, compute: Compute) -> bool:
    """The same of the product of a normalised x of few rows, with a matrix in float32."""
    if m.is_read(m.product) or not _chooses(m, compute):
        return False
    sources = m.x, m.of_norm, m.w
    n_rows, k = m.x.n_elements // m.norm.shape[-1], m.w.shape[-1]
    in_fours = all(t.dtype is F32 and t.is_contiguous and lies_in_fours(t) for t in sources)
    fits = k % 4 == 0 and k <= _MOST_NUMBERS and n_rows <= _FEW_ROWS and len(m.w.shape) == 2
    return HAS_PTX and has_clusters() and reads_norm(m.product, m.norm) and in_fours and fits


def _bind_normed(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    norm, product, _, chosen, *_, limited, share = sites
    (n_rows, n_used), (n, k) = chosen.node.shape, product.node.src[0].shape
    out = norm.out if is_read[0] else norm.src[0]
    return launch(
        _normed_router(), (MOST_BLOCKS, n_rows), _THREADS, share.stream, chosen.out, share.out, out,
        norm.src[0], norm.src[1], product.src[0], (k, n, n_used, is_read[0]), norm.scalars[0],
        *_limits(limited), shared_bytes=_dynamic_bytes(k),
    )  # fmt: skip


def _choice(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Six experts for each row of scores, and their weights."""
    probabilities = ops.soft_max(scores)
    best = ops.top_k(probabilities, 6)
    weights = ops.get_rows(ops.reshape(probabilities, (*scores.shape, 1)), best)
    total = ops.clamp(ops.repeat_back(weights, (scores.shape[0], 1, 1)), 1e-4, math.inf)
    return best, ops.div(weights, total)


def _router(rng: np.random.Generator) -> Graph:
    """Of two tokens; of the second, all experts but one are equally good."""
    scores = rng.standard_normal((2, 40)).astype(np.float32)
    scores[1] = 0.5
    scores[1, 7] = 0.75
    return Graph.of(*_choice(leaf(scores)))


def _router_of_norm(rng: np.random.Generator) -> Graph:
    """Of two tokens, of more numbers than a warp holds, and more experts than there are warps."""
    normed = ops.rms_norm_mul(drawn(rng, 2, 2200), leaf(np.full(2200, 0.02, np.float32)), eps=1e-3)
    return Graph.of(*_choice(ops.mul_mat(drawn(rng, 200, 2200), normed)), ops.scale(normed, 2.0))


_CHOICE = """\
probabilities = soft_max(view(product))
chosen = top_k(probabilities)
weights = get_rows(view(probabilities), chosen)
total = repeat_back(weights)
limited = clamp(total)
share = div(weights, limited)
"""
_NORMED = """\
norm = rms_norm_mul(x, of_norm)
product = mul_mat(w, view(norm))
"""
EXPERTS_ROUTER = Fusion(near(_CHOICE), _chooses, _bind_router, _router)
EXPERTS_NORM_ROUTER = Fusion(
    near(_NORMED + _CHOICE), _norms_and_chooses, _bind_normed, _router_of_norm
)
