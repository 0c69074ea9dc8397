"""Adapters of one model → one adapter that does what they do together, at any rank.

sum    Δ = Σ wᵢ Δᵢ
ties   Δᵢ keeps its largest numbers, a share of `density`; at each place those that have the sign of
       their sum are averaged: Σ wᵢ Δᵢ / how many         Yadav et al. 2023, arXiv:2306.01708
dare   Δᵢ keeps numbers at random, with the probability `density`, divided by it; Δ = Σ wᵢ Δᵢ
       Yu et al. 2023, arXiv:2311.03099

A sum without a rank is exact: A's rows and B's columns of all adapters side by side. Everything
else is brought to a rank by the largest singular values, which is the nearest update of that rank.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from pyggml.errors import AdapterError, ConfigError, NotFiniteError
from pyggml.graph.arrays import read
from pyggml.lora.adapter.file import Update, write_adapter
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs
from pyggml.models.adapter import BASE_NAME
from pyggml.models.stack import base_metadata

Method = Literal["sum", "ties", "dare"]
METHODS: tuple[Method, ...] = get_args(Method)
Halves = tuple[np.ndarray, np.ndarray]  # (n_out, r) and (r, n_in), whose product is an update


def combine(
    model: Model,
    path: str | os.PathLike[str],
    method: Method = "sum",
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, n: None,
) -> dict[str, float]:
    """Write one adapter of all the model's adapters, with their weights.

    rank       of the updates; None: of a sum the ranks of all, else the largest of theirs
    density    the share of numbers that "ties" and "dare" keep
    seed       of what "dare" keeps
    metadata   further keys of the file
    progress   called with the tensors that are done, and all

    Returns for each tensor the part of the update, by its root mean square, that the rank leaves
    out. An older file at `path` stays whole until the new one is complete. Raises AdapterError if
    the model has no adapter, or one with DoRA's magnitudes; ConfigError for settings out of range;
    NotFiniteError for an update that makes no numbers.
    """
    _check(model, method, rank, density)
    names = [*dict.fromkeys(name for pairs in model.adapters for name in pairs)]
    updates, left_out = dict[str, Update](), dict[str, float]()
    for number, name in enumerate(names):
        rng = np.random.default_rng([seed, number])  # a tensor's own draws
        one = partial(_combine_updates, method=method, rank=rank, density=density, rng=rng)
        updates[name], left_out[name] = _of_tensor(model, name, one)
        if not np.isfinite(left_out[name]) or not _is_finite(updates[name]):
            raise NotFiniteError(f"{name}: its update is made of what is no finite number")
        progress(number + 1, len(names))
    about = {"general.base_model.count": np.uint32(1), BASE_NAME: _name(model)}
    more = {key: value for key, value in (metadata or {}).items() if value is not None}
    about |= base_metadata(model.file) | more
    write_adapter(path, model.config.architecture, f"{_name(model)} LoRA", updates, about)
    return left_out


def _is_finite(update: Update) -> bool:
    return all(np.isfinite(half).all() for half in (update.a, update.b))


def _of_tensor(
    model: Model, name: str, combine_updates: Callable[..., tuple[Halves, float]]
) -> tuple[Update, float]:
    """One tensor's update, and the part of it that is left out. combine_updates: of one matrix."""
    table = model.parts.decoder.tensors()[name].table
    adapters = [pairs for pairs in model.adapters if name in pairs]
    weights = [_weight(pairs) for pairs in adapters]
    halves = [_halves(p[name], w, table) for p, w in zip(adapters, weights, strict=True)]
    results = [combine_updates(each, weights) for each in zip(*halves, strict=True)]  # of experts
    errors = [error for _, error in results]
    update = _update([each for each, _ in results], table, adapters[0][name].a.shape)
    return update, float(np.sqrt(np.mean(np.square(errors))))


def _weight(pairs: LoraPairs) -> float:
    return float(getattr(pairs, "weight", 1.0))


def _check(model: Model, method: str, rank: int | None, density: float) -> None:
    if not model.adapters:
        raise AdapterError("the model has no adapter: there is nothing to combine")
    if any(p.magnitude for pairs in model.adapters for p in pairs.values()):
        raise AdapterError("an adapter file cannot hold DoRA's magnitudes: merge it instead")
    faults = []
    if method not in METHODS:
        faults.append(("method", f"is {method!r}, wanted one of {', '.join(METHODS)}"))
    if rank is not None and rank < 1:
        faults.append(("rank", f"is {rank}, wanted 1 or more"))
    if not 0 < density <= 1:
        faults.append(("density", f"is {density:g}, wanted above 0 and at most 1"))
    if not all(map(_weight, model.adapters)):
        faults.append(("lora", "has the weight 0, wanted another: leave that adapter out"))
    if faults:
        raise ConfigError(faults)


def _name(model: Model) -> str:
    return str(model.file.get("general.name", model.config.architecture))


def _halves(pair: LoraPair, weight: float, table: bool) -> Iterator[Halves]:
    """Of a matrix, or of each expert, the update without its adapter's weight."""
    a, b = read(pair.a), read(pair.b)
    left, right = (a, b.T) if table else (b, a)
    left = left * np.float32(pair.scale / weight)
    yield from zip(left, right, strict=True) if left.ndim == 3 else [(left, right)]


def _update(halves: Sequence[Halves], table: bool, shape: tuple[int, ...]) -> Update:
    """As a file has it. shape: of an adapter's A, with an axis more for experts."""
    left, right = (np.stack(some) for some in zip(*halves, strict=True))
    if len(shape) == 2:
        left, right = left[0], right[0]
    a, b = (left, right.T) if table else (right, left)
    return Update(np.ascontiguousarray(a), np.ascontiguousarray(b), float(b.shape[-1]))


# -- one matrix -----------------------------------------------------------------------------------


def _combine_updates(
    updates: Sequence[Halves],
    weights: Sequence[float],
    method: str,
    rank: int | None,
    density: float,
    rng: np.random.Generator,
) -> tuple[Halves, float]:
    """The update of several, and the part of it that the rank leaves out."""
    if method == "sum":
        left = np.concatenate(
            [np.float32(w) * b for (b, _), w in zip(updates, weights, strict=True)], 1
        )
        right = np.concatenate([a for _, a in updates])
        return ((left, right), 0.0) if rank is None else _nearest_of_product(left, right, rank)
    whole = np.stack([b @ a for b, a in updates])
    total = (
        _ties(whole, weights, density) if method == "ties" else _dare(whole, weights, density, rng)
    )
    return _nearest(total, max(a.shape[0] for _, a in updates) if rank is None else rank)


def _ties(updates: np.ndarray, weights: Sequence[float], density: float) -> np.ndarray:
    """What "ties" makes of updates (n, n_out, n_in)."""
    for x in updates:
        n_zero = x.size - int(density * x.size)
        size = np.abs(x)
        if n_zero:
            x[size <= np.partition(size, n_zero - 1, axis=None)[n_zero - 1]] = 0
    sign = np.where(updates.sum(axis=0) >= 0, np.float32(1), np.float32(-1))
    agree = np.sign(updates) == sign
    w = np.asarray(weights, np.float32)[:, None, None]
    total: np.ndarray = (updates * w * agree).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    return total.astype(np.float32)


def _dare(
    updates: np.ndarray, weights: Sequence[float], density: float, rng: np.random.Generator
) -> np.ndarray:
    """What "dare" makes of updates (n, n_out, n_in)."""
    total = np.zeros_like(updates[0])
    for x, w in zip(updates, weights, strict=True):
        total += np.where(rng.random(x.shape, np.float32) < density, x, 0) * np.float32(w / density)
    return total


def _nearest_of_product(left: np.ndarray, right: np.ndarray, rank: int) -> tuple[Halves, float]:
    """The nearest update of a rank to a product, by the singular values of a small matrix."""
    q, r = np.linalg.qr(left.astype(np.float64))
    p, s = np.linalg.qr(right.T.astype(np.float64))
    u, values, v = np.linalg.svd(r @ s.T, full_matrices=False)
    return _of_values(q @ u, values, v @ p.T, rank, float(np.square(values).sum()))


def _nearest(x: np.ndarray, rank: int) -> tuple[Halves, float]:
    """The nearest update of a rank to a matrix, by the eigenvectors of its shorter side's products:
    of singular values below 1e-7 of the largest little is right, which no float32 shows."""
    x = x.astype(np.float64)
    is_wide = x.shape[0] <= x.shape[1]
    squares, u = np.linalg.eigh(x @ x.T if is_wide else x.T @ x)
    values, u = np.sqrt(np.maximum(squares[: -rank - 1 : -1], 0)), u[:, : -rank - 1 : -1]
    across = (x.T if is_wide else x) @ u / np.maximum(values, np.finfo(np.float64).tiny)
    left, right = (u, across.T) if is_wide else (across, u.T)
    return _of_values(left, values, right, rank, float(np.square(x).sum()))


def _of_values(
    u: np.ndarray, values: np.ndarray, v: np.ndarray, rank: int, energy: float
) -> tuple[Halves, float]:
    """Both halves of the largest `rank` values, each with their roots; of fewer values further
    columns are 0. energy: the sum of all squares."""
    n = min(rank, len(values))
    roots = np.sqrt(values[:n])
    left, right = np.zeros((u.shape[0], rank), np.float32), np.zeros((rank, v.shape[1]), np.float32)
    left[:, :n], right[:n] = u[:, :n] * roots, roots[:, None] * v[:n]
    lost = max(energy - float(np.square(values[:n]).sum()), 0.0)
    return (left, right), float(np.sqrt(lost / energy)) if energy else 0.0
