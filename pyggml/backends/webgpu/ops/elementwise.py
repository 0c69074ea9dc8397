"""Element by element: one number of the result from one number of each source, by a formula.

A formula names the sources' numbers a, b and c, and the op's parameters p_NAME.
"""

from collections.abc import Callable, Sequence
from math import prod

from pyggml.backends.webgpu.runtime.kernel import Kernel, Site
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, per_element, whole
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import MAX_AXES, Tensor

_NAMES = "abc"
_BODY = """
    let i = group * 256u + me;
    if (i < N) {{ {loads} put_y(i, {formula}); }}
"""
# WGSL's own are inexact near 0, or missing.
_FUNCTIONS = """
fn expm1(x: f32) -> f32 {
    let near = x * (1.0 + x * (0.5 + x * (0.16666667 + x * 0.041666667)));
    return select(exp(x) - 1.0, near, abs(x) < 0.03);
}
fn tangent(x: f32) -> f32 {
    let far = sign(x) * (1.0 - 2.0 / (exp(2.0 * abs(x)) + 1.0));
    return select(far, x * (1.0 - x * x * (0.33333333 - x * x * 0.13333333)), abs(x) < 0.1);
}
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    return max(x, 0.0) + select(log(1.0 + e), e - 0.5 * e * e, e < 1e-3);
}
fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exp(-x)); }
fn silu_slope(x: f32) -> f32 { return sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x))); }
fn gate(x: f32) -> f32 {  // 1 + tanh(u) = 2·sigmoid(2u), without cancellation
    return sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x));
}
fn gelu_slope(x: f32) -> f32 {
    let inner = 1.5957691216057308 * (1.0 + 0.134145 * x * x);
    return gate(x) * (1.0 + x * (1.0 - gate(x)) * inner);
}
fn normal(x: f32) -> f32 {  // Φ; erfc as in Numerical Recipes, within 1.2e-7 of it
    let z = abs(x) * 0.70710678;
    let t = 1.0 / (1.0 + 0.5 * z);
    let s = 1.48851587 + t * (-0.82215223 + t * 0.17087277);
    let r = 0.09678418 + t * (-0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * s)));
    let tail = 0.5 * t * exp(-z * z - 1.26551223 + t * (1.00002368 + t * (0.37409196 + t * r)));
    return select(tail, 1.0 - tail, x > 0.0);
}
fn hard(x: f32) -> f32 { return clamp((x + 3.0) / 6.0, 0.0, 1.0); }
"""
_ROUNDED = "sign(a) * (floor(abs(a)) + select(0.0, 1.0, abs(a) - floor(abs(a)) >= 0.5))"
_XIELU_LEFT = "(p_a_n * (expm1(min(a, p_eps)) - a) + p_beta * a)"
_XIELU_SLOPE = "select(select(-p_a_n, p_a_n * expm1(a), a < p_eps), 2.0 * p_a_p * a, a > 0.0)"
_CLIPPED = "min(a, p_limit) * sigmoid(p_alpha * min(a, p_limit))"
_SHIFTED = "(clamp(b, -p_limit, p_limit) + p_shift)"
_CLIPPED_SLOPE = (
    "sigmoid(p_alpha * min(a, p_limit)) * "
    "(1.0 + p_alpha * min(a, p_limit) * (1.0 - sigmoid(p_alpha * min(a, p_limit))))"
)

_REPEATED = " + ".join(f"(i / BELOW{a}) % MANY{a} % FEW{a} * STEP{a}" for a in range(MAX_AXES))


def _apply(formula: str) -> Callable[[Site], Sequence[Dispatch]]:
    """y_i = formula of a_i, b_i, c_i and the node's parameters; the last source is repeated."""

    def bind(site: Site) -> Sequence[Dispatch]:
        n, names = site.node.n_elements, _NAMES[: len(site.src)]
        indices = dict.fromkeys(names, "i")
        numbers = {k: v for k, v in site.node.params.items() if isinstance(v, int | float)}
        constants = {"N": n, **{f"p_{k}": float(v) for k, v in numbers.items()}}
        if site.node.src[-1].n_elements != n:
            indices[names[-1]] = _REPEATED
            constants |= _repeats(site.node)
        loads = " ".join(f"let {name} = {name}s_at({at});" for name, at in indices.items())
        views = {"y": site.out, **{f"{name}s": v for name, v in zip(names, site.src, strict=True)}}
        body = _FUNCTIONS + whole(_BODY.format(loads=loads, formula=formula))
        return [site.shaders.dispatch(body, views, per_element(n), constants)]

    return bind


def _not_f32(node: Tensor) -> str | None:
    return None if node.dtype is F32 else f"{node.dtype} has no kernel here"


def _repeats(node: Tensor) -> dict[str, int]:
    """What _REPEATED names: where an element finds its number in a source that is repeated."""
    shapes = (node.shape, node.src[-1].shape)
    large, small = ((1,) * (MAX_AXES - len(s)) + s for s in shapes)
    constants: dict[str, int] = {}
    for a in range(MAX_AXES):
        constants |= {f"BELOW{a}": prod(large[a + 1 :]), f"STEP{a}": prod(small[a + 1 :])}
        constants |= {f"MANY{a}": large[a], f"FEW{a}": small[a]}
    return constants


for _name, _formula in {
    "add": "a + b",
    "add1": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b",
    "scale": "p_s * a + p_b",
    "neg": "-a",
    "repeat": "a",
    # functions of one number
    "sqr": "a * a",
    "sqrt": "sqrt(a)",
    "log": "log(a)",
    "exp": "exp(a)",
    "expm1": "expm1(a)",
    "abs": "abs(a)",
    "sgn": "sign(a)",
    "step": "select(0.0, 1.0, a > 0.0)",
    "clamp": "clamp(a, p_low, p_high)",
    "floor": "floor(a)",
    "ceil": "ceil(a)",
    "trunc": "trunc(a)",
    "round": _ROUNDED,
    "relu": "max(a, 0.0)",
    "leaky_relu": "select(p_slope * a, a, a > 0.0)",
    "sigmoid": "sigmoid(a)",
    "tanh": "tangent(a)",
    "silu": "a * sigmoid(a)",
    "softplus": "softplus(a)",
    "elu": "select(expm1(a), a, a > 0.0)",
    "gelu": "a * gate(a)",
    "gelu_quick": "a * sigmoid(1.702 * a)",
    "gelu_erf": "a * normal(a)",
    "hardsigmoid": "hard(a)",
    "hardswish": "a * hard(a)",
    "xielu": f"select({_XIELU_LEFT}, p_a_p * a * a + p_beta * a, a > 0.0)",
    # and their slopes, times b
    "silu_back": "b * silu_slope(a)",
    "gelu_back": "b * gelu_slope(a)",
    "gelu_erf_back": "b * (normal(a) + a * 0.3989422804014327 * exp(-0.5 * a * a))",
    "xielu_back": f"b * ({_XIELU_SLOPE} + p_beta)",
    # gated linear units: gate a, up b, gradient c
    "swiglu": "a * sigmoid(a) * b",
    "reglu": "max(a, 0.0) * b",
    "geglu": "a * gate(a) * b",
    "geglu_quick": "a * sigmoid(1.702 * a) * b",
    "geglu_erf": "a * normal(a) * b",
    "swiglu_oai": f"{_CLIPPED} * {_SHIFTED}",
    "swiglu_clamp": f"{_CLIPPED} * {_SHIFTED}",
    "swiglu_back_gate": "c * b * silu_slope(a)",
    "swiglu_clipped_back_gate": f"select(0.0, c * {_SHIFTED} * {_CLIPPED_SLOPE}, a < p_limit)",
    "swiglu_clipped_back_up": f"select(0.0, c * {_CLIPPED}, abs(b) < p_limit)",
}.items():
    declare(_name, Kernel(_apply(_formula), lacks=_not_f32))
