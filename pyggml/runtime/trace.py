"""Trace: what a model's activations were, and their gradients, by name.

    with model.trace("blk.*.out", "logits") as t:
        model.logits(ids)
    t["blk.3.out"]              # (T, n_embd), of the last run
    t.runs("blk.3.out")         # of every run while the trace was on

Names are those of `pyggml.models.taps`; `model.activations` lists them. An activation that is read
is an output of the graph, on whatever device it is computed.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pyggml.errors import NoGradientError


class Trace:
    """The activations of the runs of a model while it is traced, and their gradients.

    Gradients are those of the loss, where a run has one.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._values: dict[str, list[np.ndarray]] = {}
        self._grads: dict[str, list[np.ndarray]] = {}

    @property
    def names(self) -> list[str]:
        """What was read, in the order of the graph."""
        return [*self._values]

    def __getitem__(self, name: str) -> np.ndarray:
        """An activation of the last run, float32. KeyError for a name that was not read."""
        return self._values[name][-1]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def runs(self, name: str) -> list[np.ndarray]:
        """An activation of every run; of generation, the prompt's pieces and then each token's."""
        return self._values[name]

    def grad(self, name: str) -> np.ndarray:
        """d(loss)/d(activation) of the last run with a loss.

        Raises NoGradientError if there was none.
        """
        if name not in self._grads:
            raise NoGradientError(
                f"{name} has no gradient: no loss was differentiated while it was traced"
            )
        return self._grads[name][-1]

    def record(
        self, values: Mapping[str, np.ndarray], grads: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Take in a run's activations, and perhaps their gradients."""
        for name, a in values.items():
            self._values.setdefault(name, []).append(a)
        for name, a in (grads or {}).items():
            self._grads.setdefault(name, []).append(a)

    def __repr__(self) -> str:
        return f"<Trace of {len(self._values)} activations>"
