"""RMS norm of heads and their rotation in one kernel, as Qwen 3 has them; and their gradients.

Each is one formula composed of two. Heads and gradients are F32 or BF16.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.fours import lies_in_fours
from pyggml.backends.cuda.ops.norm.by_row import holds_rows, rows_call
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.formulas.formula import Formula, formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import formulas, rms_norm_mul, rope_table
from pyggml.ops.attention.rope import rope_apply, rope_apply_back
from pyggml.ops.norm.norm_mul import RMS_NORM_MUL, RMS_NORM_MUL_BACK, rms_norm_mul_back

assert RMS_NORM_MUL.formula is not None and RMS_NORM_MUL_BACK.formula is not None
_TURN, _BACK = (formula(f, tiled=("table",)) for f in (formulas.turn, formulas.turn_back))
_NORM_TURN = _TURN.taking("norm_turn", "x", RMS_NORM_MUL.formula)
_TURN_NORM_BACK = RMS_NORM_MUL_BACK.formula.taking("turn_norm_back", "dy", _BACK)


def _are_whole(norm: Tensor, rope: Tensor, *others: Tensor) -> bool:
    """Whether all pairs of heads are turned, each half of fours, and all sources lie well."""
    n, table = rope.shape[-1], rope.src[1]
    whole = rope.params["neox"] and 2 * table.shape[2] == n == norm.shape[-1] and n % 8 == 0
    return whole and holds_rows(norm) and lies_in_fours(table, *others)


def _norms_first(m: Match, compute: Compute) -> bool:
    return not m.is_read(m.norm) and _are_whole(m.norm, m.turned, m.x, m.w)


def _turns_first(m: Match, compute: Compute) -> bool:
    return not m.is_read(m.turned) and _are_whole(m.back, m.turned, m.dy, m.x, m.w)


def _call(of: Formula, norm: CudaSite, rope: CudaSite, out: CudaSite, **arrays: Any) -> Call:
    """Of the formula's sources, where the rows are heads of tokens."""
    n_tokens, n_heads, n = rope.node.shape[-3:]
    heads = rope.node.n_elements // (n_tokens * n_heads * n), n_tokens, n_heads
    axes = [(1, n_tokens, 1) if s == "table" else heads for s in of.sources]
    return rows_call(of, norm, n, [out.out], [arrays[s] for s in of.sources], axes=axes)


def _bind_forward(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    norm, rope = sites
    x, w = norm.src
    return _call(_NORM_TURN, norm, rope, rope, x=x, w=w, table=rope.src[1])


def _bind_backward(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    rope, back = sites
    (x, w, _), (dy, table) = back.src, rope.src
    return _call(_TURN_NORM_BACK, back, rope, back, x=x, w=w, dy=dy, table=table)


def _sample(rng: np.random.Generator) -> Graph:
    """The norm of heads, turned, and the gradient of both."""
    x, w, dy = drawn(rng, 2, 5, 3, 16), drawn(rng, 16), drawn(rng, 2, 5, 3, 16)
    table = rope_table(leaf(np.array([0, 1, 5, 2, 9], np.int32)), n_dims=16, mode="neox")
    turned = rope_apply(rms_norm_mul(x, w, eps=1e-3), table, "neox")
    back = rms_norm_mul_back(x, w, rope_apply_back(dy, table, "neox"), eps=1e-3)
    return Graph.of(turned, back)


NORM_ROPE = Fusion(
    near("norm = rms_norm_mul(x, w); turned = rope_apply(norm, table)"),
    _norms_first, _bind_forward, _sample, Memory.INPLACE,
)  # fmt: skip
ROPE_BACK_NORM_BACK = Fusion(
    near("turned = rope_apply_back(dy, table); back = rms_norm_mul_back(x, w, turned)"),
    _turns_first, _bind_backward, _sample, Memory.INPLACE,
)  # fmt: skip
