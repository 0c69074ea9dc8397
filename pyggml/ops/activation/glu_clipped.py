"""Gated linear units with clipped inputs; s is the sigmoid.

    g = min(gate, limit),  u = clip(up, −limit, limit)
    swiglu_oai     g · s(alpha·g) · (u + 1)      (gpt-oss, arXiv:2508.10925)
    swiglu_clamp   g · s(g) · u

Both are one function with two numbers: alpha and the shift of u. Beyond the limit its slope is 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp
from pyggml.graph.op import NoGrad, Op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.jit.simd import sigmoid32
from pyggml.ops.activation.glu import gate_and_up, glu_op
from pyggml.ops.expect import NAN

_ONE = np.float32(1)
_SECOND_ORDER = NoGrad("second derivatives are out of scope")


def swiglu_oai(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    alpha: float = 1.702,
    limit: float = 7.0,
    swapped: bool = False,
) -> Tensor:
    """min(gate, limit)·s(alpha·…)·(clip(up) + 1), F32, shapes as swiglu (ggml's SWIGLU_OAI).

    Raises ShapeError if limit is not above 0.
    """
    return _clipped_unit(SWIGLU_OAI, gate_and_up(gate, up, swapped), alpha, limit, 1.0)


def swiglu_clamp(
    gate: Tensor, up: Tensor | None = None, *, limit: float, swapped: bool = False
) -> Tensor:
    """silu(min(gate, limit)) · clip(up, ±limit), F32, shapes as swiglu (ggml's SWIGLU_CLAMP).

    Raises ShapeError if limit is not above 0.
    """
    return _clipped_unit(SWIGLU_CLAMP, gate_and_up(gate, up, swapped), 1.0, limit, 0.0)


def _clipped_unit(
    unit: Op, sources: tuple[Tensor, Tensor], alpha: float, limit: float, shift: float
) -> Tensor:
    return unit(*sources, alpha=float(alpha), limit=float(limit), shift=shift)


@kernel
def _clipped(y, gate, up, alpha, limit, shift):
    for i in range(gate.size):
        g = min(gate[i], limit)
        y[i] = g * sigmoid32(alpha * g) * (min(max(up[i], -limit), limit) + shift)


@kernel
def _back_gate(dgate, gate, up, dy, alpha, limit, shift):
    for i in range(gate.size):
        u = min(max(up[i], -limit), limit) + shift
        g = min(gate[i], limit)  # so that an infinite gate has slope 0, not NaN
        s = sigmoid32(alpha * g)
        slope = s * (_ONE + alpha * g * (_ONE - s)) * np.float32(gate[i] < limit)
        dgate[i] = dy[i] * u * slope


@kernel
def _back_up(dup, gate, up, dy, alpha, limit, shift):
    for i in range(gate.size):
        g = min(gate[i], limit)
        dup[i] = dy[i] * g * sigmoid32(alpha * g) * np.float32(abs(up[i]) < limit)


def _s(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _clipped_ref(
    gate: np.ndarray, up: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    g = np.minimum(gate, limit)
    return np.asarray(g * _s(alpha * g) * (np.clip(up, -limit, limit) + shift))


def _back_gate_ref(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    s = _s(alpha * gate)
    slope = np.where(gate < limit, s * (1 + alpha * gate * (1 - s)), 0)
    return np.asarray(dy * (np.clip(up, -limit, limit) + shift) * slope)


def _back_up_ref(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    g = np.minimum(gate, limit)
    return np.where(np.abs(up) < limit, dy * g * _s(alpha * g), 0)


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dgate = dy · up · f'(gate), dup = dy · f(gate), 0 where a limit was reached"""
    src = (*node.src, dy)
    return BACK_GATE(*src, **node.params), BACK_UP(*src, **node.params)


def _check_limit(name: str, limit: float, **_: float) -> None:
    if not limit > 0:
        raise ShapeError(f"{name}: limit is {limit}, wanted more than 0")


_CLIPPED: dict[str, Any] = {
    "refuses": {"alpha": (), "limit": (0.0, -1.0, NAN), "shift": ()},
    "check": _check_limit,
}
_OAI = {"alpha": 1.702, "limit": 2.5, "shift": 1.0}
_CLAMP = {"alpha": 1.0, "limit": 1.5, "shift": 0.0}

SWIGLU_OAI = glu_op(
    "swiglu_oai", GGMLGLUOp.SWIGLU_OAI, _clipped, _clipped_ref, _grad, params=(_OAI,), **_CLIPPED
)
SWIGLU_CLAMP = glu_op(
    "swiglu_clamp",
    GGMLGLUOp.SWIGLU_CLAMP,
    _clipped,
    _clipped_ref,
    _grad,
    params=(_CLAMP,),
    **_CLIPPED,
)
BACK_GATE = glu_op(
    "swiglu_clipped_back_gate",
    GGMLOp.CUSTOM,
    _back_gate,
    _back_gate_ref,
    _SECOND_ORDER,
    n_sources=3,
    params=(_OAI, _CLAMP),
    **_CLIPPED,
)
BACK_UP = glu_op(
    "swiglu_clipped_back_up",
    GGMLOp.CUSTOM,
    _back_up,
    _back_up_ref,
    _SECOND_ORDER,
    n_sources=3,
    params=(_OAI, _CLAMP),
    **_CLIPPED,
)
