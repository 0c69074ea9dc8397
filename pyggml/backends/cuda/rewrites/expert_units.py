"""Units of experts in tiles. What stands between their products becomes one kernel in each pass:

    mul_mat_id(W, mul(swiglu(gate, up), w), ids)      reads weighted_unit(gate, up, w)
    swiglu_back_gate(gate, up, mul(g, w))             becomes unit_gradients(gate, up, g, w)
    swiglu(gate, mul(g, w))                           what that saves
    repeat_back(mul(g, swiglu(gate, up)))             likewise: the gradient of w

And mul_mat_id_back(W, repeat(dy), ids) reads dy, one row for all experts of a token.
"""

from collections.abc import Sequence

from pyggml.backends.cuda.ops.expert_units import UNIT_GRADIENTS, WEIGHTED_UNIT
from pyggml.backends.cuda.ops.experts import in_tiles
from pyggml.backends.cuda.ops.glu import UNITS
from pyggml.backends.cuda.rewrites.gated_gradients import bfloat16_copy
from pyggml.backends.cuda.runtime.kernel import again, bf16_op, is_of
from pyggml.backends.gated import GatedBack, gated_backs
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

_EIGHT = 8  # numbers that a thread takes at once


@graph_pass
def with_expert_units(graph: Graph) -> Graph:
    """The graph with such units joined and no rows repeated; the same graph if it has none."""
    new: dict[Tensor, Tensor] = {}
    for t in graph.nodes:
        if is_of(t, "mul_mat_id_back") and in_tiles(t, "bf16") and _is_repeated(t.src[1]):
            new[t] = again(t, t.src[0], t.src[1].src[0], t.src[2])
        elif (unit := _weighted_unit_of(t, graph)) is not None:
            new[t] = unit
    for back in gated_backs(graph):
        new |= _unit_gradients_of(back, graph)
    rounded = [t for t, unit in new.items() if unit.dtype is BF16]
    for product in (r for t in rounded for r in graph.readers[t]):
        op, src = bf16_op(product.op, (1,), ()), new.get(product, product).src
        new[product] = op(*src)
    return rewrite(graph, new)


def _is_repeated(dy: Tensor) -> bool:
    """Whether its rows are one for all experts of a token."""
    if not is_of(dy, "repeat") or not dy.src[0].is_contiguous:
        return False
    return dy.src[0].shape == (dy.shape[0], 1, dy.shape[2])


def _goes_to_tiles(t: Tensor, graph: Graph) -> bool:
    """Whether all who read t are products in tiles, which round it."""
    readers = graph.readers[t]
    alone = bool(readers) and t not in graph.outputs
    return alone and all(_rounds_in_tiles(r, t) for r in readers)


def _rounds_in_tiles(reader: Tensor, t: Tensor) -> bool:
    is_product = is_of(reader, "mul_mat_id", "mul_mat_id_back")
    return is_product and reader.src[1] is t and in_tiles(reader, "bf16")


def _weighted_unit_of(t: Tensor, graph: Graph) -> Tensor | None:
    """What stands for the product of a unit and the weights of its rows."""
    if not is_of(t, "mul") or not _goes_to_tiles(t, graph):
        return None
    unit, weights = t.src
    if not is_of(unit, *UNITS) or unit.params or not _are_rows(unit.src, weights):
        return None
    assert unit.op is not None
    gate, up = unit.src
    return WEIGHTED_UNIT(gate, up, weights, formula=unit.op.name)


def _are_rows(operands: Sequence[Tensor], weights: Tensor) -> bool:
    """Whether the operands have the same rows, and the weights a number for each."""
    shape = operands[0].shape
    alike = all(t.shape == shape and t.is_contiguous and t.dtype is F32 for t in operands)
    of_rows = len(shape) == 3 and weights.shape == (*shape[:-1], 1) and weights.is_contiguous
    return alike and of_rows and shape[-1] % _EIGHT == 0


def _unit_gradients_of(back: GatedBack, graph: Graph) -> dict[Tensor, Tensor]:
    """What stands for the gradients of gate, up and the weights; nothing if one of them is not
    there, or others read what would not be."""
    gate, up, dy = back.dgate.src
    if not is_of(dy, "mul") or not all(_goes_to_tiles(t, graph) for t in back[:2]):
        return {}
    g, weights = dy.src
    if set(graph.readers[dy]) != set(back[:2]) or not _are_rows((gate, up, g), weights):
        return {}
    for product in graph.readers[back.y]:
        if is_of(product, "mul") and set(product.src) == {g, back.y}:
            sums = graph.readers[product]
            if len(sums) == 1 and is_of(sums[0], "repeat_back") and sums[0].shape == weights.shape:
                joint = UNIT_GRADIENTS(bfloat16_copy(gate), bfloat16_copy(up), g, weights)
                d_up, dw = joint.saved
                return {back.dgate: joint, back.dup: d_up, sums[0]: dw}
    return {}
