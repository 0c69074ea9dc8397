"""The gradient of a gradient: the rule of an op NAME_back, made of ordinary ops.

Where a formula's slopes are sums, products, quotients and a few functions, they are nodes of the
graph, which can be differentiated again in their turn.
"""

from collections.abc import Callable, Mapping

from pyggml.formulas.expression import Expression, parts_of, symbol
from pyggml.formulas.formula import Formula
from pyggml.formulas.reading import reading
from pyggml.formulas.slopes import slope_of
from pyggml.graph.op import OPS, GradRule, NoGrad
from pyggml.graph.tensor import Tensor

SECOND_ORDER = NoGrad("second derivatives are out of scope")
_MOST_READ = 90  # characters of a formula that are shown
_FUNCTIONS = "sigmoid", "sin", "cos", "exp"
_BUILT = {"number", "symbol", "+", "*", "/", *_FUNCTIONS}
_Operand = Tensor | float


def second_order_rule(of: Formula) -> GradRule | NoGrad:
    """The rule of an op with this formula; the refusal if its slopes need more than `_BUILT`."""
    slopes = [slope_of(of.result, symbol(source)) for source in of.sources]
    if of.of_rows or of.settings or any(e.operation not in _BUILT for e in parts_of(*slopes)):
        return SECOND_ORDER

    def grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        sources = dict(zip(of.sources, node.src, strict=True))
        return tuple(_product(dy, _node(slope, sources)) for slope in slopes)

    whole = ", ".join(
        f"d{source} = dz · {_in_parentheses(slope)}"
        for source, slope in zip(of.sources, slopes, strict=True)
    )
    short = ", ".join(f"d{source} = dz · ∂f/∂{source}" for source in of.sources)
    grad.__doc__ = whole if len(whole) < _MOST_READ else short
    return grad


def _in_parentheses(slope: Expression) -> str:
    text = reading(slope)
    return text if slope.operation in ("number", "symbol", *_FUNCTIONS) else f"({text})"


def _node(e: Expression, sources: Mapping[str, Tensor]) -> _Operand:
    """The expression as nodes over these tensors; a number stays one."""
    if e.operation == "number":
        return float(e.value)
    if e.operation == "symbol":
        return sources[str(e.value)]
    operands = [_node(o, sources) for o in e.operands]
    return _BUILDERS.get(e.operation, lambda x: OPS[e.operation](x))(*operands)


def _sum(a: _Operand, b: _Operand) -> Tensor:
    x, y = _tensor_first(a, b)
    return OPS["scale"](x, s=1.0, b=y) if isinstance(y, float) else OPS["add"](x, y)


def _product(a: _Operand, b: _Operand) -> Tensor:
    x, y = _tensor_first(a, b)
    return OPS["scale"](x, s=y, b=0.0) if isinstance(y, float) else OPS["mul"](x, y)


def _tensor_first(a: _Operand, b: _Operand) -> tuple[Tensor, _Operand]:
    """What is added or multiplied, of which one at least is no number."""
    if isinstance(a, Tensor):
        return a, b
    assert isinstance(b, Tensor)
    return b, a


def _quotient(a: _Operand, b: Tensor) -> Tensor:
    above = OPS["scale"](b, s=0.0, b=a) if isinstance(a, float) else a
    return OPS["div"](above, b)


_BUILDERS: Mapping[str, Callable[..., Tensor]] = {"+": _sum, "*": _product, "/": _quotient}
