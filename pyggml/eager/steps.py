"""The backward pass one op at a time, to be looked at.

for step in backward_steps(loss):
    print(step)

step 2, node 0: mul0 = mul(w, x)    da = dy · b, db = dy · a
  y   [3. 8.]
  dy  [1. 1.]   of step 1
  w   [1. 2.]
  dw  [3. 4.]
  x   [3. 4.]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getdoc

import numpy as np

from pyggml import backward
from pyggml.eager.numbers import numbers, refuse_outdated
from pyggml.eager.value import Value
from pyggml.errors import NoGradientError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class OpSource:
    """A source of an op in the backward pass.

    node      of the forward graph
    outgoing  what the op adds to d(loss)/d(source), of its shape; None where that is not wanted
    total     d(loss)/d(source) so far, this step's share included; None as `outgoing`
    steps     the numbers of the steps whose shares the total adds up; () where it is None
    """

    name: str
    node: Tensor
    value: np.ndarray
    outgoing: np.ndarray | None
    total: np.ndarray | None
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One op's share of the backward pass.

    number      from 1, that of the loss
    node        of the forward graph, whose rule this is
    index       the node's number in `print(loss.graph)`
    op          the op's name
    formula     its gradient rule
    name        the result's name, or that of the op with the index
    value       the result
    incoming    d(loss)/d(result), the sum over everything that reads it
    from_steps  the numbers of the steps whose shares that sum adds up; () of the loss
    """

    number: int
    node: Tensor
    index: int
    op: str
    formula: str
    name: str
    value: np.ndarray
    incoming: np.ndarray
    from_steps: tuple[int, ...]
    sources: tuple[OpSource, ...]

    def __str__(self) -> str:
        read = ", ".join(s.name for s in self.sources)
        title = f"step {self.number}, node {self.index}: {self.name} = {self.op}({read})"
        rows = [("y", self.value, ""), ("dy", self.incoming, _origin(self.from_steps))]
        for s in self.sources:
            rows.append((s.name, s.value, ""))
            if s.outgoing is not None and s.total is not None:
                rows.append((f"d{s.name}", s.outgoing, ""))
                if s.total is not s.outgoing:
                    rows.append((f"Σ d{s.name}", s.total, _origin(s.steps)))
        width = max(len(name) for name, _, _ in rows)
        lines = [f"  {name:<{width}}  {_text(a, width + 4)}{origin}" for name, a, origin in rows]
        return "\n".join([f"{title}    {self.formula}", *lines])


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
    walk = _StepWalk(forward)
    for number, step in enumerate(backward.backward_steps(forward, parameters), 1):
        yield walk.step(number, step)


class _StepWalk:
    """The steps so far: of each tensor those that gave shares of its gradient, and their sum."""

    def __init__(self, forward: Graph) -> None:
        self._index = {t: i for i, t in enumerate(forward.nodes)}
        self._steps: dict[Tensor, tuple[int, ...]] = {}
        self._totals: dict[Tensor, np.ndarray] = {}

    def step(self, number: int, step: backward.BackwardStep) -> Step:
        node = step.node
        assert node.op is not None
        sources = tuple(
            self._source(number, i, s, out)
            for i, (s, out) in enumerate(zip(node.src, step.outgoing, strict=True))
        )
        return Step(
            number,
            node,
            self._index[node],
            node.op.name,
            (getdoc(node.op.grad) or "").split("\n")[0],
            self._name(node, 0),
            numbers(node),
            numbers(step.incoming),
            self._steps.get(node, ()),
            sources,
        )

    def _source(self, number: int, i: int, s: Tensor, out: Tensor | None) -> OpSource:
        name = self._name(s, i)
        if out is None:
            return OpSource(name, s, numbers(s), None, None, ())
        share = numbers(out)
        total = share + self._totals[s] if s in self._totals else share
        before = self._steps.get(s, ())
        self._totals[s], self._steps[s] = total, (*dict.fromkeys((*before, number)),)
        return OpSource(name, s, numbers(s), share, total, self._steps[s])

    def _name(self, t: Tensor, i: int) -> str:
        """A tensor's own name; a node's op and number; or the letter of a source in a rule."""
        unnamed = f"{t.op.name}{self._index[t]}" if t.op is not None else "abcdefgh"[i % 8]
        return t.name or unnamed


def _origin(steps: tuple[int, ...]) -> str:
    if len(steps) < 2:
        return f"   of step {steps[0]}" if steps else ""
    return f"   the sum of steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def _text(a: np.ndarray, indent: int) -> str:
    text = np.array2string(a, precision=4, threshold=20, edgeitems=2, suppress_small=True)
    return text.replace("\n", "\n" + " " * indent)
