"""Activation patching: one activation of another text at a time (Meng et al. 2022; Heimersheim and
Nanda 2024)."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np

from pyggml.errors import ConfigError, DataError, suggestion
from pyggml.lab.effects import (
    Effects,
    Metrics,
    Progress,
    Texts,
    metrics_apart,
    of_pairs,
    read_activations,
    run_cells,
)
from pyggml.lab.linear import exact, head_counts
from pyggml.model import Model
from pyggml.models.edits import At
from pyggml.models.sweep import Cell
from pyggml.models.texts import is_several

AXES = "layer", "token", "head"


@of_pairs
def activation_patching(
    model: Model,
    clean: Texts,
    corrupt: Texts,
    metric: Metrics,
    what: str = "out",
    by: Sequence[str] = ("layer", "token"),
    *,
    layers: Iterable[int] | None = None,
    tokens: Iterable[int] | Sequence[Sequence[int]] | None = None,
    heads: Iterable[int] | None = None,
    progress: Progress | None = None,
) -> list[Effects]:
    """The metric of the corrupt text with activations of the clean one in their places.

    clean, corrupt  token ids (T,) of one length; or lists of these, pair by pair, of any lengths,
             which share passes: results are a list, and the metric is one for all or a list
    metric   as `Model.grad` has it
    what     an activation of blocks: "out", "mid", "attn_out", "ffn_out", "attention", "q", "v", …
    by       the result's axes, of "layer", "token", "head"; along others it is patched whole
    layers, tokens, heads   which; None: all. tokens: a list of lists has those of each pair

    All cells run in one program; products are exact. `shares` of the result is 0 where a patch does
    nothing, and 1 where it restores the clean text's metric. Raises DataError for texts of unlike
    length, a metric that is the same of both, and tokens and heads that there are not; ConfigError
    for such axes, layers and activations, ShapeError for a metric that is no number.
    """
    model = exact(model)
    names = _names(model, what, layers)
    sources = read_activations(model, clean, names.values())
    chosen = zip(sources, _by_pair(tokens, len(clean)), strict=True)
    heads = None if heads is None else [*heads]
    grids = [_grid(model, names, what, by, *each, heads) for each in chosen]
    grid_axes, cells = zip(*grids, strict=True)
    ends = metrics_apart(model, metric, corrupt, clean)
    values_by_pair = run_cells(model, metric, corrupt, names.values(), cells, progress)
    return [
        Effects(y.reshape([*map(len, axes.values())]), axes, *pair, f"{what} of the clean text")
        for y, axes, pair in zip(values_by_pair, grid_axes, ends, strict=True)
    ]


def _by_pair(tokens: Any, n_pairs: int) -> list[list[int] | None]:
    """The chosen tokens of each pair. DataError for lists of more or fewer."""
    if not is_several(tokens):
        return [None if tokens is None else [*tokens]] * n_pairs
    if len(tokens) != n_pairs:
        raise DataError(f"tokens has {len(tokens)} lists, wanted one for each of {n_pairs} pairs")
    return [[*pair] for pair in tokens]


def _grid(
    model: Model,
    names: dict[int, str],
    what: str,
    by: Sequence[str],
    source: dict[str, np.ndarray],
    tokens: list[int] | None,
    heads: list[int] | None,
) -> tuple[dict[str, list[int]], list[Cell]]:
    """The axes of one text's result with the numbers along them, and its cells."""
    n_tokens = len(next(iter(source.values())))
    n_heads = _n_heads(model, names, what, source, "head" in by)
    axes, where = _axes(by, [*names], tokens, heads, n_tokens, n_heads)
    points = (dict(zip(axes, at, strict=True)) for at in product(*axes.values()))
    return axes, [_cell(names, source, where, at) for at in points]


def _axes(
    by: Sequence[str],
    layers: list[int],
    tokens: Iterable[int] | None,
    heads: Iterable[int] | None,
    n_tokens: int,
    n_heads: int,
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The axes of the result with the numbers along them, and where all cells act."""
    if not by or len({*by}) < len(by) or {*by} - {*AXES}:
        raise ConfigError(f"by is {by!r}, wanted some of {', '.join(AXES)}, each once")
    numbers = {
        "layer": layers,
        "token": _chosen_numbers("token", tokens, n_tokens),
        "head": _chosen_numbers("head", heads, n_heads),
    }
    asked = {"token": tokens is not None, "head": heads is not None}
    where = {f"{axis}s": numbers[axis] for axis, is_asked in asked.items() if is_asked}
    return {axis: numbers[axis] for axis in AXES if axis in by}, where


def _cell(
    names: dict[int, str], source: dict[str, np.ndarray], where: dict[str, Any], at: dict[str, int]
) -> Cell:
    """The change of one cell: where all act, and at its own numbers along its axes."""
    layers = [at["layer"]] if "layer" in at else [*names]
    where = where | {f"{axis}s": [i] for axis, i in at.items() if axis != "layer"}
    return {"replace": {names[i]: At(source[names[i]], **where) for i in layers}}


def _names(model: Model, what: str, layers: Iterable[int] | None) -> dict[int, str]:
    """Block → the name of its activation. ConfigError for what no block has, or one of these."""
    names_of_model = {*model.activations}
    every = {i: f"blk.{i}.{what}" for i in range(model.config.n_layer)}
    names = {i: name for i, name in every.items() if name in names_of_model}
    if not names:
        endings = {n.split(".", 2)[2] for n in names_of_model if n.startswith("blk.")}
        near = suggestion(what, endings) or "; model.activations lists them"
        raise ConfigError(f"no block of {model.config.architecture} has {what}{near}")
    if layers is None:
        return names
    chosen = [*layers]
    if wrong := [i for i in chosen if i not in names]:
        raise ConfigError(f"there is no blk.{wrong[0]}.{what} among {len(every)} blocks")
    return {i: names[i] for i in chosen}


def _chosen_numbers(axis: str, numbers: Iterable[int] | None, n: int) -> list[int]:
    """The numbers along an axis of n. DataError for others."""
    chosen = [*range(n)] if numbers is None else [*numbers]
    if wrong := [i for i in chosen if not -n <= i < n]:
        raise DataError(f"there is no {axis} {wrong[0]} among {n}")
    if not chosen and n:
        raise DataError(f"{axis}s is empty, wanted one at least")
    return chosen


def _n_heads(
    model: Model, names: dict[int, str], what: str, source: dict[str, np.ndarray], is_needed: bool
) -> int:
    """How many heads an activation has, in the block that has most; 0: none."""
    if what == "attention":
        n = max(head_counts(model))
    else:
        n = max(source[name].shape[1] * (source[name].ndim == 3) for name in names.values())
    if is_needed and not n:
        raise ConfigError(f"{next(iter(names.values()))} has no heads")
    return n
