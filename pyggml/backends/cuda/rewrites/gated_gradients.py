"""Gated units in the backward pass: three nodes and what they are read by become one kernel.

It reads BF16. A large `up` is not kept for it, but computed again of the norm that the backward
pass makes anyway: a quarter of the memory of a step for a twentieth of its time. Where half of what
is left has room for all of them, they are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyggml.backends.cuda.ops.lora.nodes import GATED_GRADIENTS
from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.rewrites.unpacked import room
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements, rewrite
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import cpy
from pyggml.ops.layout.cpy import CPY

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

LARGE = 32 << 20  # bytes of `up` in a layer; where it takes less, its weights weigh more


def _are_whole(m: Match) -> bool:
    whole = all(t.is_contiguous and t.shape == m.gate.shape for t in (m.gate, m.up, m.dy))
    return whole and not is_of(m.x, *FORMULAS)


def _join(m: Match) -> Replacements:
    gate, up, dy = map(bfloat16_copy, (m.gate, m.up, m.dy))
    scales = *m.of_gate.params["scales"], *m.of_up.params["scales"]
    joint = GATED_GRADIENTS(
        gate, _again(up, m.x, m.graph), dy, m.b_gate, m.b_up, scales=scales, joined=False
    )  # fmt: skip
    of_up, unit = joint.saved
    return {m.of_gate: joint, m.of_up: of_up, m.of_a: again(m.of_a, m.d, unit)}


def _again(up: Tensor, x: Tensor, graph: Graph) -> Tensor:
    """The product once more, of the x that the backward pass has made; or as it is."""
    product = up.src[0]  # `up` is its copy in BF16
    if up.n_bytes < LARGE or product in graph.outputs or not is_of(product, "wide_product"):
        return up
    w, rows, b = product.src
    of = rows.src[0]
    if of.shape != x.shape or of is x or is_of(of, *FORMULAS):
        return up
    return cpy(again(product, w, again(rows, x, *rows.src[1:]), b), BF16)


def bfloat16_copy(t: Tensor) -> Tensor:
    """Its copy in BF16. narrow.py leaves out a copy of what can be BF16 itself."""
    is_widened = t.op is CPY and t.src[0].dtype is BF16
    return t.src[0] if is_widened else cpy(t, BF16)


GATED = Rewrite(
    Pattern("""
        dgate = swiglu_back_gate(gate, up, dy)
        dup = swiglu(gate, dy)
        y = swiglu(gate, up)
        of_gate = wide_gradient(dgate, b_gate)
        of_up = wide_gradient(dup, b_up)
        of_a = gradient_of_a(d, y)
        _of_x = gradient_of_a(of_up, x)
    """),
    _are_whole,
    _join,
)


@graph_pass
def with_kept_ups(graph: Graph, card: CudaBackend) -> Graph:
    """The graph, whose gated gradients read the `up` of the forward pass, if it has room for all
    that would be computed again."""
    kept: dict[Tensor, Tensor] = {}
    first = {t.src[::2]: t for t in reversed(graph.nodes) if is_of(t, "wide_product")}
    for t in graph.nodes:
        if is_of(t, "gated_gradients") and is_of(t.src[1], "wide_product"):
            gate, computed_again = t.src[:2]
            up = first[computed_again.src[::2]]  # of the same weight, and B
            if up is not computed_again and up.dtype is BF16 and _is_first(gate, first):
                kept[t] = t.reading((gate, up, *t.src[2:]))
    left = room(graph, card) if kept else None
    n_bytes = sum(t.src[1].n_bytes for t in kept.values())
    return rewrite(graph, kept) if left is not None and n_bytes <= left else graph


def _is_first(t: Tensor, first: dict[tuple[Tensor, ...], Tensor]) -> bool:
    """Whether a product is that of the forward pass, not of a layer that is computed again."""
    return is_of(t, "wide_product") and first[t.src[::2]] is t
