"""Gated linear units: which there are, and both gradients of swiglu in one kernel, with its value
where the backward pass makes that again."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import lanes_of
from pyggml.backends.cuda.code.fours import lies_in_fours, loader, storer
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.formulas.formula import Formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.ops import OPS
from pyggml.ops.activation.glu import SWIGLU, SWIGLU_BACK_GATE


def _formulas_of(*sources: str) -> dict[str, Formula]:
    """By the names of ops: the formulas of just these sources, without settings."""
    formulas = {name: op.formula for name, op in OPS.items() if op.formula is not None}
    return {name: of for name, of in formulas.items() if of.signature == (sources, ())}


UNITS = _formulas_of("gate", "up")
GRADIENTS = _formulas_of("gate", "up", "dy")  # by the gate
assert SWIGLU.formula is not None and SWIGLU_BACK_GATE.formula is not None
_unit, _of_gate = lanes_of(SWIGLU.formula, 4), lanes_of(SWIGLU_BACK_GATE.formula, 4)


@cache
def _swiglu_back(n_results: int, in_bf16: tuple[bool, ...]) -> Any:
    """kernel(d_gate, d_up, unit, gate, up, dy); n_results: 3 if the unit is written; in_bf16: of
    each array whether it is BF16, else F32."""
    put_gate, put_up, put_unit = map(storer, in_bf16[:3])
    load_gate, load_up, load_dy = map(loader, in_bf16[3:])

    @kernel
    def swiglu_back(d_gate, d_up, unit, gate, up, dy):
        for four in range(cuda.grid(1), dy.size // 4, cuda.gridsize(1)):
            i = 4 * four
            g, u, d = load_gate(gate, i), load_up(up, i), load_dy(dy, i)
            put_gate(d_gate, i, *_of_gate(g, u, d, ()))
            put_up(d_up, i, *_unit(g, d, ()))
            if n_results == 3:
                put_unit(unit, i, *_unit(g, u, ()))

    return swiglu_back


def _are_gradients(m: Match, compute: Compute) -> bool:
    return m.is_read(m.of_gate) and lies_in_fours(m.gate, m.up, m.dy)


def _bind_swiglu_back(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    *units, of_gate, of_up = sites
    outs = of_gate.out, of_up.out, *(unit.out for unit in units)
    arrays = *(*outs, of_gate.out)[:3], *of_gate.src
    n = of_gate.node.n_elements
    run = _swiglu_back(len(outs), tuple(a.dtype == BF16.numpy for a in arrays))
    return per_element(run, n // 4, of_up.stream, *arrays)


def _gradients(rng: np.random.Generator) -> Graph:
    gate, up, dy = (drawn(rng, 7, 12) for _ in range(3))
    return Graph.of(SWIGLU_BACK_GATE(gate, up, dy), SWIGLU(gate, dy))


def _gradients_and_unit(rng: np.random.Generator) -> Graph:
    gate, up, dy = (drawn(rng, 7, 12) for _ in range(3))
    return Graph.of(SWIGLU(gate, up), SWIGLU_BACK_GATE(gate, up, dy), SWIGLU(gate, dy))


SWIGLU_BACKS_AND_UNIT = Fusion(
    near("""
        unit = swiglu(gate, up)
        of_gate = swiglu_back_gate(gate, up, dy)
        of_up = swiglu(gate, dy)
    """),
    _are_gradients, _bind_swiglu_back, _gradients_and_unit, Memory.INPLACE,
)  # fmt: skip
# The gradient of up is silu(gate)·dy, which is swiglu again.
SWIGLU_BACKS = Fusion(
    near("of_gate = swiglu_back_gate(gate, up, dy); of_up = swiglu(gate, dy)"),
    _are_gradients, _bind_swiglu_back, _gradients, Memory.INPLACE,
)  # fmt: skip
