"""Gated linear units and what their gradients need: see pyggml/ops/glu.py and glu_clipped.py."""

from __future__ import annotations

import numpy as np

from pyggml.backends.cuda import formulas as f
from pyggml.backends.cuda.driver import device
from pyggml.backends.cuda.elementwise import of_three, of_two
from pyggml.backends.cuda.formulas import ONE, sigmoid
from pyggml.backends.cuda.table import declare


@device
def _swiglu(gate, up):
    return f.silu(gate) * up


@device
def _reglu(gate, up):
    return f.relu(gate) * up


@device
def _geglu(gate, up):
    return f.gelu(gate) * up


@device
def _geglu_quick(gate, up):
    return f.gelu_quick(gate) * up


@device
def _geglu_erf(gate, up):
    return f.gelu_erf(gate) * up


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


for _name, _formula in {
    "swiglu": _swiglu,
    "reglu": _reglu,
    "geglu": _geglu,
    "geglu_quick": _geglu_quick,
    "geglu_erf": _geglu_erf,
    "swiglu_oai": _swiglu_clipped,
    "swiglu_clamp": _swiglu_clipped,
}.items():
    declare(_name, of_two(_formula))

for _name, _formula in {
    "swiglu_back_gate": _swiglu_back_gate,
    "swiglu_clipped_back_gate": _clipped_back_gate,
    "swiglu_clipped_back_up": _clipped_back_up,
}.items():
    declare(_name, of_three(_formula))
