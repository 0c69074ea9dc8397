"""The optimiser's step of each tensor right after its gradient, whose memory is then free again
(Lv et al. 2023, arXiv:2306.09782).

The gradient's length over all tensors is known when the last of them has changed. So each step
clips by the length of the step before it, and the first one does not clip.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, sqrt

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.overwriting import maker
from pyggml.graph.tensor import Tensor, zeros
from pyggml.lora.optim.optimiser import FlatOptimiser
from pyggml.ops import mul, sqr, sum_
from pyggml.runtime import Program

_GRADIENT, _SQUARES = "grad:", "squares:"  # the latter: outputs, Σ g² of a tensor's gradient


class LossNotFiniteError(Exception):
    """The loss of a step, raised before the backward pass changes a parameter."""

    def __init__(self, loss: float) -> None:
        self.loss = loss


class StepsInBackward:
    """The steps of an optimiser, as nodes of a graph of gradients."""

    def __init__(self, optimiser: FlatOptimiser) -> None:
        self._optimiser, self._clip = optimiser, optimiser.config.clip
        self._factor, self._names = zeros((1,), F32, "clip"), (*optimiser.parameters.tensors,)

    def begin(self, lr: float, n: int) -> None:
        """Before the backward pass of step n, counted from 1."""
        length = float(self._optimiser.parameters.length[0])
        is_longer = self._clip and isfinite(length) and length > self._clip
        write(self._factor, [self._clip / length if is_longer else 1.0])
        self._optimiser.begin(lr, n)

    def end(self, program: Program) -> None:
        """After it: note how long the gradient was, before it was clipped."""
        graph = program.schedule.graph
        squares = (float(program.read(graph[_SQUARES + name])) for name in self._names)
        self._optimiser.parameters.length[0] = sqrt(sum(squares))

    def within(self, graph: Graph) -> Graph:
        """A graph of `training_graph` with a step in place of the gradient of each parameter.

        What a gradient alone needs is computed right before its step: until then, its sources take
        less memory than it does.
        """
        gradients = {name: graph[_GRADIENT + name] for name in self._names}
        purposes = _purposes(graph, gradients)
        places, updates = _places(graph, purposes), defaultdict[int, list[Tensor]](list)
        outputs = dict(zip(graph.names, graph.outputs, strict=True))
        for name, g in gradients.items():
            square = outputs[_SQUARES + name] = sum_(sqr(g)).named(_SQUARES + name)
            shorter = mul(g, self._factor) if self._clip else g
            step = outputs[_GRADIENT + name] = self._optimiser.step_of(name, shorter)
            readers = graph.readers.get(self._optimiser.parameters.operands[name], ())
            last = max((graph.places[t] for t in readers if purposes[t] != name), default=0)
            updates[max(last, places[name])] += square, step
        order = list[Tensor]()
        for i, node in enumerate(graph.nodes):
            order += [node] if purposes[node] is None else []
            order += updates[i]
        stepped = Graph.of(*outputs.values(), steps=order)
        return replace(stepped, notes=graph.notes, names=tuple(outputs))

    @staticmethod
    def check_loss(loss: np.ndarray) -> None:
        """LossNotFiniteError for a loss after which no step must follow."""
        if not isfinite(loss):
            raise LossNotFiniteError(float(loss))


def _purposes(graph: Graph, gradients: Mapping[str, Tensor]) -> Mapping[Tensor, str | None]:
    """Node → the name of the gradient that alone needs it; None if others do too."""
    names = {g: name for name, g in gradients.items()}
    needed = {t for t in graph.outputs if t not in names}
    purposes = dict[Tensor, str | None]()
    for node in reversed(graph.nodes):
        results = (node, *node.saved)
        users = {purposes[t] for result in results for t in graph.readers.get(result, ())}
        users |= {names[t] for t in results if t in names}
        alone = len(users) == 1 and needed.isdisjoint(results)
        purposes[node] = users.pop() if alone else None
    return purposes


def _places(graph: Graph, purposes: Mapping[Tensor, str | None]) -> Mapping[str, int]:
    """Of each gradient, after which node all is there that it and others need."""
    places = defaultdict[str, int](int)
    for node, name in purposes.items():
        makers = (maker(s) for s in node.src) if name is not None else ()
        for i in (graph.places[t] for t in makers if t.op is not None and purposes[t] != name):
            places[name or ""] = max(places[name or ""], i)
    return places
