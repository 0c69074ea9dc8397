"""Optimisers of values: the training loop of a page. They update `data` from `grad`, in place.

    optimiser = AdamW([w, b], lr=1e-2)
    for step in range(100):
        loss = ...
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

They are written in NumPy, to be read. `pyggml.lora.optim` runs the same steps in compiled kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from pyggml.eager.value import Value
from pyggml.errors import ConfigError, Fault


class Optimiser(ABC):
    """Parameters and a learning rate, which may be changed between steps.

    Raises ConfigError for no parameters, for one that is no leaf with requires_grad, and for a
    learning rate below 0.
    """

    def __init__(self, parameters: Iterable[Value], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        faults: list[Fault] = [
            f"{p!r} is no parameter: wanted tensor(..., requires_grad=True)"
            for p in self.parameters
            if p.node.op is not None or not p.requires_grad
        ]
        if not self.parameters:
            faults.append("there are no parameters, wanted one at least")
        if not 0 <= lr < float("inf"):
            faults.append(("lr", f"is {lr}, wanted 0 or more"))
        if faults:
            raise ConfigError(faults)

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for p in self.parameters:
            p.zero_grad()

    def step(self) -> None:
        """Update every parameter; NoGradientError if one has no gradient."""
        gradients = [p.grad for p in self.parameters]
        for i, (p, g) in enumerate(zip(self.parameters, gradients, strict=True)):
            p.data = self.update(i, p.data, g)

    @abstractmethod
    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        """Parameter i after one step, given its numbers and its gradient."""


class SGD(Optimiser):
    """p ← p - lr · v,  v ← momentum · v + g."""

    def __init__(self, parameters: Iterable[Value], lr: float, momentum: float = 0.0) -> None:
        super().__init__(parameters, lr)
        self.momentum = momentum
        self.v = [np.zeros(p.shape, np.float32) for p in self.parameters]

    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.v[i] = self.momentum * self.v[i] + g
        return p - self.lr * self.v[i]


class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov, Hutter 2019).

    m ← β1·m + (1 - β1)·g,  v ← β2·v + (1 - β2)·g²,  m̂ = m / (1 - β1ⁿ),  v̂ = v / (1 - β2ⁿ)
    p ← p · (1 - lr · weight_decay) - lr · m̂ / (√v̂ + ε)
    """

    def __init__(
        self,
        parameters: Iterable[Value],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, lr)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.n = 0
        self.m = [np.zeros(p.shape) for p in self.parameters]
        self.v = [np.zeros(p.shape) for p in self.parameters]

    def step(self) -> None:
        self.n += 1
        super().step()

    def update(self, i: int, p: np.ndarray, g: np.ndarray) -> np.ndarray:
        b1, b2 = self.betas
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g * g
        mean = self.m[i] / (1 - b1**self.n)
        square = self.v[i] / (1 - b2**self.n)
        decayed = p * (1 - self.lr * self.weight_decay)
        return np.asarray(decayed - self.lr * mean / (np.sqrt(square) + self.eps))
