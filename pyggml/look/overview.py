"""The gradient overview: one number for each trained tensor, layer by layer and module by module.

norm     ‖g‖, the length of its gradient
zeros    share of the gradient's numbers that are exactly 0, from 0 to 1
weight   ‖W‖, the length of the tensor before the step
update   ‖ΔW‖, the length of the step's change of it; update / weight is its ratio

Layers and modules are read from the tensors' names, so that any architecture has an overview:

    blk.3.attn_q.weight.lora_a   layer blk.3, module attn_q, factor A
    blk.3.ffn_gate_exps.weight   layer blk.3, module ffn_gate_exps
    output_norm.bias             layer output_norm, module bias
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

MULTIPLE = 10.0  # of a median, from which on a norm counts as exploding
_FEWEST = 3  # norms that a median is taken of
_BLOCK = re.compile(r"((?:\w+\.)*?blk\.[0-9]{1,6})\.(.+)")
_FACTORS = {".lora_a": "A", ".lora_b": "B", ".lora_magnitude": "m"}


class Column(NamedTuple):
    """A module, and which tensor of its update: A, B, DoRA's magnitude m; "" for the tensor itself.

    Outside of blocks the layer has the tensor's name, and the module is "weight" or "bias".
    """

    module: str
    factor: str

    def __str__(self) -> str:
        return f"{self.module} {self.factor}".rstrip()


class Measure(NamedTuple):
    """What is measured of one tensor; NaN for what is not known."""

    norm: float
    zeros: float
    weight: float = float("nan")
    update: float = float("nan")


class Flag(IntEnum):
    """What is wrong with a gradient."""

    FINE = 0
    DEAD = 1
    EXPLODING = 2
    NOT_FINITE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Measures of trained tensors at S steps, of L layers with C columns; see the module.

    steps     S numbers, ascending
    layers    L names, in the order of the model: "token_embd", "blk.0", …, "output"
    columns   C modules and factors
    there     (L, C) bool: whether the layer has this tensor
    norms, zeros, weights, updates   (S, L, C) float64, NaN where a tensor is missing or a number
                                     is not known
    """

    steps: tuple[int, ...]
    layers: tuple[str, ...]
    columns: tuple[Column, ...]
    there: np.ndarray
    norms: np.ndarray
    zeros: np.ndarray
    weights: np.ndarray
    updates: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """‖ΔW‖ / ‖W‖ (S, L, C): W before the step. NaN where W is 0, as B is in the first step."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(self.weights > 0, self.updates / self.weights, np.nan))

    @property
    def layer_norms(self) -> np.ndarray:
        """The length of each layer's whole gradient, (S, L)."""
        return np.sqrt(np.where(self.there, self.norms**2, 0.0).sum(axis=2))

    def at(self, steps: Iterable[int]) -> Overview:
        """The overview of some of its steps alone."""
        kept = [i for i, step in enumerate(self.steps) if step in set(steps)]
        names = ("norms", "zeros", "weights", "updates")
        return replace(
            self,
            steps=tuple(self.steps[i] for i in kept),
            **{name: getattr(self, name)[kept] for name in names},
        )


def cell_of(name: str) -> tuple[str, Column]:
    """The layer and the column of a tensor, by its name."""
    suffix = next((s for s in _FACTORS if name.endswith(s)), "")
    factor, base = _FACTORS.get(suffix, ""), name.removesuffix(suffix)
    inside = _BLOCK.fullmatch(base)
    if inside:
        return inside[1], Column(inside[2].removesuffix(".weight"), factor)
    layer, _, module = base.rpartition(".")
    return (layer, Column(module, factor)) if layer else (base, Column("weight", factor))


def measure(
    gradient: np.ndarray, weight: np.ndarray | None = None, update: np.ndarray | None = None
) -> Measure:
    """The measures of one tensor, of its arrays of any one shape."""
    nan, n = float("nan"), max(gradient.size, 1)
    return Measure(
        _length(gradient),
        1 - np.count_nonzero(gradient != 0) / n,  # four times as fast as without the comparison
        nan if weight is None else _length(weight),
        nan if update is None else _length(update),
    )


def _length(a: np.ndarray) -> float:
    flat = a.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # some CPUs' BLAS tells
        square = float(np.dot(flat, flat))
    if not np.isfinite(square):  # maybe of float32 alone
        square = float(np.square(flat, dtype=np.float64).sum())
    return float(np.sqrt(square))


def overview(measures: Mapping[int, Mapping[str, Measure]]) -> Overview:
    """The overview of {step: {name of a tensor: its measures}}."""
    cells = {step: {cell_of(n): m for n, m in each.items()} for step, each in measures.items()}
    return arrange(cells)


def arrange(measures: Mapping[int, Mapping[tuple[str, Column], Measure]]) -> Overview:
    """The overview of {step: {(layer, column): its measures}}."""
    steps = tuple(sorted(measures))
    cells = list(dict.fromkeys(p for step in steps for p in measures[step]))
    layers = _layers(dict.fromkeys(layer for layer, _ in cells))
    columns = _columns(dict.fromkeys(column for _, column in cells))
    row = {name: i for i, name in enumerate(layers)}
    at = {column: i for i, column in enumerate(columns)}
    numbers = np.full((len(Measure._fields), len(steps), len(layers), len(columns)), np.nan)
    there = np.zeros((len(layers), len(columns)), bool)
    for s, step in enumerate(steps):
        for (layer, column), m in measures[step].items():
            numbers[:, s, row[layer], at[column]] = m
            there[row[layer], at[column]] = True
    return Overview(steps, layers, columns, there, *numbers)


def _layers(names: Iterable[str]) -> tuple[str, ...]:
    """As they come, but the blocks of a stack by their number, where its first one stands."""
    stacks = {name: _stack_and_number(name) for name in names}
    first = {stack: i for i, (stack, _) in reversed(list(enumerate(stacks.values())))}
    return tuple(sorted(stacks, key=lambda name: (first[stacks[name][0]], stacks[name][1])))


def _stack_and_number(layer: str) -> tuple[str, int]:
    """blk.3 -> ("blk", 3); output -> ("output", 0)."""
    stack, _, number = layer.rpartition(".")
    return (stack, int(number)) if stack.endswith("blk") and number.isdecimal() else (layer, 0)


def _columns(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Modules as they come, with their factors beside each other."""
    columns = list(columns)
    first = {c.module: i for i, c in reversed(list(enumerate(columns)))}
    return tuple(sorted(columns, key=lambda c: (first[c.module], c.factor)))


# -- what is wrong ------------------------------------------------------------------------------


def flags(o: Overview) -> np.ndarray:
    """A Flag for every tensor at every step, (S, L, C) int8; FINE where there is no tensor.

    NOT_FINITE   the gradient holds NaN or infinity
    DEAD         all of it is 0; but for a factor whose other factor is 0, which explains it
    EXPLODING    its norm is above MULTIPLE times the median of its column over the layers, or,
                 if fewer than three layers have one, of its layer over the columns of its factor.
                 Medians are of norms that are finite and not 0, of at least three
    """
    flags = np.zeros(o.norms.shape, np.int8)
    for s, norms in enumerate(o.norms):
        medians = _medians(o, norms)
        with np.errstate(invalid="ignore"):
            flags[s][norms > MULTIPLE * medians] = Flag.EXPLODING
        flags[s][(norms == 0) & ~_zero_by_factor(o, o.weights[s])] = Flag.DEAD
        flags[s][o.there & ~np.isfinite(norms)] = Flag.NOT_FINITE
    return flags


def layer_flags(o: Overview) -> np.ndarray:
    """A Flag for every whole layer at every step, (S, L) int8.

    NOT_FINITE   one of its gradients is
    DEAD         all of them are 0, and at least one is dead
    EXPLODING    the norm of all of them together is above MULTIPLE times the median of the blocks
                 of its stack; what stands outside of blocks is not compared
    """
    cells, whole = flags(o), o.layer_norms
    of_layers = np.zeros(whole.shape, np.int8)
    stacks = np.array([_stack_and_number(layer)[0] for layer in o.layers])
    for s, norms in enumerate(whole):
        for stack in set(stacks):
            blocks = stacks == stack
            of_layers[s][blocks & (norms > MULTIPLE * _median(norms[blocks]))] = Flag.EXPLODING
    of_layers[(whole == 0) & (cells == Flag.DEAD).any(axis=2)] = Flag.DEAD
    of_layers[(cells == Flag.NOT_FINITE).any(axis=2)] = Flag.NOT_FINITE
    return of_layers


def _medians(o: Overview, norms: np.ndarray) -> np.ndarray:
    """The median that each norm (L, C) is compared with: that of its column, or of its layer."""
    medians = np.full(norms.shape, np.inf)
    for c, column in enumerate(o.columns):
        median = _median(norms[:, c])
        if np.isfinite(median):
            medians[:, c] = median
            continue
        alike = [i for i, other in enumerate(o.columns) if other.factor == column.factor]
        medians[:, c] = [_median(of_layer) for of_layer in norms[:, alike]]
    return medians


def _median(norms: np.ndarray) -> float:
    """Infinity if there are too few."""
    counted = norms[np.isfinite(norms) & (norms > 0)]
    return float(np.median(counted)) if len(counted) >= _FEWEST else np.inf


def _zero_by_factor(o: Overview, weights: np.ndarray) -> np.ndarray:
    """(L, C) bool: whether the other factor is 0, so that the gradient must be."""
    zero = np.zeros(weights.shape, bool)
    at = {column: i for i, column in enumerate(o.columns)}
    for c, (module, factor) in enumerate(o.columns):
        other = at.get(Column(module, {"A": "B", "B": "A"}.get(factor, "")))
        if factor and other is not None:
            zero[:, c] = weights[:, other] == 0
    return zero


def findings(o: Overview) -> list[str]:
    """What is wrong, in sentences, the worst first; each names its steps, and so is said once.

    What a whole layer is, is not said of its modules; what is not finite is said of these alone.
    """
    cells, rows = flags(o), layer_flags(o)
    steps: dict[tuple[Flag, str], list[int]] = {}
    for s, i in zip(*np.nonzero(np.where(rows == Flag.NOT_FINITE, 0, rows)), strict=True):
        steps.setdefault((Flag(rows[s, i]), o.layers[i]), []).append(o.steps[s])
    for s, i, c in zip(*np.nonzero(cells), strict=True):
        flag = Flag(cells[s, i, c])
        if flag is Flag.NOT_FINITE or flag != rows[s, i]:
            steps.setdefault((flag, f"{o.layers[i]} {o.columns[c]}"), []).append(o.steps[s])
    worst = sorted(steps.items(), key=lambda item: (-item[0][0], -len(item[1])))
    return [f"{what}: {in_words(flag)}, {_steps(at)}" for (flag, what), at in worst]


def in_words(flag: Flag) -> str:
    """What a flag says."""
    if flag is Flag.EXPLODING:
        return f"exploding: the norm is above {MULTIPLE:g} times the median"
    dead = "dead: the gradient is 0"
    return dead if flag is Flag.DEAD else "not finite: the gradient holds NaN or infinity"


def _steps(at: Sequence[int]) -> str:
    if len(at) == 1:
        return f"step {at[0]}"
    return f"{len(at)} recorded steps, from {at[0]} to {at[-1]}"
