"""Gradients against slopes: <gradient, v> must be the slope along v of the float64 reference.

    slope = (f(x + h·v) - f(x - h·v)) / 2h,    f = Σ seed · graph,    seed and v random

The graph is evaluated in float64 by each op's `ref`, so that no float32 noise is in the difference;
the gradient comes from the kernels. A random seed, unlike a plain sum, also sees faults that cancel
(the gradients of softmax sum to zero).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.backends.cpu import read
from pyggml.backward.walk import build_backward
from pyggml.errors import NoGradientError
from pyggml.graph import Graph, topological
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor, as_leaf, leaf
from pyggml.kernels import reference
from pyggml.runtime import results

STEP = 1e-5  # h: the difference of two float64 values of order 1 is then good to 1e-10


@dataclass(frozen=True, slots=True)
class Slope:
    """One comparison: `gradient` is <gradient, v>, `reference` its slope in float64.

    `scale` is |gradient| · |v|, the most that <gradient, v> could be; `source` counts the arrays.
    """

    source: int
    gradient: float
    reference: float
    scale: float

    @property
    def error(self) -> float:
        """|gradient - reference| in units of the scale; 1e-5 or less is float32 rounding."""
        return abs(self.gradient - self.reference) / (self.scale or 1.0)


def check_gradient(
    build: Callable[..., Tensor],
    arrays: Sequence[np.ndarray | Tensor],
    rng: np.random.Generator,
    wrt: Sequence[int] | None = None,
) -> list[Slope]:
    """Compare the gradient of build(*leaves) with the float64 slope, once for each array.

    Float arrays become F32 leaves, integers I32 leaves; a Tensor (a quantised weight, say) is used
    as it is. `wrt` chooses the arrays to differentiate by, else all float ones. The caller judges
    `error`. Raises NoGradientError as build_backward does, and if there is nothing to compare.

        slopes = check_gradient(lambda x, w: rms_norm(mul_mat(w, x)), [x, w], rng)
        assert max(s.error for s in slopes) < 1e-4
    """
    leaves = [as_leaf(a) for a in arrays]
    if wrt is None:
        wrt = [i for i, a in enumerate(arrays) if not isinstance(a, Tensor) and a.dtype.kind == "f"]
    if not wrt:
        raise NoGradientError("check_gradient: there is no float array to differentiate by")
    start = {t: in_float64(t).copy() for t in leaves}  # a kernel may change a leaf in place
    out = build(*leaves)
    seed = rng.standard_normal(out.shape).astype(np.float32)
    seed_leaf = leaf(np.asarray(seed), "seed")
    _, *grads = results(build_backward(Graph.of(out), [leaves[i] for i in wrt], seed_leaf))
    return [
        _compare(out, seed, start, leaves[i], i, g, rng) for i, g in zip(wrt, grads, strict=True)
    ]


def _compare(
    out: Tensor,
    seed: np.ndarray,
    start: Mapping[Tensor, np.ndarray],
    x: Tensor,
    source: int,
    grad: np.ndarray,
    rng: np.random.Generator,
) -> Slope:
    v = rng.standard_normal(x.shape)
    up, down = (evaluate(out, {**start, x: start[x] + h * v}) for h in (STEP, -STEP))
    change = np.subtract(up, down, out=np.zeros_like(up), where=up != down)  # -inf stays -inf
    wanted = float(np.sum(seed * change)) / (2 * STEP)
    exact = grad.astype(np.float64)
    scale = float(np.linalg.norm(exact) * np.linalg.norm(v))
    return Slope(source, float(np.sum(exact * v)), wanted, scale)


def evaluate(t: Tensor, values: Mapping[Tensor, np.ndarray] | None = None) -> np.ndarray:
    """The graph of t in float64, by the references alone; `values` replaces leaves.

    Quantised leaves are unpacked, integers stay integers. Raises NoGradientError for backward nodes
    that read what a forward kernel saved: there is no reference for them.
    """
    known: dict[Tensor, np.ndarray] = dict(values or {})
    for node in topological(t):
        if node in known:
            continue
        if node.op is None:
            known[node] = in_float64(node)
        elif node.op is SAVED:
            raise NoGradientError(f"evaluate: {node!r} is written by a kernel, not by a reference")
        else:
            sources = (known[s] for s in node.src)
            known[node] = np.asarray(node.op.ref(*sources, **node.params))
    return known[t]


def in_float64(t: Tensor) -> np.ndarray:
    """A leaf's values: floats and quantised types as float64, integers as they are."""
    return reference.in_float64(read(t), t.dtype)
