"""The gradient overview of a run, measured at some of its steps.

A record of metrics.jsonl has one step of it. Rows are layers, columns are modules with their factor
(pyggml.look.overview); numbers have four digits, null stands for a tensor that a layer lacks, and a
number that is not finite is a word:

{"event": "gradients", "step": 1, "layers": ["blk.0", …], "columns": ["attn_q A", "attn_q B", …],
 "norm": [[0.012, …], …], "zeros": …, "weight": …, "update": …}
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite, sqrt
from typing import Any

import numpy as np

from pyggml.graph.arrays import read
from pyggml.look.overview import Column, Measure, Overview, arrange, measure, overview
from pyggml.lora.adapter.parameters import Parameters
from pyggml.runtime import Devices

EVENT = "gradients"
_SAMPLED = 50  # steps of a run
_DIGITS = 4
_MOST = 1 << 12  # layers, columns, and records of a file


class Watch:
    """Measures the gradients of a run's parameters and what its steps change.

    What a step changes is its parameters less those before it, so that a copy of them is kept: 4
    bytes for each trained number, in memory that is idle meanwhile. Measuring is a few passes over
    the buffers: 10 million numbers took 29 ms on one core, where a step over 512 tokens takes
    seconds.
    """

    def __init__(self, parameters: Parameters, devices: Devices, n_steps: int) -> None:
        self._parameters, self._devices, self._n_steps = parameters, devices, n_steps
        self._before: np.ndarray | None = None

    def keep(self, step: int, memory: Callable[[int], np.ndarray]) -> None:
        """Copy the parameters before they are updated, if the step is one that is measured.

        memory: makes an array for so many numbers, which lasts until the next pass
        """
        if self.is_sampled(step):
            self._gather()
            p = self._parameters
            self._before = memory(p.gradient.size)
            for name in p.tensors:
                p.part_of(name, self._before)[...] = p.numbers(name)

    def __call__(self, step: int, grad_norm: float) -> Overview | None:
        """The overview of the step just made, if it is one that is measured.

        grad_norm: the length of the gradient before it was clipped, which the norms are of too.
        """
        before, self._before = self._before, None
        return None if before is None else self._measure(step, grad_norm, before)

    def is_sampled(self, step: int) -> bool:
        """The first step, the last one, and about fifty between them."""
        return step in (1, self._n_steps) or step % max(1, self._n_steps // _SAMPLED) == 0

    def _gather(self, *names: str) -> None:
        p = self._parameters
        self._devices.gather(*p.trained_leaves, *(t for name in names for t in p.buffers[name]))

    def _measure(self, step: int, grad_norm: float, before: np.ndarray) -> Overview:
        self._gather("gradient")
        measures = {}
        p = self._parameters
        for name in p.tensors:
            old, g = p.part_of(name, before), read(p.gradients[name])
            measures[name] = measure(g, old.reshape(-1), (p.numbers(name) - old).reshape(-1))
        length = sqrt(sum(m.norm**2 for m in measures.values()))
        factor = grad_norm / length if length else 1.0  # what was clipped
        return overview({step: {n: m._replace(norm=factor * m.norm) for n, m in measures.items()}})


def gradients_record(o: Overview) -> dict[str, Any]:
    """The record of an overview of one step."""
    (step,) = o.steps
    arrays = {"norm": o.norms, "zeros": o.zeros, "weight": o.weights, "update": o.updates}
    return {
        "event": EVENT,
        "step": step,
        "layers": list(o.layers),
        "columns": [str(column) for column in o.columns],
        **{name: _rows(a[0], o.there) for name, a in arrays.items()},
    }


def _rows(a: np.ndarray, there: np.ndarray) -> list[list[float | str | None]]:
    return [
        [_number(x) if is_there else None for x, is_there in zip(*row, strict=True)]
        for row in zip(a.tolist(), there.tolist(), strict=True)
    ]


def _number(x: float) -> float | str:
    return float(f"{x:.{_DIGITS}g}") if isfinite(x) else str(x)


def overview_of(records: Iterable[Mapping[str, Any]]) -> Overview | None:
    """The overview of a run's records, of any events; None if nothing was measured.

    Records are of a file, so maybe others': what is no table of numbers is left out.
    """
    by_step: dict[int, Mapping[tuple[str, Column], Measure]] = {}
    for record in records:
        if record["event"] == EVENT and len(by_step) < _MOST:
            measures = _measures(record)
            if measures:
                by_step[record["step"]] = measures
    return arrange(by_step) if by_step else None


def _measures(record: Mapping[str, Any]) -> dict[tuple[str, Column], Measure]:
    layers, columns = _names(record.get("layers")), _names(record.get("columns"))
    tables = [_table(record.get(name), len(layers), len(columns)) for name in Measure._fields]
    norms = tables[0]
    if norms is None or not norms.size:
        return {}
    unknown = np.full(norms.shape, np.nan)
    numbers = [unknown if t is None else t for t in tables]
    parts = [Column(*column.partition(" ")[::2]) for column in columns]
    return {
        (layer, column): Measure(*(float(t[i, c]) for t in numbers))
        for i, layer in enumerate(layers)
        for c, column in enumerate(parts)
        if record["norm"][i][c] is not None
    }


def _names(values: Any) -> list[str]:
    """The names, or none if these are none."""
    is_list = isinstance(values, list) and len(values) <= _MOST
    return values if is_list and all(isinstance(v, str) for v in values) else []


def _table(rows: Any, n_layers: int, n_columns: int) -> np.ndarray | None:
    """The lengths or shares (n_layers, n_columns); None if the rows are not such a table."""
    if not isinstance(rows, list) or len(rows) != n_layers:
        return None
    if any(not isinstance(row, list) or len(row) != n_columns for row in rows):
        return None
    try:
        table = np.array([[np.nan if x is None else float(x) for x in row] for row in rows])
    except (TypeError, ValueError, OverflowError):
        return None
    return None if (table < 0).any() else table
