"""Model with adapters → a model file with the updates added to its weights.

matrices   W ← W + s·BA          experts: each its own; tables: W ← W + s·AB
DoRA       W_i ← m_i · (W + s·BA)_i / ‖(W + s·BA)_i‖

Each tensor is unpacked, updated in float32 by all adapters, and packed once: as the type that it
had, or as that of a file type. A change below the step of a coarse type is kept by the way it is
rounded (pyggml.quants.keep). One tensor is in memory at a time.
"""

import os
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from pyggml.errors import AdapterError
from pyggml.graph.arrays import read
from pyggml.lora.adapter.starts import row_squares, unpack
from pyggml.model import Model
from pyggml.models import LoraPair
from pyggml.models.config import POOLINGS
from pyggml.models.stack import POOLING, learned_metadata
from pyggml.models.weights import factor_of
from pyggml.requantize import PackingLosses, Progress, rewrite
from pyggml.requantize.imatrix import ImportanceMatrix

_ROWS = 1024  # of a matrix that are updated at a time


def merge(
    model: Model,
    path: str | os.PathLike[str],
    file_type: str | None = None,
    progress: Progress | None = None,
    importance: ImportanceMatrix | None = None,
    rounding: str = "update",
    metadata: Mapping[str, Any] | None = None,
) -> PackingLosses:
    """Write the model with the updates of all its adapters in its weights.

    file_type: F32, F16, Q8_0, Q4_K_M, …, also of a base that is quantised already; None: every
    tensor keeps its type. `progress`, `importance`, `rounding` and `metadata` are those of
    `pyggml.requantize.rewrite`, which also says what is raised. Returns how much of the updates is
    in the file, and how far its numbers are from the sums, by tensor. An older file at `path` stays
    whole until the new one is complete. Raises AdapterError if the model has no adapter.
    """
    if not model.adapters:
        raise AdapterError("the model has no adapter: there is nothing to merge")
    changed = {name: partial(merged_weight, model, name) for name in update_counts(model)}
    keys = learned_metadata(model.adapters)
    if pooling := keys.pop(POOLING, None):  # which a model has as llama.cpp reads it
        keys[f"{model.config.architecture}.pooling_type"] = np.uint32(POOLINGS.index(pooling))
    how: dict[str, Any] = {"rounding": rounding, "metadata": keys | dict(metadata or {})}
    return rewrite(model.file, path, file_type, changed, progress, True, importance, **how)


def update_counts(model: Model) -> dict[str, int]:
    """Names of the tensors that the model's adapters update, and how many of them do."""
    return dict(Counter(name for pairs in model.adapters for name in pairs))


def merged_weight(model: Model, name: str) -> np.ndarray:
    """One tensor with its updates, float32, in its own shape."""
    weight = model.parts.weights[name]
    w = unpack(weight)
    is_table = model.parts.decoder.tensors()[name].table
    scale = factor_of(model.parts.weights, name)
    factors = np.ones(len(w), np.float32) if scale is None else read(scale)
    for pairs in model.adapters:
        if name in pairs:
            _update(w, pairs[name], is_table, factors)
    return w


def _update(w: np.ndarray, pair: LoraPair, is_table: bool, factors: np.ndarray) -> None:
    """Add an update to a weight in place. factors: what the file multiplies the products of the
    weight with, one, or one for each expert."""
    left, right = (read(t) for t in ((pair.a, pair.b) if is_table else (pair.b, pair.a)))
    right = right.T if is_table else right
    if w.ndim == 3:
        for matrix, b, a, factor in zip(w, left, right, factors, strict=True):
            _add_product(matrix, b, a, pair.scale / factor)
        return
    _add_product(w, left, right, pair.scale / factors[0])
    if pair.magnitude is not None:
        w *= (read(pair.magnitude.m) / np.sqrt(row_squares(w)))[:, None]


def _add_product(w: np.ndarray, left: np.ndarray, right: np.ndarray, scale: float) -> None:
    for first in range(0, len(w), _ROWS):
        rows = slice(first, first + _ROWS)
        w[rows] += np.float32(scale) * (left[rows] @ right)
