"""Trace: what a model's activations were, and their gradients, by name.

    with model.trace("blk.*.out", "logits") as t:
        model.logits(ids)
    t["blk.3.out"]              # (T, n_embd), of the last run
    t.runs("blk.3.out")         # of every run while the trace was on

A run of several texts gives a list of arrays, one for each text, where one text gives an array.

Names are those of `pyggml.models.taps`; `model.activations` lists them. An activation that is read
is an output of the graph, on whatever device it is computed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml.errors import NoGradientError, first_names
from pyggml.models.taps import Edit, fits

Arrays = Mapping[str, np.ndarray | list[np.ndarray]]  # of one text, or of each of several


class Trace:
    """The activations of the runs of a model while it is traced, and their gradients.

    patterns   names to read, with * and ? as in a shell
    edits      what is changed meanwhile

    Gradients are those of the loss, where a run has one. The validations of a trainer, which have
    none, are kept apart from its batches.
    """

    def __init__(self, patterns: Sequence[str], edits: Sequence[Edit] = ()) -> None:
        self.patterns, self.edits = tuple(patterns), tuple(edits)
        self._values: dict[str, list[Any]] = {}
        self._validations: dict[str, list[Any]] = {}
        self._grads: dict[str, list[Any]] = {}

    @property
    def names(self) -> list[str]:
        """What was read, in the order of the graph."""
        return [*self._values]

    def __getitem__(self, name: str) -> Any:
        """An activation of the last run, float32: an array, or of several texts a list of arrays.

        KeyError for a name that was not read.
        """
        return self._read(name)[-1]

    def _read(self, name: str) -> list[Any]:
        if name not in self._values:
            raise KeyError(f"{name} was not read, but {first_names(self.names, 3) or 'nothing'}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def runs(self, name: str, *, validation: bool = False) -> list[Any]:
        """An activation of every run; of generation, the prompt's pieces and then each token's.

        Of a trainer: of every batch that it learned from, or of those of its validations.
        """
        return self._validations.get(name, []) if validation else self._read(name)

    def grad(self, name: str) -> Any:
        """d(loss)/d(activation) of the last run with a loss, as `t[name]`.

        Raises NoGradientError if there was none.
        """
        return self.grads(name)[-1]

    def grads(self, name: str) -> list[Any]:
        """The same of every run with a loss: of a trainer, one for each of `runs(name)`."""
        if name not in self._grads:
            raise NoGradientError(
                f"{name} has no gradient: no loss was differentiated while it was traced"
            )
        return self._grads[name]

    def record(
        self, values: Arrays, grads: Arrays | None = None, *, validation: bool = False
    ) -> None:
        """Take in what is read of a run's activations, and perhaps of their gradients."""
        for kept, arrays in (
            (self._validations if validation else self._values, values),
            (self._grads, grads or {}),
        ):
            for name, a in arrays.items():
                if fits(name, self.patterns):
                    kept.setdefault(name, []).append(a)

    def __repr__(self) -> str:
        return f"<Trace of {len(self._values)} activations>"


def record(
    traces: Iterable[Trace],
    values: Arrays,
    grads: Arrays | None = None,
    *,
    validation: bool = False,
) -> None:
    """Give a run's activations to each of several traces."""
    for trace in traces:
        trace.record(values, grads, validation=validation)
