"""The gradient of the output matrix of the losses in pyggml.ops.loss.head, and of its scales.

linear_cross_entropy_back_w         dw_v  = Σ_t dL/dz_tv · h_t, of w (V, K)
rescale_back_linear_cross_entropy   for each scale of a packed w Σ dw · its part of w

The logits of a slice of the vocabulary become their slopes, and these some rows of dw at a time;
the second op has no more of dw than that. Sources: h, w, targets, shares of the soft loss, weights.
Of a w in BF16, dw is a product of factors in BF16, where the compute type rounds floats.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32, I32, DType
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit.scratch import Array, Layout, Scratch
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.expect import NONE_FROM_ZERO, expect_number
from pyggml.ops.layout.cpy import leaf_of, packed_leaf
from pyggml.ops.loss import head_slices
from pyggml.ops.loss.head_slices import Goals
from pyggml.ops.loss.soft import BETAS, NO_BETA, expect_beta, expect_shares, soft_rows, soft_wanted
from pyggml.ops.product.scale_slopes import TILE, ref_slopes, scales_of
from pyggml.quants import QUANTS, quantize
from pyggml.quants.scales import scale_sums

_SECOND_ORDER = NoGrad("second derivatives are out of scope")
_W = "linear_cross_entropy_back_w"


def linear_cross_entropy_back_w(
    h: Tensor, w: Tensor, *goals: Tensor, softcap: float = 0.0, beta: float = 0.0
) -> Tensor:
    """d(loss)/dw (V, K) of the losses over h (T, K) and w, whose arguments these are; weights times
    the gradient of the loss, or of its rows."""
    return LINEAR_CROSS_ENTROPY_BACK_W(h, w, *goals, softcap=softcap, beta=beta)


def rescale_back_linear_cross_entropy(w: Tensor, dw: Tensor) -> Tensor:
    """du of rescale(w, u) that was the output matrix, given the node dw of
    `linear_cross_entropy_back_w`."""
    return RESCALE_BACK_LINEAR_CROSS_ENTROPY(w, *dw.src, **dw.params)


def expect_layer(name: str, h: Tensor, w: Tensor, softcap: float) -> None:
    """Raises ShapeError unless they are hidden states (T, K), an output matrix (V, K) and a cap."""
    expect_number(name, "softcap", softcap)
    fits = len(h.shape) == len(w.shape) == 2 and h.shape[1] == w.shape[1]
    if not fits or 0 in (*h.shape, *w.shape):
        raise ShapeError(f"{name}: h {h.shape}, w {w.shape}, wanted (T, K), (V, K), none empty")
    if h.dtype is not F32:
        raise ShapeError(f"{name}: h is {h!r}, wanted F32")
    if w.dtype.name not in QUANTS:
        raise ShapeError(f"{name}: rows of {w!r} cannot be unpacked")


def expect_targets(name: str, n: int, targets: Tensor, weights: Tensor) -> None:
    """Raises ShapeError unless they are n of each."""
    if targets.shape != (n,) or weights.shape != (n,):
        raise ShapeError(f"{name}: targets {targets.shape}, weights {weights.shape}, wanted ({n},)")
    if weights.dtype is not F32 or targets.dtype is not I32:
        raise ShapeError(f"{name}: wanted h and weights in F32, targets in I32")


def _spec(h: Tensor, w: Tensor, *goals: Tensor, softcap: float, beta: float) -> Spec:
    expect_beta(_W, beta)
    expect_layer(_W, h, w, softcap)
    if len(goals) == 2:
        expect_targets(_W, h.shape[0], *goals)
    else:
        expect_shares(_W, (h.shape[0], w.shape[0]), *goals)
    return Spec(w.shape)


@dataclass(frozen=True, slots=True)
class _Slopes:
    """A node's sources, and the scratch of `_layout`.

    bound    the slices of the latest number of rows
    """

    h: np.ndarray
    w: gemm.Weight
    goals: Goals
    how: tuple[np.float32, float]
    own: Scratch
    bound: dict[int, list[head_slices.Slice]]

    def tiles(self) -> Iterator[tuple[slice, np.ndarray]]:
        """(rows, these of dw), which are there until the next ones are made."""
        used, n_vocab = np.flatnonzero(self.goals.weights), len(self.w.data)
        goals = Goals(*(a[used] for a in self.goals))
        if used.size and not 0 <= goals.targets.min() <= goals.targets.max() < n_vocab:
            raise ShapeError(f"{_W}: a target is outside the {n_vocab} tokens")
        n, own = len(used), self.own
        h = own["h"][:n]
        np.take(self.h, used, axis=0, out=h)
        problem = partial(_problem, k=h.shape[1], n=n, w=self.w.dtype, compute=self.w.compute)
        factor = h.T[None]
        if problem(1).form == "out_prod":
            factor = own["narrow"][:n]
            factor[:] = quantize(h, "BF16").view(np.uint16)
        if n not in self.bound:
            self.bound.clear()
            self.bound[n] = head_slices.bind_slices(self.w, h, None, len(self.h), own)
        for first, dz in head_slices.run_slopes(self.bound[n], h, goals, self.how, own):
            for i in range(0, dz.shape[1], len(own["tile"])):
                part = dz[:, i : i + len(own["tile"])]
                tile = own["tile"][: part.shape[1]]
                p = problem(len(tile))
                both = (tile, part.T) if p.form == "out_prod" else (tile[None], part.T[None])
                gemm.call_of(p, gemm.Operands(*both, factor, own["product"], False))()
                yield slice(first + i, first + i + len(tile)), tile


def _problem(n_rows: int, k: int, n: int, w: DType, compute: Compute) -> gemm.Problem:
    """Some rows of dw, of n positions."""
    if w is BF16 and gemm.rounds_matrices(compute):
        return gemm.Problem("out_prod", n_rows, k, n, BF16, compute, a_in_columns=True)
    return gemm.Problem("strided", n_rows, k, n, a_in_columns=True, b_in_columns=True)


def _layout(node: Tensor, compute: Compute) -> Layout:
    h, w, targets = node.src[_n_before(node) :][:3]
    (n, k), n_vocab = h.shape, w.shape[0]
    n_targets = targets.shape[1] if len(targets.shape) == 2 else 1
    step = min(n_vocab, max(TILE // k, 1))
    width = head_slices.slice_rows(n, n_vocab)
    sizes = {step, min(step, width), width % step, n_vocab % width % step, min(step, n_vocab)} - {0}
    problems = [_problem(rows, k, n, w.dtype, compute) for rows in sizes]
    size = max(map(gemm.scratch_bytes, problems))
    return Layout(
        h=Array((n, k)),
        narrow=Array((n if problems[0].form == "out_prod" else 0, k), np.uint16),
        tile=Array((step, k)),
        product=Array((size,), np.uint8),
        **head_slices.arrays(n, k, n_targets, w, compute, False),
    )


def _n_before(node: Tensor) -> int:
    """Sources before h: the packed matrix before its scales changed."""
    return int(node.op is RESCALE_BACK_LINEAR_CROSS_ENTROPY)


def _scratch(node: Tensor, compute: Compute) -> int:
    return _layout(node, compute).n_bytes


def _slopes(site: Site) -> _Slopes:
    before = _n_before(site.node)
    h, w, targets, *shares, weights = site.src[before:]
    one = np.broadcast_to(np.array([1, 0], np.float32), (len(h), 2))
    goals = Goals(targets.reshape(len(h), -1), shares[0] if shares else one, weights)
    p, own = site.node.params, _layout(site.node, site.compute).cut(site.scratch)
    weight = gemm.Weight(w, site.node.src[before + 1].dtype, site.compute)
    return _Slopes(h, weight, goals, (np.float32(p["softcap"]), p["beta"]), own, {})


def _put(out: np.ndarray, rows: slice, dw: np.ndarray) -> None:
    out[rows] = dw


def _put_sums(w: np.ndarray, name: str, out: np.ndarray, rows: slice, dw: np.ndarray) -> None:
    scale_sums(w[rows], dw, name, out[rows])


def _by_tile(
    out: np.ndarray, slopes: _Slopes, put: Callable[[np.ndarray, slice, np.ndarray], None]
) -> None:
    if not slopes.goals.weights.any():
        out.fill(0)
        return
    for rows, dw in slopes.tiles():
        put(out, rows, dw)


def _ref(
    h: np.ndarray,
    w: np.ndarray,
    targets: np.ndarray,
    *rest: np.ndarray,
    softcap: float,
    beta: float,
) -> np.ndarray:  # fmt: skip
    *soft, weights = rest
    targets = targets.reshape(len(h), -1)
    shares = soft[0] if soft else np.broadcast_to([1.0, 0.0], (len(h), 2))
    z = h @ w.T
    z = SOFTCAP(z, cap=softcap) if softcap else z
    _, dz = soft_rows(z, targets, shares, weights, beta=beta)
    return np.asarray((SOFTCAP_BACK(z, dz, cap=softcap) if softcap else dz).T @ h)


def _cases(rng: np.random.Generator) -> Iterator[tuple[tuple[np.ndarray, ...], dict[str, float]]]:
    """(hidden states and what is wanted, settings)."""
    for t, v, cap in ((1, 3, 0.0), (5, 70, 0.0), (9, 20, 1.5)):
        targets, weights = rng.integers(0, v, t, np.int32), rng.uniform(0.1, 1, t)
        weights *= rng.random(t) < 0.7
        yield (rng.standard_normal((t, v)), targets, weights), {"softcap": cap, "beta": 0.0}
    for (z, *goals), cap in zip(soft_wanted(rng), (0.0, 0.0, 1.5), strict=True):
        for beta in BETAS:
            yield (z, *goals), {"softcap": cap, "beta": beta}


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for (z, *goals), how in _cases(rng):
        h, w = rng.standard_normal((len(z), 8)), rng.standard_normal((z.shape[1], 8))
        yield Sample((h, w, *goals), how)
    yield Sample((h, leaf_of(w, "BF16"), *goals), how)


LINEAR_CROSS_ENTROPY_BACK_W = op(
    name=_W,
    spec=_spec,
    ref=_ref,
    grad=_SECOND_ORDER,
    samples=_samples,
    refuses={"softcap": NONE_FROM_ZERO, "beta": NO_BETA},
    costly=True,
)
cpu_kernel(
    LINEAR_CROSS_ENTROPY_BACK_W,
    lambda site: Call(_by_tile, site.out, _slopes(site), _put),
    scratch=_scratch,
)

# -- of scales ----------------------------------------------------------------------------------


def _scales_spec(base: Tensor, *src: Tensor, softcap: float, beta: float) -> Spec:
    name = "rescale_back_linear_cross_entropy"
    if _spec(*src, softcap=softcap, beta=beta).shape != base.shape:
        raise ShapeError(f"{name}: w is {base!r}, wanted the shape of {src[1]!r}")
    return Spec(scales_of(name, base))


def _scales_run(site: Site) -> Call:
    put = partial(_put_sums, site.src[0], site.node.src[0].dtype.name)
    return Call(_by_tile, site.out, _slopes(site), put)


def _scales_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for (z, *goals), how in _cases(rng):
        w = packed_leaf(rng, (z.shape[1], 64), "Q8_0")
        yield Sample((w, 0.1 * rng.standard_normal((len(z), 64)), w, *goals), how)


RESCALE_BACK_LINEAR_CROSS_ENTROPY = op(
    name="rescale_back_linear_cross_entropy",
    spec=_scales_spec,
    ref=lambda base, *src, softcap, beta: ref_slopes(base, _ref(*src, softcap=softcap, beta=beta)),
    grad=_SECOND_ORDER,
    samples=_scales_samples,
    refuses={"softcap": NONE_FROM_ZERO, "beta": NO_BETA},
    costly=True,
    fuses=(_W, "rescale_back"),
)
cpu_kernel(RESCALE_BACK_LINEAR_CROSS_ENTROPY, _scales_run, scratch=_scratch)
