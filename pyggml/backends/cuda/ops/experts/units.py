"""Gated units of experts, whose rows have weights, with what stands around them in a step.

    weighted_unit    h = w·unit(gate, up), in bfloat16, for the product with ffn_down_exps
    unit_gradients   d_gate = w·g·up·silu'(gate), d_up = w·g·silu(gate), dw = Σ g·silu(gate)·up

where g is the gradient of h. Rows are those of tokens and their experts (T, U, F). Each of gate, up
and g is read once; they may be BF16.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import eights
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, warp_sum
from pyggml.backends.cuda.ops.glu import UNITS
from pyggml.backends.cuda.ops.lora.gated import gradients_of_unit
from pyggml.backends.cuda.ops.lora.operands import Types, in_words, loader_of, types_of
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite, own_op
from pyggml.backends.cuda.runtime.launches import launch, per_element
from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import OPS, Sample, Spec
from pyggml.graph.tensor import Tensor
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.layout.cpy import packed_leaf

_WARPS, _MOST_BLOCKS = 4, 1 << 16


@cache
def _weighted_unit_kernel(formula: str, types: Types) -> Any:
    load = loader_of(formula, types)

    @kernel
    def weigh_units(out, gate, up, weights, n):
        """n: eights of a row."""
        for i in range(cuda.grid(1), out.size // 8, cuda.gridsize(1)):
            w, e = weights[np.uint32(i) // n], load(gate, up, gate, 8 * i)
            x = in_words(
                (w * e[0], w * e[1], w * e[2], w * e[3], w * e[4], w * e[5], w * e[6], w * e[7])
            )
            ptx.store_words(out, 16 * i, x[0], x[1], x[2], x[3])

    return weigh_units


def _bind_weighted(site: CudaSite) -> Call:
    gate, up, _ = site.node.src
    run = _weighted_unit_kernel(site.node.params["formula"], types_of((gate, up)))
    n = np.uint32(gate.shape[-1] // 8)
    return per_element(run, site.out.size // 8, site.stream, site.out, *site.src, n)


@device
def _eight_gradients(gate, up, g, w):
    """(Σ g·unit, words of d_gate, words of d_up) of eight neighbours."""
    a = gradients_of_unit(gate[0], up[0], w * g[0])
    b = gradients_of_unit(gate[1], up[1], w * g[1])
    c = gradients_of_unit(gate[2], up[2], w * g[2])
    d = gradients_of_unit(gate[3], up[3], w * g[3])
    e = gradients_of_unit(gate[4], up[4], w * g[4])
    f = gradients_of_unit(gate[5], up[5], w * g[5])
    h = gradients_of_unit(gate[6], up[6], w * g[6])
    k = gradients_of_unit(gate[7], up[7], w * g[7])
    dot = (g[0] * a[2] + g[1] * b[2]) + (g[2] * c[2] + g[3] * d[2])
    dot += (g[4] * e[2] + g[5] * f[2]) + (g[6] * h[2] + g[7] * k[2])
    of_gate = in_words((a[0], b[0], c[0], d[0], e[0], f[0], h[0], k[0]))
    return dot, of_gate, in_words((a[1], b[1], c[1], d[1], e[1], f[1], h[1], k[1]))


@cache
def _gradients_kernel(types: Types) -> Any:
    load_gate, load_up, load_dy = map(eights, types)

    @kernel
    def gradients(d_gate, d_up, dots, gate, up, g, weights, n):
        """A warp for each row of n numbers."""
        lane = cuda.threadIdx.x
        for row in range(first_row(), dots.size, rows_apart()):
            w, dot = weights[row], ZERO
            for i in range(8 * lane, n, 8 * LANES):
                at = np.int64(row) * n + i
                of_gate, of_up, of_y = load_gate(gate, at), load_up(up, at), load_dy(g, at)
                more, a, b = _eight_gradients(of_gate, of_up, of_y, w)
                ptx.store_words(d_gate, 2 * at, a[0], a[1], a[2], a[3])
                ptx.store_words(d_up, 2 * at, b[0], b[1], b[2], b[3])
                dot += more
            dot = warp_sum(dot)
            if lane == 0:
                dots[row] = dot

    return gradients


def _bind_gradients(site: CudaSite) -> Call:
    gate, up, g, _ = site.node.src
    n_rows = site.saved[1].size
    grid = max(1, min(-(-n_rows // _WARPS), _MOST_BLOCKS))
    return launch(
        _gradients_kernel(types_of((gate, up, g))), grid, (LANES, _WARPS), site.stream, site.out,
        *site.saved, *site.src, gate.shape[-1],
    )  # fmt: skip


# -- weighted_unit --------------------------------------------------------------------------------


def _expect_rows(op: str, operands: Sequence[Tensor], weights: Tensor) -> None:
    """ShapeError unless operands are (T, U, F) of F32 or BF16, weights (T, U, 1) of F32."""
    for t in operands:
        expect_axes(op, "an operand", t, 3)
        expect(op, "an operand", t, operands[0].shape, BF16 if t.dtype is BF16 else F32)
    *rows, n = operands[0].shape
    expect(op, "weights", weights, (*rows, 1))
    if n % 8:
        raise ShapeError(f"{op}: rows of {n}, wanted a multiple of 8")


def _weighted_unit_spec(gate: Tensor, up: Tensor, weights: Tensor, formula: str) -> Spec:
    if formula not in UNITS:
        raise ShapeError(f"weighted_unit: formula is {formula!r}, wanted one of {sorted(UNITS)}")
    _expect_rows("weighted_unit", (gate, up), weights)
    return Spec(gate.shape, BF16)


def _weighted_unit(
    gate: np.ndarray, up: np.ndarray, weights: np.ndarray, formula: str
) -> Iterator[np.ndarray]:
    yield OPS[formula].ref(gate, up) * weights


def _samples_of(n_operands: int, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Operands in F32 and in BF16, with weights."""
    for n_tokens, n_used, n in ((7, 2, 24), (3, 3, 264)):
        shape, weights = (n_tokens, n_used, n), rng.standard_normal((n_tokens, n_used, 1))
        yield (*(rng.standard_normal(shape) for _ in range(n_operands)), weights)
        yield (*(packed_leaf(rng, shape, "BF16") for _ in range(n_operands)), weights)


def _weighted_unit_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for formula in ("swiglu", "reglu"):
        for arrays in _samples_of(2, rng):
            yield Sample(arrays, {"formula": formula})


WEIGHTED_UNIT = own_op(
    name="weighted_unit",
    spec=_weighted_unit_spec,
    results=_weighted_unit,
    samples=_weighted_unit_samples,
    refuses={"formula": ("", "relu", "swiglu_back_gate")},
    kernel=CudaKernel(_bind_weighted),
)

# -- unit_gradients -------------------------------------------------------------------------------


def _unit_gradients_spec(gate: Tensor, up: Tensor, g: Tensor, weights: Tensor) -> Spec:
    _expect_rows("unit_gradients", (gate, up, g), weights)
    return Spec(gate.shape, BF16)


def _unit_gradients(
    gate: np.ndarray, up: np.ndarray, g: np.ndarray, weights: np.ndarray
) -> Iterator[np.ndarray]:
    yield OPS["swiglu_back_gate"].ref(gate, up, weights * g)
    yield OPS["swiglu"].ref(gate, weights * g)
    yield (g * OPS["swiglu"].ref(gate, up)).sum(-1, keepdims=True)


UNIT_GRADIENTS = own_op(
    name="unit_gradients",
    spec=_unit_gradients_spec,
    saved=lambda gate, up, g, weights: (Spec(up.shape, BF16), Spec(weights.shape)),
    results=_unit_gradients,
    samples=lambda rng: map(Sample, _samples_of(3, rng)),
    kernel=CudaKernel(_bind_gradients),
)
