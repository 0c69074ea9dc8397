"""Trace: what a model's activations were, and their gradients, by name.

    with model.trace("blk.*.out", "logits") as t:
        model.logits(ids)
    t["blk.3.out"]              # (T, n_embd), of the last run
    t.runs("blk.3.out")         # of every run while the trace was on

Names are those of `pyggml.models.taps`; `model.activations` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, NoGradientError
from pyggml.models import Edit, Taps

Numbers = np.ndarray | Sequence[Any] | float


class Trace:
    """The activations of the runs of a model while it is traced, and their gradients.

    Gradients are those of the loss, where a run has one.
    """

    def __init__(self, patterns: Sequence[str], edits: Sequence[Edit]) -> None:
        self.patterns, self.edits = tuple(patterns), tuple(edits)
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

    def check(self, known: Sequence[str]) -> None:
        """ConfigError for patterns that are no name of a known activation."""
        given = (*self.patterns, *(e.pattern for e in self.edits))
        strangers = [p for p in given if not any(fnmatchcase(name, p) for name in known)]
        if strangers:
            some = ", ".join([*known[:6], "…", *known[-3:]])
            raise ConfigError(
                f"no activation is named {', '.join(dict.fromkeys(strangers))}; there are {some}"
            )

    def taps(self) -> Taps:
        """The taps of one graph."""
        return Taps(self.patterns, self.edits)

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


def edits(
    scale: Mapping[str, float] | None = None,
    add: Mapping[str, Numbers] | None = None,
    replace: Mapping[str, Numbers] | None = None,
    tokens: Iterable[int] | None = None,
) -> list[Edit]:
    """The edits of `Model.trace`. Raises ConfigError for numbers that are not finite."""
    rows = None if tokens is None else tuple(int(t) for t in tokens)
    found = [Edit(p, float(s), None, rows) for p, s in (scale or {}).items()]
    found += [Edit(p, 1.0, np.asarray(a, np.float32), rows) for p, a in (add or {}).items()]
    found += [Edit(p, 0.0, np.asarray(a, np.float32), rows) for p, a in (replace or {}).items()]
    for e in found:
        addend = np.zeros(1) if e.addend is None else e.addend
        if not (np.isfinite(e.factor) and np.isfinite(addend).all()):
            raise ConfigError(f"{e.pattern}: its numbers are not finite")
    return found
