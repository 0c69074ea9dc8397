"""Gated units in the backward pass. Three nodes and what they are read by become one kernel:

    wide_gradient(swiglu_back_gate(gate, up, dy), B_gate)    becomes gated_gradients(…)
    wide_gradient(swiglu(gate, dy), B_up)                    what that saves
    gradient_of_a(D, swiglu(gate, up))                       reads what that saves

It reads BF16. A large `up` is not kept for it, but computed again of the norm that the backward
pass makes anyway: a quarter of the memory of a step for a twentieth of its time.
"""

from collections.abc import Iterator, Sequence

from pyggml.backends.cuda.ops.lora.nodes import GATED_GRADIENTS
from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.backends.gated import GatedBack, gated_backs
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops import cpy
from pyggml.ops.layout.cpy import CPY

LARGE = 32 << 20  # bytes of `up` in a layer; where it takes less, its weights weigh more
_READERS = "wide_gradient", "wide_gradient", "gradient_of_a"


@graph_pass
def with_gated_gradients(graph: Graph) -> Graph:
    """The graph of wide products with gated units joined; the same graph if there are none."""
    normed = {t.src[0]: t.src[1] for t in graph.nodes if is_of(t, "gradient_of_a")}  # D -> its x
    new: dict[Tensor, Tensor] = {}
    for back in gated_backs(graph):
        readers = list(_readers(graph, back))
        x = normed.get(readers[1]) if len(readers) == len(back) else None
        if x is not None and not is_of(x, *FORMULAS) and _are_whole(back.dgate.src):
            gate, up, dy = map(bfloat16_copy, back.dgate.src)
            up = _again(up, x, graph)
            new |= _join((gate, up, dy), *readers)
    return rewrite(graph, new)


def _readers(graph: Graph, back: GatedBack) -> Iterator[Tensor]:
    """The only reader of each of the three, if it is the one that can take it in."""
    for t, name in zip(back, _READERS, strict=True):
        readers = graph.readers[t]
        if len(readers) == 1 and is_of(readers[0], name) and t not in graph.outputs:
            yield readers[0]


def _are_whole(operands: Sequence[Tensor]) -> bool:
    return all(t.is_contiguous and t.shape == operands[0].shape for t in operands)


def _join(
    operands: Sequence[Tensor], of_gate: Tensor, of_up: Tensor, of_a: Tensor
) -> dict[Tensor, Tensor]:
    (of_1, b_gate), (of_2, b_up) = ((t.params["scales"], t.src[1]) for t in (of_gate, of_up))
    joint = GATED_GRADIENTS(*operands, b_gate, b_up, scales=(*of_1, *of_2))
    of_up_now, unit = joint.saved
    return {of_gate: joint, of_up: of_up_now, of_a: again(of_a, of_a.src[0], unit)}


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
