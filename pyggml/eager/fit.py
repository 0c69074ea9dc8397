"""fit: epochs over a small data set, for a graph whose inputs hold one batch (ggml's ggml_opt_fit).

x, y = zeros((32, 2), name="x"), zeros((32, 1), name="y")     a batch of 32 rows
loss = ...
epochs = fit(AdamW([w, b], lr=1e-2, loss=loss), {x: points, y: labels}, n_epochs=20)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.eager.optim import Optimiser
from pyggml.errors import ConfigError, Fault
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.tensor import Tensor
from pyggml.runtime import Devices, Program, bind, schedule


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data: mean losses of a batch.

    number    counted from 1
    loss      of the rows that were learned, each before its own step
    held_out  of the rows that were held out, after the epoch; None without any
    """

    number: int
    loss: float
    held_out: float | None

    def __str__(self) -> str:
        """epoch 3: loss 0.1234, held out 0.2345"""
        after = "" if self.held_out is None else f", held out {self.held_out:.4f}"
        return f"epoch {self.number}: loss {self.loss:.4f}{after}"


def fit(
    optimiser: Optimiser,
    data: Mapping[Tensor, np.ndarray],
    n_epochs: int,
    held_out: float = 0.0,
    seed: int = 0,
    report: Callable[[Epoch], object] | None = None,
) -> list[Epoch]:
    """Train over all rows n_epochs times, in a new order each time. Returns the losses by epoch.

    data      input of the loss, which holds a batch of B rows -> an array of N rows
    held_out  the share of the batches that is never learned
    seed      draws that share, and the orders
    report    is called after each epoch: fit(…, report=print)

    Raises ConfigError for an optimiser of values, for inputs that the loss does not depend on or
    whose rows do not fit, for an N that is no multiple of B, and for shares that leave nothing.
    """
    n, size = _rows(optimiser.loss, data)
    n_held = round(held_out * (n // size))
    faults: list[Fault] = []
    if not 0 <= held_out < 1 or n_held >= n // size:
        faults.append(("held_out", f"is {held_out} of {n // size} batches, wanted some to learn"))
    if n_epochs < 1:
        faults.append(("n_epochs", f"is {n_epochs}, wanted 1 or more"))
    if faults:
        raise ConfigError(faults)
    rng = np.random.default_rng(seed)
    order = rng.permutation(n)
    held, learned = np.split(order, [n_held * size])
    forward = _forward(optimiser) if n_held else None
    epochs = []
    for number in range(1, n_epochs + 1):
        losses = [optimiser.step() for _ in _batches(data, rng.permutation(learned), size)]
        after = None if forward is None else _mean_loss(forward, optimiser.loss, data, held, size)
        epochs.append(Epoch(number, float(np.mean([x for x in losses if x is not None])), after))
        if report is not None:
            report(epochs[-1])
    return epochs


def _rows(loss: Tensor, data: Mapping[Tensor, np.ndarray]) -> tuple[int, int]:
    """(rows of the data, rows of a batch)."""
    leaves, faults = Graph.of(loss).leaves, list[Fault]()
    for t, rows in data.items():
        if t not in leaves:
            faults.append(f"{t!r} is no input of the loss")
        elif not t.shape or rows.shape[1:] != t.shape[1:]:
            faults.append(f"rows of {list(rows.shape[1:])} do not fit into {t!r}")
    sizes = {(len(rows), t.shape[0]) for t, rows in data.items() if t.shape and rows.ndim}
    n, size = next(iter(sizes), (0, 0))
    if len(sizes) != 1:
        faults.append(f"{len(data)} inputs with rows and batches {sorted(sizes)}, wanted one pair")
    elif not size or not n or n % size:
        faults.append(f"{n} rows in batches of {size}, wanted a multiple")
    if faults:
        raise ConfigError(faults)
    return n, size


def _batches(data: Mapping[Tensor, np.ndarray], order: np.ndarray, size: int) -> Iterator[None]:
    """Put one batch after the other into the inputs."""
    for first in range(0, len(order), size):
        chosen = order[first : first + size]
        for t, rows in data.items():
            write(t, rows[chosen])
        yield


def _forward(optimiser: Optimiser) -> Program:
    """The loss alone, where the optimiser runs it."""
    devices: Devices = optimiser.program.schedule.devices
    return bind(schedule(Graph.of(optimiser.loss), devices))


def _mean_loss(
    forward: Program, loss: Tensor, data: Mapping[Tensor, np.ndarray], rows: np.ndarray, size: int
) -> float:
    losses = []
    for _ in _batches(data, rows, size):
        forward()
        losses.append(forward.read(loss).item())
    return float(np.mean(losses))
