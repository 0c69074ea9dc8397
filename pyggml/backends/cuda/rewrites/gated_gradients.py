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

from pyggml.backends.cuda.ops.lora.nodes import (
    gated_gradients,
    gradient_of_a,
    wide_product,
    wide_rows,
)
from pyggml.backends.cuda.ops.lora.operands import formula_of
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor

LARGE = 32 << 20  # bytes of `up` in a layer; where it takes less, its weights weigh more


def with_gated_gradients(graph: Graph) -> Graph:
    """The graph of narrow.py with gated units joined; the same graph if there are none."""
    by_operands = {
        (t.op.name, formula_of(t), *_operands(t)): t
        for t in graph.nodes
        if t.op is not None and formula_of(t)
    }
    normed = {t.src[0]: t.src[1] for t in graph.nodes if _is_of_a(t)}  # D -> its x
    new: dict[Tensor, Tensor] = {}
    for of_gate in filter(_is_of_gate, by_operands.values()):
        gate, up, dy = _operands(of_gate)
        of_up = by_operands.get(("wide_gradient", "swiglu", gate, dy))
        of_a = by_operands.get(("gradient_of_a", "swiglu", gate, up))
        if of_up in normed and of_a is not None:
            is_kept = up.n_bytes < LARGE or up in graph.outputs
            operands = gate, up if is_kept else _again(up, normed[of_up]), dy
            new |= _joined(operands, of_gate, of_up, of_a)
    return rewrite(graph, new)


def _joined(
    operands: Sequence[Tensor], of_gate: Tensor, of_up: Tensor, of_a: Tensor
) -> dict[Tensor, Tensor]:
    factors = *_factors(of_gate), *_factors(of_up)
    scales = [t.params["scales"][0] for t in (of_gate, of_up)]
    joint = gated_gradients(operands, factors, scales)
    of_up_now, unit = joint.saved
    first, rank = of_a.params["first"], of_a.params["rank"]
    da = gradient_of_a(of_a.src[0], unit, first, rank)
    return {of_gate: joint, of_up: of_up_now, of_a: da}


def _again(up: Tensor, x: Tensor) -> Tensor:
    """The product once more, of the x that the backward pass has made; or as it is."""
    rows = up.src[1] if _is(up, "wide_product") else up
    alike = _is(rows, "wide_rows") and not formula_of(rows) and rows.src[0].shape == x.shape
    if not alike or rows.src[0] is x:
        return up
    w, _, b = up.src
    made = wide_rows(x, rows.src[1:], rows.params["scales"])
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
