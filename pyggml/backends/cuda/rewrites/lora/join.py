"""Gated units in the backward pass. Three nodes that compute formulas of the same operands, all
BF16, become one kernel:

    wide_gradient(swiglu_back_gate(gate, up, dy), B_gate)    becomes gated_gradients(…)
    wide_gradient(swiglu(gate, dy), B_up)                    what that saves
    gradient_of_a(D, swiglu(gate, up))                       reads what that saves

And a large `up` is not kept for it, but computed again of the norm that the backward pass makes
anyway: a quarter of the memory of a step for a twentieth of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyggml.backends.cuda.rewrites.lora.operands import formula_of
from pyggml.backends.cuda.rewrites.lora.ops import (
    gated_gradients,
    gradient_of_a,
    wide_product,
    wide_rows,
)
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor

LARGE = 32 << 20  # bytes of `up` in a layer; where it takes less, its weights weigh more


def with_gated_gradients(graph: Graph) -> Graph:
    """The graph of narrow.py with gated units joined; the same graph if there are none."""
    return _Joiner(graph).run()


class _Joiner:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        by_operands = {
            (t.op.name, formula_of(t), *_operands(t)): t
            for t in graph.nodes
            if t.op is not None and formula_of(t)
        }
        self._joined: dict[Tensor, tuple[Tensor, int]] = {}  # a node -> D of gate, its part of it
        self._of_up: dict[Tensor, Tensor] = {}  # D of gate -> D of up
        self._normed = {t.src[0]: t.src[1] for t in graph.nodes if _is_of_a(t)}  # D -> its x
        for t in by_operands.values():
            if not _is_of_gate(t):
                continue
            gate, up, dy = _operands(t)
            of_up = by_operands.get(("wide_gradient", "swiglu", gate, dy))
            of_a = by_operands.get(("gradient_of_a", "swiglu", gate, up))
            if of_up in self._normed and of_a is not None:
                self._of_up[t] = of_up
                self._joined |= {t: (t, 0), of_up: (t, 1), of_a: (t, 2)}
        self._new: dict[Tensor, Tensor] = {}

    def run(self) -> Graph:
        if not self._joined:
            return self._graph
        steps = [self._made(t) for t in self._graph.nodes if t.op is not SAVED]
        outputs = (self._made(t) for t in self._graph.outputs)
        return Graph.of(*outputs, steps=steps).noted(self._graph.notes)

    def _made(self, t: Tensor) -> Tensor:
        """What stands for t, after its sources."""
        if t.op is None:
            return t
        if t.op is SAVED:
            maker = t.src[0]
            return self._made(maker).saved[maker.saved.index(t)]
        if t not in self._new:
            self._new[t] = self._renewed(t)
        return self._new[t]

    def _renewed(self, t: Tensor) -> Tensor:
        of_gate, part = self._joined.get(t, (t, 0))
        if part == 0 and t in self._of_up:
            nodes = t, self._of_up[t]
            gate, up, dy = _operands(t)
            operands = self._made(gate), self._again(up, self._normed[nodes[1]]), self._made(dy)
            factors = [s for n in nodes for s in _factors(n)]
            return gated_gradients(operands, factors, [n.params["scales"][0] for n in nodes])
        if part == 1:
            return self._made(of_gate).saved[0]
        if part == 2:
            return gradient_of_a(
                self._made(t.src[0]), self._made(of_gate).saved[1], t.params["first"], t.shape[0]
            )
        src = tuple(self._made(s) for s in t.src)
        return t if src == t.src else t.reading(src)

    def _again(self, up: Tensor, x: Tensor) -> Tensor:
        """The product once more, of the x that the backward pass has made; or as it is."""
        rows = up.src[1] if _is(up, "wide_product") else up
        alike = _is(rows, "wide_rows") and not formula_of(rows) and rows.src[0].shape == x.shape
        is_kept = up.n_bytes < LARGE or up in self._graph.outputs
        if not alike or rows.src[0] is x or is_kept:
            return self._made(up)
        made = wide_rows(self._made(x), rows.src[1:], rows.params["scales"])
        w, _, b = up.src
        return replace(wide_product(w, made, b, up.params["first"]), dtype=BF16, strides=())


def _is(t: Tensor, name: str) -> bool:
    return t.op is not None and t.op.name == name


def _is_of_a(t: Tensor) -> bool:
    """Whether t is the gradient of an A whose x is in memory."""
    return _is(t, "gradient_of_a") and not formula_of(t)


def _is_of_gate(t: Tensor) -> bool:
    is_formula = _is(t, "wide_gradient") and formula_of(t) == "swiglu_back_gate"
    return is_formula and all(s.dtype is BF16 for s in _operands(t))


def _operands(t: Tensor) -> Sequence[Tensor]:
    return t.src[1:] if _is(t, "gradient_of_a") else t.src[: len(t.src) - len(_factors(t))]


def _factors(t: Tensor) -> Sequence[Tensor]:
    return t.src[len(t.src) - len(t.params["scales"]) :]
