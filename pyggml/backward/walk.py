"""The reverse walk: the chain rule, accumulation, un-broadcasting, and pruning."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pyggml.errors import GraphError, NoGradientError, ShapeError, first_of
from pyggml.graph import Graph, last_write, reachable, topological
from pyggml.graph.graph import Notes, expect_graph
from pyggml.graph.op import OPS, SAVED, Detached, NoGrad
from pyggml.graph.tensor import Tensor, leaf
from pyggml.graph.verify import graph_pass
from pyggml.ops import accumulate, add, add_inplace, repeat_back

# Ops that fuse another with the addition of its result to their first source.
_ADDING = {op.fuses[0]: op for op in OPS.values() if op.fuses[1:] == ("add",)}


@dataclass(frozen=True, slots=True)
class BackwardStep:
    """The gradient rule of one node, applied.

    node       of the forward graph
    incoming   d(loss)/d(node), complete
    outgoing   what the rule adds to d(loss)/d(source), for each source; None where that is not
               wanted
    """

    node: Tensor
    incoming: Tensor
    outgoing: tuple[Tensor | None, ...]


@graph_pass
def build_backward(
    forward: Graph,
    parameters: Sequence[Tensor] | Mapping[str, Tensor],
    seed: Tensor | None = None,
    accumulators: Sequence[Tensor | None] | None = None,
    keeps: Tensor | None = None,
) -> Graph:
    """The graph of a loss, which is the output "loss" of `forward` or its only one, and of its
    gradients.

    Outputs: "loss", then "grad:NAME" for each parameter, d(sum(loss · seed)) / d(parameter), then
    the others of `forward`. NAME is that of the mapping, or the tensor's; its number where that is
    none or that of several. Nodes: those of `forward` that outputs need, then those of the
    gradients, from the loss back to the start. `seed` has the loss's shape (default: ones).
    `accumulators` are leaves of the parameters' shapes, or None: each complete gradient is then
    added to its accumulator in place, of which the output is a view. A leaf `keeps`, (1,) F32, says
    whether that is read, 1, or counts as 0.

    Only tensors that depend on a parameter get backward nodes. Integers carry no gradient, nor does
    the result of `detach`; a choice by number, such as the experts of a token, counts as fixed.

    Raises NoGradientError, before anything is computed, if an op on a path has no gradient, if a
    parameter does not reach the loss, or if a gradient needs numbers that were overwritten since.
    Raises ShapeError for a seed or an accumulator of another shape, GraphError for what is no
    graph, or one of several outputs none of which is named "loss".
    """
    expect_graph("build_backward", forward)
    if isinstance(parameters, Tensor):
        raise GraphError(f"build_backward takes parameters in a list, [w]; found {parameters!r}")
    loss, names = _loss(forward), _names(parameters)
    leaves = list(parameters.values() if isinstance(parameters, Mapping) else parameters)
    walk, gradients = _walk(forward, leaves, seed, accumulators, keeps)
    named = zip(forward.outputs, forward.names or [""] * len(forward.outputs), strict=True)
    kept = [(t, name) for t, name in named if t is not loss]
    before = [t for t in forward.nodes if t is not loss]
    steps = (*before, loss, *walk.steps)
    graph = Graph.of(loss, *gradients, *(t for t, _ in kept), steps=steps)
    names = ["loss", *(f"grad:{name}" for name in names), *(name for _, name in kept)]
    return replace(graph, notes=walk.notes_of(forward.notes, graph), names=tuple(names))


def backward_steps(forward: Graph, parameters: Sequence[Tensor]) -> list[BackwardStep]:
    """What `build_backward` does, one node after the other, from the loss back to the start."""
    return [BackwardStep(*step) for step in _walk(forward, parameters, None, None)[0].taken]


def _loss(forward: Graph) -> Tensor:
    if len(forward.outputs) == 1:
        return forward.outputs[0]
    if "loss" not in forward.names:
        raise GraphError(
            f"build_backward: none of the {len(forward.outputs)} outputs is the loss: "
            "Graph.of(y, loss=loss) names it"
        )
    return forward["loss"]


def _names(parameters: Sequence[Tensor] | Mapping[str, Tensor]) -> list[str]:
    if isinstance(parameters, Mapping):
        return list(parameters)
    names = [t.name for t in parameters]
    count = {} if len(set(names)) == len(names) else Counter(names)
    return [name if name and count.get(name, 1) == 1 else str(i) for i, name in enumerate(names)]


def _walk(
    forward: Graph,
    parameters: Sequence[Tensor],
    seed: Tensor | None,
    accumulators: Sequence[Tensor | None] | None,
    keeps: Tensor | None = None,
) -> tuple[_Walk, list[Tensor]]:
    """The finished walk, and its gradients."""
    loss = _loss(forward)
    _same_shapes("seed", [seed or loss], [loss])
    if accumulators is not None:
        _same_shapes("accumulator", accumulators, parameters)
    order = [*forward.leaves, *forward.nodes]
    reached = _dependents(parameters, order)
    _refuse_gaps(loss, parameters, order, reached)
    seed = seed or leaf(np.ones(loss.shape, np.float32), "d(loss)")
    walk = _Walk(order, parameters, accumulators, reached, keeps)
    gradients = walk.back_from(loss, seed)
    _refuse_changed(order, gradients)
    return walk, gradients


class _Walk:
    """The reverse walk: a node's gradient rule is applied once its own gradient is complete.

    grads   tensor -> its gradient so far
    steps   sums of gradients, and additions to accumulators, in the order of their making
    taken   the rules applied so far, as the fields of BackwardSteps: making these takes a tenth
    built   node of a gradient → the forward node whose rule built it
    sums    node that adds gradients up → the tensor whose gradients they are
    """

    def __init__(
        self,
        order: Sequence[Tensor],
        parameters: Sequence[Tensor],
        accumulators: Sequence[Tensor | None] | None,
        reached: set[Tensor],
        keeps: Tensor | None,
    ) -> None:
        self.order, self.parameters, self.reached = order, parameters, reached
        self.accumulators, self.keeps = accumulators or (), keeps
        self.grads: dict[Tensor, Tensor] = {}
        self.steps: list[Tensor] = []
        self.taken: list[tuple[Tensor, Tensor, tuple[Tensor | None, ...]]] = []
        self.built: dict[Tensor, Tensor] = {}
        self.sums: dict[Tensor, Tensor] = {}
        self.before = set(order)
        self.added: dict[int, Tensor] = {}  # accumulator i with its gradient added
        leaves = set(parameters)
        first_user = {s: t for t in reversed(order) for s in t.src if s in leaves}
        self.complete_after = defaultdict[Tensor, list[int]](list)
        for i, p in enumerate(parameters if self.accumulators else ()):
            self.complete_after[first_user.get(p, p)].append(i)

    def back_from(self, loss: Tensor, seed: Tensor) -> list[Tensor]:
        """The gradients in the order of the parameters, or the accumulators after the additions."""
        self.grads[loss] = seed
        faults: list[str] = []
        for t in reversed(self.order):
            if t.op is not None and t in self.reached and t in self.grads:
                faults += self._propagate(t)
            if t in self.complete_after:
                self._accumulate_after(t)
        if faults:
            raise NoGradientError(first_of(faults, 5))
        for p in self.parameters:
            if not self.grads[p].name:
                self.grads[p].name = f"d({p.name})" if p.name else ""
        return [self.added.get(i, self.grads[p]) for i, p in enumerate(self.parameters)]

    def _propagate(self, t: Tensor) -> list[str]:
        """Add t's contributions to the gradients of its sources; returns the faults."""
        assert t.op is not None and not isinstance(t.op.grad, NoGrad)
        parts = t.op.grad(t, self.grads[t])
        if len(parts) != len(t.src):
            raise AssertionError(f"{t.op.name}: {len(parts)} gradients for {len(t.src)} sources")
        faults = []
        outgoing: list[Tensor | None] = [None] * len(parts)
        for i, (s, g) in enumerate(zip(t.src, parts, strict=True)):
            if s not in self.reached:
                continue
            if g is None:
                faults.append(
                    f"{t.op.name} at {_place(t)} has no gradient for its source {i} ({s!r}), "
                    "which depends on a parameter"
                )
                continue
            if g.shape != s.shape:
                g = repeat_back(g, s.shape)
            outgoing[i] = g
            self._enter(g, t)
            total = self.grads[s] = _sum(self.grads[s], g) if s in self.grads else g
            self.steps.append(total)
            if total is not g:
                self.sums[total] = s
        self.taken.append((t, self.grads[t], tuple(outgoing)))
        return faults

    def _enter(self, g: Tensor, t: Tensor) -> None:
        """Note of a gradient and what it is made of that t's rule built it."""
        ready = [g]
        while ready:
            node = ready.pop()
            if node.op is None or node in self.built or node in self.before or node in self.sums:
                continue
            if node.op is not SAVED:
                self.built[node] = t
            ready += node.src

    def notes_of(self, notes: Notes, graph: Graph) -> Notes:
        """The notes of the forward graph, with those of the backward nodes of `graph`."""
        nodes = set(graph.nodes)
        built, sums = (
            {t: of for t, of in pairs.items() if t in nodes} for pairs in (self.built, self.sums)
        )
        grads = {t: g for t, g in self.grads.items() if g.op is None or g in nodes}
        return replace(
            notes,
            backward={**notes.backward, **built},
            sums={**notes.sums, **sums},
            gradients={**notes.gradients, **grads},
        )

    def _accumulate_after(self, t: Tensor) -> None:
        """After t, add every gradient that is complete now to its accumulator."""
        for i in self.complete_after[t]:
            g, total = self.grads.get(self.parameters[i]), self.accumulators[i]
            if g is not None and total is not None:  # a missing one is a fault
                keeps = self.keeps
                self.added[i] = (
                    add_inplace(total, g) if keeps is None else accumulate(total, g, keeps)
                )
                self.sums[self.added[i]] = self.parameters[i]
                self.steps.append(self.added[i])


def _sum(total: Tensor, part: Tensor) -> Tensor:
    """total + part, in one node where an op can add its product to a sum."""
    fused = _ADDING.get(part.op.name) if part.op is not None else None
    return add(total, part) if fused is None else fused(total, *part.src, **part.params)


def _same_shapes(what: str, given: Sequence[Tensor | None], models: Sequence[Tensor]) -> None:
    if len(given) != len(models):
        raise ShapeError(f"build_backward: {len(given)} {what}s, wanted {len(models)}")
    for g, w in zip(given, models, strict=True):
        if g is not None and g.shape != w.shape:
            raise ShapeError(f"build_backward: the {what} for {w!r} is {g!r}, wanted its shape")


def _dependents(parameters: Sequence[Tensor], order: Sequence[Tensor]) -> set[Tensor]:
    """The tensors that depend smoothly on a parameter."""
    reached = set(parameters)
    for t in order:
        if not reached.isdisjoint(t.src) and not is_fixed(t):
            reached.add(t)
    return reached


def tensors_that_reach(loss: Tensor, order: Sequence[Tensor]) -> set[Tensor]:
    """The tensors with a path to the loss that has no fixed tensor on it."""
    tensors = {loss}
    for t in reversed(order):
        if t in tensors and not is_fixed(t):
            tensors.update(t.src)
    return tensors


def is_fixed(t: Tensor) -> bool:
    """Whether a tensor carries no gradient: integers, and results of `detach`."""
    detached = t.op is not None and isinstance(t.op.grad, Detached)
    return detached or t.dtype.numpy.kind == "i"


def _refuse_gaps(
    loss: Tensor, parameters: Sequence[Tensor], order: Sequence[Tensor], reached: set[Tensor]
) -> None:
    """Raise NoGradientError, with all faults, unless every path is differentiable."""
    useful = tensors_that_reach(loss, order)
    faults = [f"{p.name or repr(p)} does not reach the loss" for p in parameters if p not in useful]
    faults += [
        f"{t.op.name} at {_place(t)} has no gradient ({t.op.grad.reason})"
        for t in order
        if t in reached and t in useful and t.op is not None and isinstance(t.op.grad, NoGrad)
    ]
    if faults:
        raise NoGradientError(first_of(faults, 5))


def _refuse_changed(order: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Raise NoGradientError if a backward node reads memory that a forward node changed later."""
    last = {t.root: t for t in order if t.base is not None and t.is_write}
    forward = set(order)
    faults = {
        f"a gradient needs {_place(s)}, over which {_place(last[s.root])} has written since"
        for t in (reachable(*gradients) if last else ())
        if t not in forward
        for s in t.src
        if s.root in last and last_write(s) is not last[s.root]
    }
    if faults:
        raise NoGradientError(first_of(sorted(faults), 5))


def _place(t: Tensor) -> str:
    """A name for a node in errors: its own, else that of the nearest named source."""
    if t.name:
        return t.name
    for s in reversed(topological(t)):
        if s.name:
            return f"{t!r} (after {s.name})"
    return repr(t)
