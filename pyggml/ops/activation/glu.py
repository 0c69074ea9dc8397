"""Gated linear units: an activated gate times `up` (Shazeer, arXiv:2002.05202); s is the sigmoid.

swiglu        gate · s(gate) · up
swiglu_back   its three: d(loss)/dgate; saved are d(loss)/dup, and swiglu once more
reglu, geglu, geglu_quick, geglu_erf   relu, gelu, gelu_quick, gelu_erf of the gate, times up

Two units clip their inputs: g = min(gate, limit), u = clip(up, −limit, limit).

swiglu_oai    g · s(alpha·g) · (u + 1), of gpt-oss, arXiv:2508.10925
swiglu_clamp  g · s(g) · u

Their formulas are in pyggml/ops/formulas.py. The gradient by the gate is an op, NAME_back_gate;
that by up is the unit itself with dy in the place of up, or for those that clip NAME_back_up.

Without `up`, the last axis of `gate` holds both: first the gate, then up; `swapped`, the reverse.
F16 and BF16 are computed as F32 (Op.halves).
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.formula import GRADIENT, joint
from pyggml.graph.dtypes import BF16
from pyggml.graph.ggml_enums import GGMLGLUOp
from pyggml.graph.op import OPS, Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor, leaf
from pyggml.kernels.formulas import by_formula
from pyggml.kernels.kernel import cpu_kernel
from pyggml.ops import formulas
from pyggml.ops.by_formula import draws, formula_op
from pyggml.ops.expect import NAN, expect
from pyggml.ops.layout.narrow import narrow


def swiglu(gate: Tensor, up: Tensor | None = None, swapped: bool = False) -> Tensor:
    """silu(gate) · up, F32, both (..., n); or gate (..., 2n) holds both (ggml's SWIGLU)."""
    return SWIGLU(*gate_and_up(gate, up, swapped))


def swiglu_back(gate: Tensor, up: Tensor, dy: Tensor) -> Tensor:
    """d(loss)/dgate, F32, of y = swiglu(gate, up): gate, up (..., n) BF16, dy (..., n) F32.

    Saved are d(loss)/dup and y, as dy. The CPU puts it in graphs
    (pyggml.backends.cpu.rewrites.joint_backs).
    """
    return SWIGLU_BACK(gate, up, dy)


def reglu(gate: Tensor, up: Tensor | None = None, swapped: bool = False) -> Tensor:
    """relu(gate) · up, F32, both (..., n); or gate (..., 2n) holds both (ggml's REGLU)."""
    return REGLU(*gate_and_up(gate, up, swapped))


def geglu(gate: Tensor, up: Tensor | None = None, swapped: bool = False) -> Tensor:
    """gelu(gate) · up, F32, both (..., n); or gate (..., 2n) holds both (ggml's GEGLU)."""
    return GEGLU(*gate_and_up(gate, up, swapped))


def geglu_quick(gate: Tensor, up: Tensor | None = None, swapped: bool = False) -> Tensor:
    """gelu_quick(gate) · up, F32, shapes as geglu (ggml's GEGLU_QUICK)."""
    return GEGLU_QUICK(*gate_and_up(gate, up, swapped))


def geglu_erf(gate: Tensor, up: Tensor | None = None, swapped: bool = False) -> Tensor:
    """gelu_erf(gate) · up, F32, shapes as geglu (ggml's GEGLU_ERF)."""
    return GEGLU_ERF(*gate_and_up(gate, up, swapped))


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
    return SWIGLU_OAI(*gate_and_up(gate, up, swapped), alpha=float(alpha), limit=float(limit))


def swiglu_clamp(
    gate: Tensor, up: Tensor | None = None, *, limit: float, swapped: bool = False
) -> Tensor:
    """silu(min(gate, limit)) · clip(up, ±limit), F32, shapes as swiglu (ggml's SWIGLU_CLAMP).

    Raises ShapeError if limit is not above 0.
    """
    return SWIGLU_CLAMP(*gate_and_up(gate, up, swapped), limit=float(limit))


def gate_and_up(gate: Tensor, up: Tensor | None, swapped: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), cut out of `gate` if `up` is None. ShapeError for `swapped` with an `up`.

    Of an odd width the last column is in neither, as in ggml.
    """
    if up is not None and swapped:
        raise ShapeError("a gated unit with gate and up apart, wanted swapped=False")
    if up is not None:
        return gate, up
    n = gate.shape[-1] // 2 if gate.shape else 0
    first, second = narrow(gate, -1, 0, n), narrow(gate, -1, n, n)
    return (second, first) if swapped else (first, second)


def _check_limit(name: str, limit: float, **_: float) -> None:
    if not limit > 0:
        raise ShapeError(f"{name}: limit is {limit}, wanted more than 0")


_PAIRS = draws(0.1, 4, n_sources=2)  # relu has a kink at 0
_LIMITS = {"limit": (0.0, -1.0, NAN)}

SWIGLU = formula_op(formulas.swiglu, GGMLGLUOp.SWIGLU, _PAIRS)
REGLU = formula_op(formulas.reglu, GGMLGLUOp.REGLU, _PAIRS)
GEGLU = formula_op(formulas.geglu, GGMLGLUOp.GEGLU, _PAIRS)
GEGLU_QUICK = formula_op(formulas.geglu_quick, GGMLGLUOp.GEGLU_QUICK, _PAIRS)
GEGLU_ERF = formula_op(formulas.geglu_erf, GGMLGLUOp.GEGLU_ERF, _PAIRS)
SWIGLU_OAI = formula_op(
    formulas.swiglu_oai,
    GGMLGLUOp.SWIGLU_OAI,
    draws(0.1, 4, n_sources=2, alpha=1.702, limit=2.5),
    {"alpha": (), **_LIMITS},
    _check_limit,
)
SWIGLU_CLAMP = formula_op(
    formulas.swiglu_clamp,
    GGMLGLUOp.SWIGLU_CLAMP,
    draws(0.1, 4, n_sources=2, limit=1.5),
    _LIMITS,
    _check_limit,
)

# -- swiglu_back --------------------------------------------------------------------------------

SWIGLU_BACK_GATE = OPS["swiglu_back_gate"]
_SWIGLU, _OF_GATE = SWIGLU.formula, SWIGLU_BACK_GATE.formula
assert _SWIGLU is not None and _OF_GATE is not None
SWIGLU_GRADIENTS = joint("swiglu_back", [_OF_GATE, _SWIGLU.of(up=GRADIENT), _SWIGLU])


def _swiglu_back_spec(gate: Tensor, up: Tensor, dy: Tensor) -> Spec:
    expect("swiglu_back", "gate", gate, gate.shape, BF16)
    expect("swiglu_back", "up", up, gate.shape, BF16)
    expect("swiglu_back", "dy", dy, gate.shape)
    return Spec(gate.shape)


def _swiglu_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (2, 3, 5), (67,), (3, 4096), (int(rng.integers(1, 9)), 33)]:
        bits = rng.standard_normal((2, *shape), np.float32).view(np.uint32) >> 16
        gate, up = (leaf(b.astype(np.uint16), dtype=BF16) for b in bits)
        yield Sample((gate, up, rng.standard_normal(shape)))


SWIGLU_BACK = op(
    name="swiglu_back",
    spec=_swiglu_back_spec,
    ref=_OF_GATE,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_swiglu_back_samples,
    memory=Memory.INPLACE,
    saved=lambda gate, up, dy: (Spec(gate.shape), Spec(gate.shape)),
    fuses=("cpy", "swiglu", "swiglu_back_gate"),
)
cpu_kernel(SWIGLU_BACK, by_formula(SWIGLU_GRADIENTS))
