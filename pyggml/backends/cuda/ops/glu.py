"""Gated linear units: which there are, and both gradients of swiglu in one kernel."""

from collections.abc import Sequence

import numpy as np

from pyggml.backends.cuda.code.formulas import lanes_of
from pyggml.backends.cuda.code.fours import lies_in_fours, load_four, store_four
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.formulas.formula import Formula
from pyggml.graph import Graph
from pyggml.graph.call import Call
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


@kernel
def _swiglu_back(d_gate, d_up, gate, up, dy):
    for four in range(cuda.grid(1), dy.size // 4, cuda.gridsize(1)):
        i = 4 * four
        g, u, d = load_four(gate, i), load_four(up, i), load_four(dy, i)
        store_four(d_gate, i, *_of_gate(g, u, d, ()))
        store_four(d_up, i, *_unit(g, d, ()))


def _are_gradients(m: Match, compute: Compute) -> bool:
    return m.is_read(m.of_gate) and lies_in_fours(m.gate, m.up, m.dy)


def _bind_swiglu_back(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    of_gate, of_up = sites
    n = of_gate.node.n_elements
    return per_element(_swiglu_back, n // 4, of_up.stream, of_gate.out, of_up.out, *of_gate.src)


def _gradients(rng: np.random.Generator) -> Graph:
    gate, up, dy = (drawn(rng, 7, 12) for _ in range(3))
    return Graph.of(SWIGLU_BACK_GATE(gate, up, dy), SWIGLU(gate, dy))


# The gradient of up is silu(gate)·dy, which is swiglu again.
SWIGLU_BACKS = Fusion(
    near("of_gate = swiglu_back_gate(gate, up, dy); of_up = swiglu(gate, dy)"),
    _are_gradients, _bind_swiglu_back, _gradients, Memory.INPLACE,
)  # fmt: skip
