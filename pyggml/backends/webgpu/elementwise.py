"""Element by element: one number of the result from one number of each source, by a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from pyggml.backends.webgpu.kernel import Kernel, Site
from pyggml.backends.webgpu.shader import Dispatch, per_element
from pyggml.backends.webgpu.table import declare
from pyggml.tensors import MAX_AXES

_NAMES = "abc"
_BODY = """
    let i = group * 256u + me;
    if (i < N) {{ {loads} put_y(i, {formula}); }}
"""
_SIGMOID = "(1.0 / (1.0 + exp(-a)))"
_TANH_ARGUMENT = "1.5957691216057308 * a * (1.0 + 0.044715 * a * a)"  # 1 + tanh(u) = 2·sigmoid(2u)
_GELU = f"(a / (1.0 + exp(-({_TANH_ARGUMENT}))))"


def _applied(formula: str) -> Callable[[Site], Sequence[Dispatch]]:
    """y_i = formula of a_i, b_i, c_i and the node's parameters; the last source is repeated."""

    def bind(site: Site) -> Sequence[Dispatch]:
        n, named = site.node.n_elements, dict(zip(_NAMES, site.src, strict=False))
        loads = [f"let {name} = {name}s_at(i);" for name in named]
        last = site.node.src[-1]
        if last.n_elements != n:
            loads[-1] = (
                f"let {_NAMES[len(named) - 1]} = {_NAMES[len(named) - 1]}s_at({_tile(site)});"
            )
        views = {"y": site.out, **{f"{name}s": view for name, view in named.items()}}
        numbers = {k: v for k, v in site.node.params.items() if isinstance(v, int | float)}
        constants = {"N": n, **{f"p_{k}": float(v) for k, v in numbers.items()}}
        body = _BODY.format(loads=" ".join(loads), formula=formula)
        return [site.shaders.dispatch(body, views, per_element(n), constants)]

    return bind


def _tile(site: Site) -> str:
    """Where element i takes its number in a last source that is repeated as tiles."""
    large, small = (
        (1,) * (MAX_AXES - len(s)) + s for s in (site.node.shape, site.node.src[-1].shape)
    )
    at, words = 1, []
    for axis in reversed(range(MAX_AXES)):
        below, step = prod(large[axis + 1 :]), prod(small[axis + 1 :])
        if small[axis] > 1:
            words.append(f"(i / {below}u) % {large[axis]}u % {small[axis]}u * {step}u")
        at *= small[axis]
    return " + ".join(words) or "0u"


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
    "swiglu": f"a * {_SIGMOID} * b",
    "geglu": f"{_GELU} * b",
    "reglu": "max(a, 0.0) * b",
    "swiglu_back_gate": f"c * b * {_SIGMOID} * (1.0 + a * (1.0 - {_SIGMOID}))",
}.items():
    declare(_name, Kernel(_applied(_formula)))
