"""Gradients against slopes: <gradient, v> must be the slope along v of the float64 reference.

    slope = (f(x + h·v) - f(x - h·v)) / 2h,    f = Σ seed · graph,    seed and v random

The graph is evaluated in float64 by each op's `ref`, so that no float32 noise is in the difference;
the gradient comes from the kernels. A random seed, unlike a plain sum, also sees faults that cancel
(the gradients of softmax sum to zero).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.backward.walk import build_backward
from pyggml.errors import NoGradientError
from pyggml.graph import Graph, topological
from pyggml.graph.arrays import read, write
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor, as_leaf, leaf
from pyggml.kernels import reference
from pyggml.runtime import results

STEP = 1e-5  # h: the difference of two float64 values of order 1 is then good to 1e-10


@dataclass(frozen=True, slots=True)
class CheckedOutput:
    """An output as a function of leaves, with its gradient by the rules.

    weights   of the output's elements, in the sum that is differentiated
    kernels   whether gradients are those of the kernels, not of the references
    """

    out: Tensor
    leaves: Sequence[Tensor]
    backward: Graph
    weights: Tensor
    kernels: bool

    @classmethod
    def of(cls, out: Tensor, leaves: Sequence[Tensor], kernels: bool) -> CheckedOutput:
        """Of kernels too where a rule reads what a kernel leaves. Raises NoGradientError."""
        weights = leaf(np.ones(out.shape, np.float32), "weights")
        graph = build_backward(Graph.of(out), leaves, weights)
        reads_saved = any(s.op is SAVED for node in graph.nodes for s in node.src)
        return cls(out, leaves, graph, weights, kernels or reads_saved)

    def value(self, i: int, x: np.ndarray) -> np.ndarray:
        """The output where leaf i is x, float64."""
        return evaluate(self.out, {self.leaves[i]: x})

    def slopes(self, i: int, x: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the output along v, to the left and to the right of x."""
        here, left, right = (self.value(i, x + h * v) for h in (0.0, -STEP, STEP))
        with np.errstate(invalid="ignore"):  # ∞ - ∞ where the output is masked
            return np.nan_to_num(here - left) / STEP, np.nan_to_num(right - here) / STEP

    def slope(self, i: int, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Of the output along v at x, by the central difference."""
        left, right = (self.value(i, x + h * v) for h in (-STEP, STEP))
        with np.errstate(invalid="ignore"):
            return np.nan_to_num(right - left) / (2 * STEP)

    def gradient(self, i: int, u: np.ndarray) -> np.ndarray:
        """d(Σ u · output) / d(leaf i)."""
        if self.kernels:
            return self.gradients(u)[i]
        return evaluate(self.backward.outputs[1 + i], {self.weights: u})

    def gradients(self, u: np.ndarray) -> list[np.ndarray]:
        """Of all leaves, by one run of the kernels."""
        write(self.weights, u)
        _, *arrays = results(self.backward)
        return [a.astype(np.float64) for a in arrays]


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
    """Compare the gradient of build(*leaves), by the kernels, with the float64 slope along one
    direction of each array.

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
    output = CheckedOutput.of(build(*leaves), [leaves[i] for i in wrt], kernels=True)
    seed = rng.standard_normal(output.out.shape).astype(np.float32)
    directions = [rng.standard_normal(t.shape) for t in output.leaves]
    slopes = [  # before the kernels, which may change a leaf in place
        float(np.sum(seed * output.slope(k, in_float64(t), v)))
        for k, (t, v) in enumerate(zip(output.leaves, directions, strict=True))
    ]
    return [
        Slope(i, float(np.sum(g * v)), slope, float(np.linalg.norm(g) * np.linalg.norm(v)))
        for i, g, v, slope in zip(wrt, output.gradients(seed), directions, slopes, strict=True)
    ]


def evaluate(t: Tensor, values: Mapping[Tensor, np.ndarray] | None = None) -> np.ndarray:
    """The graph of t in float64, by the references alone; `values` replaces leaves.

    Quantised leaves are unpacked, integers stay integers. Raises NoGradientError for backward nodes
    that read what a forward kernel saved: there is no reference for them.
    """
    numbers: dict[Tensor, np.ndarray] = dict(values or {})
    for node in topological(t):
        if node in numbers:
            continue
        if node.op is None:
            numbers[node] = in_float64(node)
        elif node.op is SAVED:
            raise NoGradientError(f"evaluate: {node!r} is written by a kernel, not by a reference")
        else:
            sources = (numbers[s] for s in node.src)
            numbers[node] = np.asarray(node.op.ref(*sources, **node.params))
    return numbers[t]


def in_float64(t: Tensor) -> np.ndarray:
    """A leaf's values: floats and quantised types as float64, integers as they are."""
    return reference.in_float64(read(t), t.dtype)
