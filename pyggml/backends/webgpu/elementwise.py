"""Element by element: one number of the result from one number of each source, by a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from pyggml.backends.webgpu.kernel import Kernel, Site
from pyggml.backends.webgpu.shader import Dispatch, per_element
from pyggml.backends.webgpu.table import declare
from pyggml.tensors import MAX_AXES, Tensor

_NAMES = "abc"
_BODY = """
    let i = group * 256u + me;
    if (i < N) {{ {loads} put_y(i, {formula}); }}
"""
_SIGMOID = "(1.0 / (1.0 + exp(-a)))"
_TANH_ARGUMENT = "1.5957691216057308 * a * (1.0 + 0.044715 * a * a)"  # 1 + tanh(u) = 2·sigmoid(2u)
_GATE = f"(1.0 / (1.0 + exp(-({_TANH_ARGUMENT}))))"
_GELU = f"(a * {_GATE})"
_INNER = "1.5957691216057308 * (1.0 + 0.134145 * a * a)"
_GELU_SLOPE = f"({_GATE} * (1.0 + a * (1.0 - {_GATE}) * {_INNER}))"


_TILE = " + ".join(f"(i / BELOW{a}) % MANY{a} % FEW{a} * STEP{a}" for a in range(MAX_AXES))


def _applied(formula: str) -> Callable[[Site], Sequence[Dispatch]]:
    """y_i = formula of a_i, b_i, c_i and the node's parameters; the last source is repeated."""

    def bind(site: Site) -> Sequence[Dispatch]:
        n, names = site.node.n_elements, _NAMES[: len(site.src)]
        places = dict.fromkeys(names, "i")
        numbers = {k: v for k, v in site.node.params.items() if isinstance(v, int | float)}
        constants = {"N": n, **{f"p_{k}": float(v) for k, v in numbers.items()}}
        if site.node.src[-1].n_elements != n:
            places[names[-1]] = _TILE
            constants |= _tile(site.node)
        loads = " ".join(f"let {name} = {name}s_at({at});" for name, at in places.items())
        views = {"y": site.out, **{f"{name}s": v for name, v in zip(names, site.src, strict=True)}}
        body = _BODY.format(loads=loads, formula=formula)
        return [site.shaders.dispatch(body, views, per_element(n), constants)]

    return bind


def _tile(node: Tensor) -> dict[str, int]:
    """What _TILE names: where an element takes its number in a source that is repeated as tiles."""
    shapes = (node.shape, node.src[-1].shape)
    large, small = ((1,) * (MAX_AXES - len(s)) + s for s in shapes)
    found: dict[str, int] = {}
    for a in range(MAX_AXES):
        found |= {f"BELOW{a}": prod(large[a + 1 :]), f"STEP{a}": prod(small[a + 1 :])}
        found |= {f"MANY{a}": large[a], f"FEW{a}": small[a]}
    return found


for _name, _formula in {
    "add": "a + b",
    "add1": "a + b",
    "sub": "a - b",
    "mul": "a * b",
    "div": "a / b",
    "scale": "p_s * a + p_b",
    "neg": "-a",
    "sqr": "a * a",
    "relu": "max(a, 0.0)",
    "sigmoid": _SIGMOID,
    "silu": f"a * {_SIGMOID}",
    "gelu": _GELU,
    "gelu_back": f"b * {_GELU_SLOPE}",
    "swiglu": f"a * {_SIGMOID} * b",
    "geglu": f"{_GELU} * b",
    "reglu": "max(a, 0.0) * b",
    "swiglu_back_gate": f"c * b * {_SIGMOID} * (1.0 + a * (1.0 - {_SIGMOID}))",
}.items():
    declare(_name, Kernel(_applied(_formula)))
