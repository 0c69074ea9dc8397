"""op: an op of one's own, of two functions in NumPy: its value and its gradient.

    @op
    def cube(x):
        return x**3

    @cube.gradient
    def _(dy, x):
        "dx = dy · 3x²"
        return dy * 3 * x**2

    cube(tensor([1.0, 2.0]))

It is a node of the graph as any other, on Values and on Tensors: planned, differentiated, shown. It
has no kernel: the CPU runs it by these functions, in float64, and a card leaves it to the CPU.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from inspect import getdoc, signature
from typing import Any

import numpy as np

from pyggml.eager.value import apply
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph.dtypes import F32, I32, DType
from pyggml.graph.op import GradRule, NoGrad, Op, Spec
from pyggml.graph.tensor import Shape, Tensor


class FunctionOp:
    """An op made by `op`, called with Values, arrays or numbers for a Value, with Tensors for a
    Tensor. Keywords are settings.

    op      the engine's Op
    value   the function of arrays
    """

    def __init__(self, value: Callable[..., Any]) -> None:
        self._defaults = {
            p.name: p.default for p in signature(value).parameters.values() if p.default != p.empty
        }
        self.op = _op_of(value.__name__, value, _spec_of(value), _no_rule_yet(value.__name__))
        self.value = value
        self.__doc__, self.__name__ = getdoc(value), value.__name__

    def gradient(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the gradient: rule(dy, *sources, **settings) → d(loss)/d(source), of its shape,
        or a tuple with one of each source. dy is d(loss)/d(result). The first line of its docstring
        is the formula that steps show."""
        self.op = replace(self.op, grad=_rule_of(self.op.name, rule))
        return rule

    def __call__(self, *sources: Any, **settings: Any) -> Any:
        settings = {**self._defaults, **settings}
        if any(isinstance(s, Tensor) for s in sources):
            return self.op(*sources, **settings)
        return apply(self.op, *sources, **settings)

    def __repr__(self) -> str:
        return f"<op {self.op.name}>"


def op(value: Callable[..., Any]) -> FunctionOp:
    """The op whose result is value(*sources, **settings), of NumPy arrays, float64 or int32.

    Parameters with a default are settings, numbers or words that are fixed as the graph is built;
    the others are sources. The result's shape may depend on shapes and settings alone: value is
    asked for it with arrays of ones. Floats become float32.
    """
    return FunctionOp(value)


def _op_of(name: str, ref: Callable[..., Any], spec: Callable[..., Spec], grad: Any) -> Op:
    return Op(name=name, spec=spec, ref=ref, grad=grad, samples=lambda rng: iter(()))


def _spec_of(value: Callable[..., Any]) -> Callable[..., Spec]:
    @lru_cache(256)
    def spec_of(shapes: tuple[tuple[Shape, str], ...], settings: tuple[Any, ...]) -> Spec:
        ones = [np.ones(shape, kind) for shape, kind in shapes]
        try:
            with np.errstate(all="ignore"):
                result = np.asarray(value(*ones, **dict(settings)))
        except Exception as error:
            of = ", ".join(str(list(shape)) for shape, _ in shapes)
            raise ShapeError(f"{value.__name__}: of ones of shape {of}: {error}") from error
        return Spec(result.shape, _dtype_of(value.__name__, result))

    def spec(*src: Tensor, **settings: Any) -> Spec:
        shapes = tuple((s.shape, "i4" if s.dtype.numpy.kind == "i" else "f8") for s in src)
        return spec_of(shapes, tuple(settings.items()))

    return spec


def _dtype_of(name: str, result: np.ndarray) -> DType:
    if result.dtype.kind not in "fiub":
        raise ShapeError(f"{name}: its value is {result.dtype}, wanted numbers")
    return F32 if result.dtype.kind == "f" else I32


def _no_rule_yet(name: str) -> GradRule:
    """The rule until there is one."""

    def rule(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        raise NoGradientError(f"{name} has no gradient yet: @{name}.gradient declares it")

    return rule


def _rule_of(name: str, gradient: Callable[..., Any]) -> GradRule:
    """The rule that builds a node of each source's gradient."""
    parts: dict[tuple[int, int], Op] = {}

    def part(i: int, n: int) -> Op:
        if (i, n) not in parts:
            parts[i, n] = _part_of(f"{name}_back{i if n > 1 else ''}", gradient, i, n)
        return parts[i, n]

    def rule(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            None
            if s.dtype.numpy.kind == "i"
            else part(i, len(node.src))(dy, *node.src, **node.params)
            for i, s in enumerate(node.src)
        )

    rule.__doc__ = getdoc(gradient)
    return rule


def _part_of(name: str, gradient: Callable[..., Any], i: int, n: int) -> Op:
    """The op whose result is what `gradient` gives of source i of n."""

    def ref(dy: np.ndarray, *src: np.ndarray, **settings: Any) -> np.ndarray:
        gradients = gradient(dy, *src, **settings)
        each = gradients if isinstance(gradients, tuple) else (gradients,)
        if len(each) != n:
            raise ShapeError(f"{name}: the gradient gave {len(each)} results for {n} sources")
        g = np.asarray(each[i])
        if g.shape != src[i].shape or g.dtype.kind not in "fiub":
            raise ShapeError(f"{name}: {g.dtype} of shape {g.shape}, wanted {src[i].shape}")
        return g.astype(np.float64)

    grad = NoGrad("second derivatives are out of scope")
    return _op_of(name, ref, lambda dy, *src, **settings: Spec(src[i].shape), grad)
