"""Ops that compute each number of the result by a formula, with the gradients that follow from it.

    RELU = formula_op(formulas.relu, GGMLUnaryOp.RELU, draws(0.1, 2))

declares `relu` on all devices, and `relu_back`, dy times its slope.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from pyggml.formulas.expression import number
from pyggml.formulas.formula import GRADIENT, RESULT, Formula, formula, gradient_formula
from pyggml.formulas.reading import reading
from pyggml.graph.ggml_enums import GGMLGLUOp, GGMLOp, GGMLUnaryOp
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
from pyggml.graph.tensor import Tensor
from pyggml.kernels.formulas import by_formula
from pyggml.kernels.kernel import cpu_kernel
from pyggml.kernels.rows import by_row
from pyggml.ops.expect import expect, expect_type
from pyggml.ops.second_order import SECOND_ORDER, second_order_rule

Samples = Callable[[np.random.Generator], Iterator[Sample]]
MOST_READ = 90  # characters of a gradient's formula that are shown
_FLAT = NoGrad("the function is constant between its jumps")


def formula_op(
    function: Callable[..., Any],
    ggml: GGMLOp | GGMLUnaryOp | GGMLGLUOp,
    samples: Samples,
    refuses: Refused = NO_SETTINGS,
    check: Callable[..., None] = lambda name, **_: None,
    back: GGMLOp = GGMLOp.CUSTOM,
    grad: GradRule | NoGrad | None = None,
    gradient: str = "",
) -> Op:
    """Declare y_i = f(a_i, b_i, …; settings), F32, of sources of one shape, and its gradients.

    function: of numbers, see pyggml.formulas. check(name, **settings) raises ShapeError for the
    values in `refuses`. back: ggml's number for the gradient of an op with one source, NAME_back;
    of several each has its own, NAME_back_SOURCE. grad: a rule in place of such ops. gradient: for
    people, in place of the formula that follows.
    """
    whole = formula(function)
    declare = partial(declare_formula, refuses=refuses, check=check)
    rule = grad or _gradient_rule(whole, samples, partial(declare, ggml=back), gradient)
    return declare(whole, samples, ggml=ggml, grad=rule)


def declare_formula(
    of: Formula,
    samples: Samples,
    ggml: GGMLOp | GGMLUnaryOp | GGMLGLUOp,
    refuses: Refused,
    check: Callable[..., None],
    grad: GradRule | NoGrad | None = None,
    **fields: Any,
) -> Op:
    """Declare the op of a formula.

    grad: None for the gradient of another op, whose rule follows from its formula. fields: others
    of the op's, or other than follow from the formula
    """

    def spec(first: Tensor, *further: Tensor, **values: float) -> Spec:
        expect_type(of.name, of.sources[0], first)
        for name, t in zip(of.sources[1:], further, strict=True):
            expect(of.name, name, t, first.shape[-1:] if name in of.shared else first.shape)
        check(of.name, **values)
        return Spec(first.shape)

    follows = {
        "ref": of,
        "grad": second_order_rule(of) if grad is None else grad,
        "memory": Memory.FRESH if of.of_rows and grad is None else Memory.INPLACE,
        "halves": grad not in (None, SECOND_ORDER),
    }
    new = op(
        name=of.name,
        ggml=ggml,
        spec=spec,
        samples=samples,
        refuses=refuses,
        formula=of,
        **follows | fields,
    )
    cpu_kernel(new, by_row(of) if of.of_rows else by_formula(of))
    return new


def _gradient_rule(
    of: Formula, samples: Samples, declare: Callable[[Formula, Samples], Op], text: str
) -> GradRule | NoGrad:
    """The rule that makes a node for each source, of an op that is declared for it.

    text: that says what it computes; else its formulas do
    """
    makers, slopes = [], []
    for source in of.sources:
        name = f"{of.name}_back" + (f"_{source}" if len(of.sources) > 1 else "")
        gradient = gradient_formula(name, of, source)
        if gradient.result is number(0):
            return _FLAT
        makers.append(_gradient_maker(of, source, gradient, samples, declare))
        slopes.append(f"d{source} = {reading(gradient.result, GRADIENT)}")

    def grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        values = dict(zip(of.sources, node.src, strict=True)) | {RESULT: node, GRADIENT: dy}
        return tuple(make(values, node.params) for make in makers)

    whole, short = ", ".join(slopes), (f"d{s} = dy · ∂{of.name}/∂{s}" for s in of.sources)
    grad.__doc__ = text or (whole if len(whole) < MOST_READ else ", ".join(short))
    return grad


def _gradient_maker(
    of: Formula,
    source: str,
    gradient: Formula,
    samples: Samples,
    declare: Callable[[Formula, Samples], Op],
) -> Callable[..., Tensor]:
    """What makes the gradient's node of a dict of tensors.

    The gradient by a factor is the op itself with dy in the factor's place, where no setting comes
    between: swiglu(gate, dy) is that of swiglu by up.
    """
    itself = of.of(**{source: GRADIENT})
    if gradient.results == itself.results and len(of.sources) > 1:
        return lambda values, params: OPS[of.name](*(values[s] for s in itself.sources), **params)
    new = declare(gradient, with_dy(of, gradient, samples))
    return lambda values, params: new(*(values[s] for s in gradient.sources), **params)


def with_dy(of: Formula, gradient: Formula, samples: Samples) -> Samples:
    """Samples of a gradient: what it reads of the op's samples, and a dy."""

    def samples_back(rng: np.random.Generator) -> Iterator[Sample]:
        for s in samples(rng):
            arrays = [np.asarray(a) for a in s.arrays]
            values = dict(zip(of.sources, arrays, strict=True))
            values[RESULT] = of(*arrays, **s.params)
            values[GRADIENT] = rng.standard_normal(values[RESULT].shape)
            yield Sample(tuple(values[name] for name in gradient.sources), s.params)

    return samples_back


def draws(
    least: float, most: float, /, n_sources: int = 1, signed: bool = True, **params: Any
) -> Samples:
    """Samples with magnitudes from least to most; least > 0 keeps them off a kink at 0."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for shape in [(1, 1), (3, 8), (2, 3, 5), (67,)]:
            sign = rng.choice([-1.0, 1.0], (n_sources, *shape)) if signed else 1.0
            yield Sample(tuple(rng.uniform(least, most, (n_sources, *shape)) * sign), params)

    return samples
