"""Units of experts in tiles: what stands between their products becomes one kernel in each pass."""

from collections.abc import Sequence

from pyggml.backends.cuda.ops.experts.products import in_tiles
from pyggml.backends.cuda.ops.experts.units import UNIT_GRADIENTS, WEIGHTED_UNIT
from pyggml.backends.cuda.ops.glu import UNITS
from pyggml.backends.cuda.rewrites.gated_gradients import bfloat16_copy
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.graph.dtypes import F32
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor
from pyggml.ops.in_bf16 import bf16_op

_EIGHT = 8  # numbers that a thread takes at once


def _are_one_row(m: Match) -> bool:
    """Whether a token's rows are one for all experts."""
    dy, shape = m.dy, m.rows.shape
    one = dy.is_contiguous and dy.shape == (shape[0], 1, shape[2])
    return one and in_tiles(m.product, "bf16")


def _go_to_tiles(m: Match, *tensors: Tensor) -> bool:
    """Whether all who read them are products in tiles, which round them."""
    return all(
        m.graph.readers[t] and t not in m.graph.outputs
        and all(_rounds_in_tiles(r, t) for r in m.graph.readers[t])
        for t in tensors
    )  # fmt: skip


def _rounds_in_tiles(reader: Tensor, t: Tensor) -> bool:
    is_product = is_of(reader, "mul_mat_id", "mul_mat_id_back")
    return is_product and reader.src[1] is t and in_tiles(reader, "bf16")


def _rounded_readers(m: Match, *tensors: Tensor) -> Replacements:
    """The products that read them, as they read BF16."""
    readers = [r for t in tensors for r in m.graph.readers[t]]
    return {r: bf16_op(r.op, (1,), ())(*r.src) for r in readers if r.op is not None}


def _are_rows(operands: Sequence[Tensor], weights: Tensor) -> bool:
    """Whether the operands have the same rows, and the weights a number for each."""
    shape = operands[0].shape
    alike = all(t.shape == shape and t.is_contiguous and t.dtype is F32 for t in operands)
    of_rows = len(shape) == 3 and weights.shape == (*shape[:-1], 1) and weights.is_contiguous
    return alike and of_rows and shape[-1] % _EIGHT == 0


def _is_weighted(m: Match) -> bool:
    plain = not m.y.params and _are_rows((m.gate, m.up), m.weights)
    return plain and _go_to_tiles(m, m.weighted)


def _weighted(m: Match) -> Replacements:
    assert m.y.op is not None
    unit = WEIGHTED_UNIT(m.gate, m.up, m.weights, formula=m.y.op.name)
    return {m.weighted: unit, **_rounded_readers(m, m.weighted)}


def _are_gradients(m: Match) -> bool:
    of_rows = m.dw.shape == m.weights.shape and _are_rows((m.gate, m.up, m.g), m.weights)
    return of_rows and _go_to_tiles(m, m.dgate, m.dup)


def _gradients(m: Match) -> Replacements:
    joint = UNIT_GRADIENTS(bfloat16_copy(m.gate), bfloat16_copy(m.up), m.g, m.weights)
    results = dict(zip((m.dgate, m.dup, m.dw), (joint, *joint.saved), strict=True))
    return {**results, **_rounded_readers(m, m.dgate, m.dup)}


EXPERT_UNITS = (
    Rewrite(
        Pattern("""
            _rows = repeat(dy)
            product = mul_mat_id_back(w, _rows, ids)
        """),
        _are_one_row,
        lambda m: {m.product: again(m.product, m.w, m.dy, m.ids)},
    ),
    Rewrite(
        Pattern(f"""
            _y = ({" | ".join(UNITS)})(gate, up)
            weighted = mul(_y, weights)
        """),
        _is_weighted,
        _weighted,
    ),
    Rewrite(
        Pattern("""
            dy = mul(g, weights)
            _y = swiglu(gate, up)
            dup = swiglu(gate, dy)
            dgate = swiglu_back_gate(gate, up, dy)
            product = mul(g, _y) or mul(_y, g)
            dw = repeat_back(product)
        """),
        _are_gradients,
        _gradients,
    ),
)
