"""The backward pass one op at a time, to be looked at.

for step in backward_steps(loss):
    print(step)

mul = w * x (shape (2,))        da = dy · b, db = dy · a
  y      [3. 8.]
  dy     [1. 1.]
  w      [1. 2.]        + [3. 4.]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getdoc

import numpy as np

from pyggml import backward
from pyggml.eager.numbers import numbers, refuse_outdated
from pyggml.eager.value import Value
from pyggml.errors import NoGradientError
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Source:
    """A source of an op in the backward pass.

    outgoing: what the op adds to d(loss)/d(source), of its shape; None where that is not wanted.
    """

    name: str
    value: np.ndarray
    outgoing: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Step:
    """One op's share of the backward pass.

    op         its name
    formula    its gradient rule
    name       the result's name, or "" if it has none
    value      the result
    incoming   d(loss)/d(result), the sum over everything that reads it
    """

    op: str
    formula: str
    name: str
    value: np.ndarray
    incoming: np.ndarray
    sources: tuple[Source, ...]

    def __str__(self) -> str:
        read = ", ".join(s.name for s in self.sources)
        lines = [f"{self.name or 'y'} = {self.op}({read})    {self.formula}"]
        rows = [("y", self.value), ("dy", self.incoming)]
        for s in self.sources:
            rows.append((s.name, s.value))
            if s.outgoing is not None:
                rows.append((f"d{s.name}", s.outgoing))
        width = max(len(name) for name, _ in rows)
        for name, a in rows:
            lines.append(f"  {name:<{width}}  {_text(a, width + 4)}")
        return "\n".join(lines)


def backward_steps(loss: Value) -> Iterator[Step]:
    """The steps of `loss.backward()`, from the loss back to the leaves; no `grad` is changed.

    Raises NoGradientError as `backward` does, and for an op whose rule reads what only a kernel
    can make.
    """
    if loss.size != 1:
        raise NoGradientError(f"a value of {loss.size} elements, wanted a loss of one number")
    forward = loss.graph
    parameters = [v.node for v in loss.sources()]
    refuse_outdated(forward.nodes)
    for step in backward.backward_steps(forward, parameters):
        yield _step_of(step)


def _step_of(step: backward.BackwardStep) -> Step:
    node = step.node
    assert node.op is not None
    names = _names(node)
    sources = (
        Source(name, numbers(s), None if out is None else numbers(out))
        for name, s, out in zip(names, node.src, step.outgoing, strict=True)
    )
    formula = (getdoc(node.op.grad) or "").split("\n")[0]
    return Step(
        node.op.name, formula, node.name, numbers(node), numbers(step.incoming), tuple(sources)
    )


def _names(node: Tensor) -> list[str]:
    """A name for each source: its own, or a letter."""
    return [s.name or "abcdefgh"[i % 8] for i, s in enumerate(node.src)]


def _text(a: np.ndarray, indent: int) -> str:
    text = np.array2string(a, precision=4, threshold=20, edgeitems=2, suppress_small=True)
    return text.replace("\n", "\n" + " " * indent)
