"""Experts of few rows with what stands around them in generation: gate, weights, sum.

A token waits for launches: so gate, up, their unit and the weights are one, the sum over experts
and the residual another. Which experts they are is router.py's.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import load_four, store_four, sum_of_fours, vectorizable
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.gemm.few_experts import expert_products
from pyggml.backends.cuda.ops.experts.products import are_few, few_rows
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import early_kernel, follow, least_shared
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import launch, per_element
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import leaf
from pyggml.ops import add, mul, mul_mat_id, repeat_back, reshape, scale, swiglu
from pyggml.ops.layout.cpy import packed_leaf

# -- gate, up, their unit and the weights ---------------------------------------------------------


def _are_gated(m: Match, compute: Compute) -> bool:
    """silu(x · gate[e]ᵀ) · (x · up[e]ᵀ) of few rows."""
    alike = m.w_gate.dtype is m.w_up.dtype and m.w_gate.shape == m.w_up.shape
    are_inside = not m.is_read(m.gate, m.up)
    return alike and are_inside and are_few(m.gate, compute) and are_few(m.up, compute)


def _are_weighted(m: Match, compute: Compute) -> bool:
    """These, each row times a weight of its own."""
    of_rows = m.weights.is_contiguous and m.weights.shape == (*m.unit.shape[:-1], 1)
    return of_rows and not m.is_read(m.unit) and _are_gated(m, compute)


def _bind_gated(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    gate, up, gated = sites[:3]
    weights, last = None, sites[-1]
    if last is not gated:
        places = zip(last.node.src, last.src, strict=True)
        weights = next(array for t, array in places if t.root is not gated.node)
    product = replace(few_rows(gate), out=last.out, up=up.src[0], weights=weights)
    return expert_products(product, last.stream)


# -- the sum over experts, and a residual ---------------------------------------------------------

_THREADS, _MOST_BLOCKS = small(128, 4), small(1056)
_MANY = 1 << 16  # numbers of the sum from which on threads take four each


def _add_experts(out, other, y, n, n_used):
    """out[t, i] = other[t, i] + Σ_u y[t, u, i]; out may be other."""
    follow()
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        at, total = i // n * n_used * n + i % n, ZERO
        for u in range(n_used):
            total += y[at + u * n]
        out[i] = other[i] + total


@kernel
def _add_many_experts(out, other, y, n, n_used):
    """The same of many tokens, in fours; n of them in a row."""
    for i in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
        y_sum, o = sum_of_fours(y, i, n, n_used), load_four(other, 4 * i)
        store_four(out, 4 * i, o[0] + y_sum[0], o[1] + y_sum[1], o[2] + y_sum[2], o[3] + y_sum[3])


def _is_sum(m: Match, compute: Compute) -> bool:
    """Σ_u y[:, u] + other."""
    shape = m.y.shape
    of_experts = len(shape) == 3 and m.over.shape == (shape[0], 1, shape[2])
    alike = m.other.n_elements == m.over.n_elements == m.total.n_elements
    plain = all(t.dtype is F32 and t.is_contiguous for t in (m.y, *m.total.src))
    return of_experts and alike and plain and not m.is_read(m.over)


def _bind_sum(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    over, total = sites
    other = next(a for a in total.src if a is not None)
    _, n_used, n = over.node.src[0].shape
    if total.out.size > _MANY and n % 4 == 0 and vectorizable(total.out, other, over.src[0]):
        sizes = np.uint32(n // 4), np.uint32(n_used)
        return per_element(
            _add_many_experts, total.out.size // 4, total.stream, total.out, other, over.src[0],
            *sizes,
        )  # fmt: skip
    blocks = max(1, min(-(-total.out.size // _THREADS), _MOST_BLOCKS))
    return launch(
        early_kernel(_add_experts), blocks, _THREADS, total.stream, total.out, other, over.src[0],
        n, n_used, shared_bytes=least_shared(),
    )  # fmt: skip


def _units(rng: np.random.Generator, weighted: bool) -> Graph:
    """Gate, up and their unit of three of five experts, for two tokens."""
    ids, x = leaf(np.array([[4, 0, 2], [2, 3, 1]], np.int32)), drawn(rng, 2, 1, 512)
    gate, up = (mul_mat_id(packed_leaf(rng, (5, 40, 512), "Q4_K"), x, ids) for _ in range(2))
    inner = swiglu(gate, up)
    return Graph.of(mul(inner, drawn(rng, 2, 3, 1)) if weighted else scale(inner, 2.0))


def _sum_of_experts(rng: np.random.Generator) -> Graph:
    y = repeat_back(drawn(rng, 3, 4, 24), (3, 1, 24))
    return Graph.of(add(drawn(rng, 3, 24), reshape(y, (3, 24))))


_GATED = """\
gate = mul_mat_id(w_gate, x, ids)
up = mul_mat_id(w_up, x, ids)
unit = swiglu(view(gate), view(up))
"""
_WEIGHTED = "weighted = mul(view(unit), weights) or mul(weights, view(unit))"
EXPERTS_WEIGHTED = Fusion(
    near(_GATED + _WEIGHTED), _are_weighted, _bind_gated, partial(_units, weighted=True)
)
EXPERTS_GATED = Fusion(near(_GATED), _are_gated, _bind_gated, partial(_units, weighted=False))
# The sum may lie where what is added does, but not where the experts' results do.
EXPERTS_SUM = Fusion(
    near("over = repeat_back(y); total = add(other, view(over)) or add(view(over), other)"),
    _is_sum, _bind_sum, _sum_of_experts, Memory.INPLACE_FIRST, leads=1,
)  # fmt: skip
