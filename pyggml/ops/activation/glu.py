"""Gated linear units: an activated gate times `up` (Shazeer, arXiv:2002.05202); s is the sigmoid.

swiglu            gate · s(gate) · up
swiglu_back_gate  dy · up · s · (1 + gate · (1 - s))
swiglu_back       the same; saved are dup = dy · gate · s, and swiglu once more
reglu, geglu, geglu_quick, geglu_erf   relu, gelu, gelu_quick, gelu_erf of the gate, times up

Two units clip their inputs: g = min(gate, limit), u = clip(up, −limit, limit). They are one
function with two numbers, alpha and the shift of u; beyond the limit its slope is 0.

swiglu_oai        g · s(alpha·g) · (u + 1), of gpt-oss, arXiv:2508.10925
swiglu_clamp      g · s(g) · u

Without `up`, the last axis of `gate` holds both: first the gate, then up; `swapped`, the reverse.
F16 and BF16 are computed as F32 (Op.halves).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp
from pyggml.graph.op import (
    NO_SETTINGS,
    OPS,
    GradRule,
    Memory,
    NoGrad,
    Op,
    Refused,
    Sample,
    Spec,
    op,
)
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import exact, kernel, parallel, prange
from pyggml.jit.simd import exp32, sigmoid32
from pyggml.kernels.kernel import Site, cpu_kernel, flat
from pyggml.ops.activation.activation import relu, sigmoid_ref
from pyggml.ops.activation.gelu import gelu, gelu_erf, gelu_quick
from pyggml.ops.arithmetic.arith import mul
from pyggml.ops.arithmetic.unary import Layout
from pyggml.ops.expect import NAN, expect, expect_type
from pyggml.ops.layout.narrow import narrow
from pyggml.ops.strips import strip, strips
from pyggml.quants.bits import bf16_to_float

_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)
_QUICK = np.float32(1.702)
_CUBE = np.float32(0.044715)
_TWICE = np.float32(2 * math.sqrt(2 / math.pi))  # gelu(x) = x · s(2 √(2/π) (x + 0.044715 x³))
_MINUS_ROOT_HALF = np.float32(-math.sqrt(0.5))
_SECOND_ORDER = NoGrad("second derivatives are out of scope")


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


def _samples(
    n_sources: int, params: tuple[Mapping[str, float], ...]
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Samples of n_sources arrays, each with all of these parameters."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for shape in [(1, 1), (3, 8), (2, 3, 5), (67,)]:
            magnitude = rng.uniform(0.1, 4.0, (n_sources, *shape))  # relu has a kink at 0
            arrays = tuple(magnitude * rng.choice([-1.0, 1.0], magnitude.shape))
            yield from (Sample(arrays, p) for p in params)

    return samples


def glu_op(
    name: str,
    ggml: GGMLGLUOp | GGMLOp,
    code: Callable[..., None],
    ref: Callable[..., np.ndarray],
    grad: GradRule | NoGrad,
    arrays: Layout = flat,
    n_sources: int = 2,
    params: tuple[Mapping[str, float], ...] = ({},),
    refuses: Refused = NO_SETTINGS,
    check: Callable[..., None] = lambda name, **_: None,
) -> Op:
    """Declare y_i = f(a_i, b_i, …), F32; code(y, *sources, *params) gets arrays as `arrays` says.

    `params` are the parameters of the samples; check(name, **params) raises ShapeError for the
    values in `refuses`.
    """

    def spec(gate: Tensor, *others: Tensor, **settings: float) -> Spec:
        expect_type(name, "gate", gate)
        for i, t in enumerate(others, 1):
            expect(name, f"source {i}", t, gate.shape)
        check(name, **settings)
        return Spec(gate.shape)

    new = op(
        name=name,
        ggml=ggml,
        spec=spec,
        ref=ref,
        grad=grad,
        samples=_samples(n_sources, params),
        refuses=refuses,
        memory=Memory.INPLACE,
        halves=True,
    )
    cpu_kernel(new, arrays(code))
    return new


# -- swiglu -------------------------------------------------------------------------------------


@parallel
def _swiglu(y, gate, up):
    for r in prange(gate.shape[0]):
        for c in range(gate.shape[1]):
            y[r, c] = gate[r, c] * sigmoid32(gate[r, c]) * up[r, c]


def _swiglu_ref(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return np.asarray(gate / (1 + np.exp(-gate)) * up)


def _swiglu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dgate = dy · up · silu'(gate), dup = dy · silu(gate)

    dy · silu(gate) is swiglu(gate, dy).
    """
    gate, up = node.src
    return SWIGLU_BACK_GATE(gate, up, dy), SWIGLU(gate, dy)


@parallel
def _swiglu_back_gate(dgate, gate, up, dy):
    for r in prange(gate.shape[0]):
        for c in range(gate.shape[1]):
            s = sigmoid32(gate[r, c])
            dgate[r, c] = dy[r, c] * up[r, c] * s * (_ONE + gate[r, c] * (_ONE - s))


def _swiglu_back_gate_ref(gate: np.ndarray, up: np.ndarray, dy: np.ndarray) -> np.ndarray:
    s = 1 / (1 + np.exp(-gate))
    return np.asarray(dy * up * s * (1 + gate * (1 - s)))


SWIGLU = glu_op("swiglu", GGMLGLUOp.SWIGLU, _swiglu, _swiglu_ref, _swiglu_grad, strips)
SWIGLU_BACK_GATE = glu_op(
    "swiglu_back_gate",
    GGMLOp.CUSTOM,
    _swiglu_back_gate,
    _swiglu_back_gate_ref,
    _SECOND_ORDER,
    strips,
    n_sources=3,
)

# -- swiglu_back --------------------------------------------------------------------------------


def _swiglu_back_spec(gate: Tensor, up: Tensor, dy: Tensor) -> Spec:
    expect("swiglu_back", "gate", gate, gate.shape, BF16)
    expect("swiglu_back", "up", up, gate.shape, BF16)
    expect("swiglu_back", "dy", dy, gate.shape)
    return Spec(gate.shape)


def _swiglu_back_saved(gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Spec, ...]:
    return Spec(gate.shape), Spec(gate.shape)


@exact
def _quotient(a, b, c):
    """a · b / c: what LLVM makes of a · (1 / c) · b in _swiglu."""
    return a * b / c


@parallel
def _swiglu_back(dgate, gate, up, dy, dup, y):
    for i in prange(gate.shape[0]):
        for j in range(gate.shape[1]):
            g, u, d = bf16_to_float(gate[i, j]), bf16_to_float(up[i, j]), dy[i, j]
            c = _ONE + exp32(-g)
            s = _ONE / c
            y[i, j] = _quotient(g, u, c)
            dup[i, j] = _quotient(g, d, c)
            dgate[i, j] = d * u * s * (_ONE + g * (_ONE - s))


def _swiglu_back_run(site: Site) -> Call:
    n = strip(site.out.shape)
    arrays = (site.out, *site.src, *site.saved)
    return Call(_swiglu_back, *(a.reshape(-1, n) for a in arrays))


def _swiglu_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for shape in [(1, 1), (2, 3, 5), (67,), (3, 4096), (int(rng.integers(1, 9)), 33)]:
        bits = rng.standard_normal((2, *shape), np.float32).view(np.uint32) >> 16
        gate, up = (leaf(b.astype(np.uint16), dtype=BF16) for b in bits)
        yield Sample((gate, up, rng.standard_normal(shape)))


SWIGLU_BACK = op(
    name="swiglu_back",
    ggml=GGMLOp.CUSTOM,
    spec=_swiglu_back_spec,
    ref=_swiglu_back_gate_ref,
    grad=_SECOND_ORDER,
    samples=_swiglu_back_samples,
    refuses=NO_SETTINGS,
    memory=Memory.INPLACE,
    saved=_swiglu_back_saved,
    fuses=("cpy", "swiglu", "swiglu_back_gate"),
)
cpu_kernel(SWIGLU_BACK, _swiglu_back_run)

# -- the others ---------------------------------------------------------------------------------


def _product_grad(activation: Callable[[Tensor], Tensor]) -> GradRule:
    """The gradient of mul(activation(gate), up); it computes the activation again."""

    def grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dgate = dy · up · f'(gate), dup = dy · f(gate)"""
        gate, up = node.src
        active = activation(gate)
        assert active.op is not None and not isinstance(active.op.grad, NoGrad)
        (dgate,) = active.op.grad(active, mul(dy, up))
        return dgate, mul(dy, active)

    return grad


def _product_ref(activation: str) -> Callable[..., np.ndarray]:
    def ref(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.asarray(OPS[activation].ref(gate) * up)

    return ref


@kernel
def _reglu(y, gate, up):
    for i in range(gate.size):
        y[i] = max(gate[i], _ZERO) * up[i]


@parallel
def _geglu(y, gate, up):
    for r in prange(gate.shape[0]):
        for c in range(gate.shape[1]):
            g = gate[r, c]
            y[r, c] = g * sigmoid32(_TWICE * g * (_ONE + _CUBE * g * g)) * up[r, c]


@kernel
def _geglu_quick(y, gate, up):
    for i in range(gate.size):
        y[i] = gate[i] * sigmoid32(_QUICK * gate[i]) * up[i]


@kernel
def _geglu_erf(y, gate, up):
    for i in range(gate.size):
        phi = _HALF * np.float32(math.erfc(gate[i] * _MINUS_ROOT_HALF))  # not 1 + erf: digits
        y[i] = gate[i] * phi * up[i]


REGLU = glu_op("reglu", GGMLGLUOp.REGLU, _reglu, _product_ref("relu"), _product_grad(relu))
GEGLU = glu_op("geglu", GGMLGLUOp.GEGLU, _geglu, _product_ref("gelu"), _product_grad(gelu), strips)
GEGLU_QUICK = glu_op(
    "geglu_quick",
    GGMLGLUOp.GEGLU_QUICK,
    _geglu_quick,
    _product_ref("gelu_quick"),
    _product_grad(gelu_quick),
)
GEGLU_ERF = glu_op(
    "geglu_erf", GGMLGLUOp.GEGLU_ERF, _geglu_erf, _product_ref("gelu_erf"), _product_grad(gelu_erf)
)

# -- swiglu_oai, swiglu_clamp ---------------------------------------------------------------------


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
def _swiglu_clipped(y, gate, up, alpha, limit, shift):
    for i in range(gate.size):
        g = min(gate[i], limit)
        y[i] = g * sigmoid32(alpha * g) * (min(max(up[i], -limit), limit) + shift)


@kernel
def _clipped_back_gate(dgate, gate, up, dy, alpha, limit, shift):
    for i in range(gate.size):
        u = min(max(up[i], -limit), limit) + shift
        g = min(gate[i], limit)  # so that an infinite gate has slope 0, not NaN
        s = sigmoid32(alpha * g)
        slope = s * (_ONE + alpha * g * (_ONE - s)) * np.float32(gate[i] < limit)
        dgate[i] = dy[i] * u * slope


@kernel
def _clipped_back_up(dup, gate, up, dy, alpha, limit, shift):
    for i in range(gate.size):
        g = min(gate[i], limit)
        dup[i] = dy[i] * g * sigmoid32(alpha * g) * np.float32(abs(up[i]) < limit)


def _clipped_ref(
    gate: np.ndarray, up: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    g = np.minimum(gate, limit)
    return np.asarray(g * sigmoid_ref(alpha * g) * (np.clip(up, -limit, limit) + shift))


def _clipped_back_gate_ref(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    s = sigmoid_ref(alpha * gate)
    slope = np.where(gate < limit, s * (1 + alpha * gate * (1 - s)), 0)
    return np.asarray(dy * (np.clip(up, -limit, limit) + shift) * slope)


def _clipped_back_up_ref(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, alpha: float, limit: float, shift: float
) -> np.ndarray:
    g = np.minimum(gate, limit)
    return np.where(np.abs(up) < limit, dy * g * sigmoid_ref(alpha * g), 0)


def _clipped_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dgate = dy · up · f'(gate), dup = dy · f(gate), 0 where a limit was reached"""
    src = (*node.src, dy)
    return CLIPPED_BACK_GATE(*src, **node.params), CLIPPED_BACK_UP(*src, **node.params)


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
    "swiglu_oai",
    GGMLGLUOp.SWIGLU_OAI,
    _swiglu_clipped,
    _clipped_ref,
    _clipped_grad,
    params=(_OAI,),
    **_CLIPPED,
)
SWIGLU_CLAMP = glu_op(
    "swiglu_clamp",
    GGMLGLUOp.SWIGLU_CLAMP,
    _swiglu_clipped,
    _clipped_ref,
    _clipped_grad,
    params=(_CLAMP,),
    **_CLIPPED,
)
CLIPPED_BACK_GATE = glu_op(
    "swiglu_clipped_back_gate",
    GGMLOp.CUSTOM,
    _clipped_back_gate,
    _clipped_back_gate_ref,
    _SECOND_ORDER,
    n_sources=3,
    params=(_OAI, _CLAMP),
    **_CLIPPED,
)
CLIPPED_BACK_UP = glu_op(
    "swiglu_clipped_back_up",
    GGMLOp.CUSTOM,
    _clipped_back_up,
    _clipped_back_up_ref,
    _SECOND_ORDER,
    n_sources=3,
    params=(_OAI, _CLAMP),
    **_CLIPPED,
)
