"""Gated linear units and what their gradients need: see ops/activation."""

from collections.abc import Sequence

import numpy as np

from pyggml.backends.cuda.code import formulas as f
from pyggml.backends.cuda.code.formulas import ONE, sigmoid
from pyggml.backends.cuda.code.fours import lies_in_fours, load_four, store_four
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.elementwise import of_three, of_two
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.fusion import Fusion
from pyggml.backends.cuda.runtime.kernel import Compute, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.op import Memory
from pyggml.graph.tensor import Tensor


@device
def _swiglu(gate, up):
    return f.silu(gate) * up


@device
def _swiglu_clipped(gate, up, alpha, limit, shift):
    g = min(gate, limit)
    return g * sigmoid(alpha * g) * (min(max(up, -limit), limit) + shift)


@device
def _swiglu_back_gate(gate, up, dy):
    return dy * up * f.silu_slope(gate)


@device
def _clipped_back_gate(gate, up, dy, alpha, limit, shift):
    u = min(max(up, -limit), limit) + shift
    g = min(gate, limit)  # so that an infinite gate has slope 0, not NaN
    s = sigmoid(alpha * g)
    return dy * u * s * (ONE + alpha * g * (ONE - s)) * np.float32(gate < limit)


@device
def _clipped_back_up(gate, up, dy, alpha, limit, shift):
    g = min(gate, limit)
    return dy * g * sigmoid(alpha * g) * np.float32(abs(up) < limit)


# Of two numbers, and of three, which have no parameters.
OF_TWO = {
    "swiglu": _swiglu,
    "reglu": device(lambda gate, up: f.relu(gate) * up),
    "geglu": device(lambda gate, up: f.gelu(gate) * up),
    "geglu_quick": device(lambda gate, up: f.gelu_quick(gate) * up),
    "geglu_erf": device(lambda gate, up: f.gelu_erf(gate) * up),
}
OF_THREE = {"swiglu_back_gate": _swiglu_back_gate}

for _name, _formula in {
    **OF_TWO,
    "swiglu_oai": _swiglu_clipped,
    "swiglu_clamp": _swiglu_clipped,
}.items():
    declare(_name, of_two(_formula))

# -- both gradients of swiglu -------------------------------------------------------------------


@kernel
def _swiglu_back(d_gate, d_up, gate, up, dy):
    for four in range(cuda.grid(1), dy.size // 4, cuda.gridsize(1)):
        i = 4 * four
        g, u, d = load_four(gate, i), load_four(up, i), load_four(dy, i)
        store_four(
            d_gate, i, _swiglu_back_gate(g[0], u[0], d[0]), _swiglu_back_gate(g[1], u[1], d[1]),
            _swiglu_back_gate(g[2], u[2], d[2]), _swiglu_back_gate(g[3], u[3], d[3]),
        )  # fmt: skip
        store_four(
            d_up, i, _swiglu(g[0], d[0]), _swiglu(g[1], d[1]), _swiglu(g[2], d[2]),
            _swiglu(g[3], d[3]),
        )  # fmt: skip


def _are_gradients(nodes: Sequence[Tensor], is_read: Sequence[bool], compute: Compute) -> bool:
    """The gradient of up is silu(gate)·dy, which is swiglu again."""
    of_gate, of_up = nodes
    gate, _, dy = of_gate.src
    return all(is_read) and of_up.src == (gate, dy) and lies_in_fours(*of_gate.src)


def _bind_swiglu_back(sites: Sequence[Site], is_read: Sequence[bool]) -> Call:
    of_gate, of_up = sites
    arrays, n = (of_gate.out, of_up.out, *of_gate.src), of_gate.node.n_elements
    return per_element(_swiglu_back, n // 4, of_up.stream, *arrays)


SWIGLU_BACKS = Fusion(
    ("swiglu_back_gate", "swiglu"), _are_gradients, _bind_swiglu_back, Memory.INPLACE
)

for _name, _formula in {
    **OF_THREE,
    "swiglu_clipped_back_gate": _clipped_back_gate,
    "swiglu_clipped_back_up": _clipped_back_up,
}.items():
    declare(_name, of_three(_formula))
