"""Optimisers of values, and of the tensors of a graph: the training loop of a page.

Of values, they update `data` from `grad`, in place, in NumPy.

    optimiser = AdamW([w, b], lr=1e-2)
    for step in range(100):
        loss = ...
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

Of tensors, they are nodes of the loss's graph, behind its gradients: a step is one run of it.

    optimiser = AdamW([w, b], lr=1e-2, loss=loss)
    for step in range(100):
        write(x, ...)
        print(optimiser.step())

`pyggml.eager.fit` is that loop over a data set. `pyggml.lora.optim` has the settings of a run.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from pyggml.backward import build_backward
from pyggml.eager.value import Value
from pyggml.errors import ConfigError, Fault
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, leaf, zeros
from pyggml.ops import add, cpy, formulas, opt_step_adamw, opt_step_sgd, scale
from pyggml.ops.optim import OPT_STEP_ADAMW, adamw_settings
from pyggml.runtime import Arenas, Devices, Program, bind, schedule


class Optimiser(ABC):
    """Parameters and a learning rate, which may be changed between steps.

    Parameters are leaves: Values with requires_grad, or F32 tensors of the graph of `loss`, a
    tensor of one number. `devices` are where that graph runs, by default the host, `arenas` the
    memory that it shares with other programs, and `reads` what `program.read` gives after a step.

    Raises ConfigError for no parameters, for what is no such leaf, for both kinds at once, for
    tensors without a loss, and for a learning rate below 0.

    n   the steps taken
    """

    n_settings: int  # numbers that a step of tensors reads

    def __init__(
        self,
        parameters: Iterable[Value | Tensor],
        lr: float,
        loss: Tensor | None = None,
        devices: Devices | None = None,
        arenas: Arenas | None = None,
        reads: Sequence[Tensor] = (),
    ) -> None:
        self.parameters, self.lr, self.n = list(parameters), lr, 0
        self._loss, self._devices, self._arenas, self._reads = loss, devices, arenas, reads
        faults: list[Fault] = [fault for p in self.parameters if (fault := _fault(p))]
        kinds = {isinstance(p, Tensor) for p in self.parameters}
        if not self.parameters:
            faults.append("there are no parameters, wanted one at least")
        if len({*map(id, self.parameters)}) < len(self.parameters):
            faults.append("a parameter stands twice, wanted each once")
        if len(kinds) > 1:
            faults.append("parameters are values and tensors, wanted one kind")
        if kinds == {True} and (not isinstance(loss, Tensor) or loss.n_elements != 1):
            faults.append(("loss", f"is {loss!r}, wanted the tensor of one number to be lowered"))
        if kinds == {False} and loss is not None:
            faults.append(("loss", "is for tensors; of values, call loss.backward()"))
        if not 0 <= lr < float("inf"):
            faults.append(("lr", f"is {lr}, wanted 0 or more"))
        if faults:
            raise ConfigError(faults)
        self._settings = zeros((self.n_settings,), F32, "settings")

    @property
    def loss(self) -> Tensor:
        """The tensor that is lowered. Raises ConfigError if the parameters are values."""
        if self._loss is None:
            raise ConfigError(["the parameters are values: their loss is the one of backward()"])
        return self._loss

    def zero_grad(self) -> None:
        """Forget the gradients of all values; those of tensors are made anew in each step."""
        for p in self.parameters:
            if isinstance(p, Value):
                p.zero_grad()

    def step(self) -> float | None:
        """Update every parameter. Of tensors: runs the graph, and returns the loss before the
        update.

        Raises NoGradientError for a value that has no gradient, or a tensor that the loss does not
        depend on.
        """
        if self._loss is not None:
            program = self.program
            self.n += 1
            write(self._settings, self.settings())
            program()
            return float(program.read(self._loss).item())
        values = [p for p in self.parameters if isinstance(p, Value)]
        gradients = [p.grad for p in values]
        self.n += 1
        for i, (p, g) in enumerate(zip(values, gradients, strict=True)):
            p.data = self.update(i, p.data, g)
        return None

    @cached_property
    def program(self) -> Program:
        """What a step of tensors runs: the loss, its gradients, and a node that updates each."""
        tensors = [p for p in self.parameters if isinstance(p, Tensor)]
        gradients = build_backward(Graph.of(self.loss), tensors).outputs[1:]
        pairs = enumerate(zip(tensors, gradients, strict=True))
        updates = [self.node(i, p, g, self._settings) for i, (p, g) in pairs]
        graph = Graph.of(*updates, *self._reads, loss=self.loss)
        return bind(schedule(graph, self._devices or Devices()), arenas=self._arenas)

    def moments(self) -> list[np.ndarray]:
        """Zeros for every parameter: float32 beside tensors, as the node's kernel reads them."""
        kind = np.float64 if self._loss is None else np.float32
        return [np.zeros(p.shape, kind) for p in self.parameters]

    @abstractmethod
    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Parameter i after one step, given its numbers and its gradient."""

    @abstractmethod
    def node(self, i: int, p: Tensor, g: Tensor, settings: Tensor) -> Tensor:
        """The same as a node that writes over p; it reads n_settings numbers."""

    @abstractmethod
    def settings(self) -> Sequence[float]:
        """Those numbers, of step n."""


def _fault(p: object) -> str | None:
    """What is wrong with a parameter."""
    if isinstance(p, Tensor):
        right = p.op is None and p.dtype is F32
        return None if right else f"{p!r} is no parameter: wanted a leaf in F32"
    right = isinstance(p, Value) and p.node.op is None and p.requires_grad
    return None if right else f"{p!r} is no parameter: wanted tensor(..., requires_grad=True)"


class SGD(Optimiser):
    """p ← p - lr · v,  v ← momentum · v + g."""

    n_settings = 2

    def __init__(
        self,
        parameters: Iterable[Value | Tensor],
        lr: float,
        momentum: float = 0.0,
        loss: Tensor | None = None,
        devices: Devices | None = None,
    ) -> None:
        super().__init__(parameters, lr, loss, devices)
        self.momentum = momentum
        self.v = [np.zeros(p.shape, np.float32) for p in self.parameters]

    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.v[i] = self.momentum * self.v[i] + g
        return p - self.lr * self.v[i]

    def node(self, i: int, p: Tensor, g: Tensor, settings: Tensor) -> Tensor:
        """With a momentum, v is written over by its new numbers first."""
        if self.momentum:
            v = leaf(self.v[i], "v")
            g = cpy(add(scale(v, self.momentum), g), v)
        return opt_step_sgd(p, g, settings)

    def settings(self) -> Sequence[float]:
        return self.lr, 0.0


class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019).

    m ← β1·m + (1 - β1)·g,  v ← β2·v + (1 - β2)·g²,  m̂ = m / (1 - β1ⁿ),  v̂ = v / (1 - β2ⁿ)
    p ← p · (1 - lr · weight_decay) - lr · m̂ / (√v̂ + ε)
    """

    n_settings = 7

    def __init__(
        self,
        parameters: Iterable[Value | Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        loss: Tensor | None = None,
        devices: Devices | None = None,
        arenas: Arenas | None = None,
        reads: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(parameters, lr, loss, devices, arenas, reads)
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError([("betas", f"are {betas}, wanted 0 to below 1")])
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.m, self.v = self.moments(), self.moments()

    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        moments = self.m[i], self.v[i]
        beta1, beta2 = self.betas
        self.m[i], self.v[i] = formulas.moments(g, *moments, beta1=beta1, beta2=beta2)
        return OPT_STEP_ADAMW.ref(p, g, *moments, self.settings())

    def node(self, i: int, p: Tensor, g: Tensor, settings: Tensor) -> Tensor:
        return opt_step_adamw(p, g, leaf(self.m[i], "m"), leaf(self.v[i], "v"), settings)

    def settings(self) -> Sequence[float]:
        return adamw_settings(self.lr, self.betas, self.eps, self.weight_decay, self.n)
