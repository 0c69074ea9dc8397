"""Adapters of one model → one adapter that does what they do together, at any rank.

            of each update Δᵢ                                           then
sum         all numbers                                                 Σ wᵢ Δᵢ
prune       the largest numbers, a share of `density`                   Σ wᵢ Δᵢ
ties        the same                                                    those that agree
dare        numbers at random, of the probability `density`, over it    Σ wᵢ Δᵢ
dare-ties   the same                                                    those that agree

Those that agree have, at each place, the sign of their sum ("total") or of most ("frequency"); they
are averaged: Σ wᵢ Δᵢ / how many. Sources: Yadav et al. 2023, arXiv:2306.01708 (ties); Yu et al.
2023, arXiv:2311.03099 (dare). The names are those of PEFT's `add_weighted_adapter`, with `_svd`:
without it PEFT combines A and B apart, whose product is no sum of updates.

A sum without a rank is exact: A's rows and B's columns of all adapters side by side. Everything
else is brought to a rank by the largest singular values, which is the nearest update of that rank.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import AdapterError, ConfigError, NotFiniteError
from pyggml.graph.arrays import read
from pyggml.lora.adapter.file import Update, base_keys, write_adapter
from pyggml.lora.adapter.merge import merged_weight
from pyggml.lora.adapter.starts import unpack
from pyggml.lora.config.combination import DRAWN, ELECTED, Combination
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs
from pyggml.models.stack import base_metadata, learned_metadata

Halves = tuple[np.ndarray, np.ndarray]  # (n_out, r) and (r, n_in), whose product is an update


SUM = Combination()


def combine(
    model: Model,
    path: str | os.PathLike[str],
    how: Combination = SUM,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, n: None,
) -> dict[str, float]:
    """Write one adapter of all the model's adapters, with their weights.

    metadata   further keys of the file
    progress   called with the tensors that are done, and all

    Returns for each tensor the part of the update, by its root mean square, that the rank leaves
    out. An older file at `path` stays whole until the new one is complete. Raises AdapterError if
    the model has no adapter; ConfigError for an adapter of the weight 0, and for DoRA if no
    rank and no error is given; NotFiniteError for an update that makes no numbers.
    """
    _check(model, how)
    names = [*dict.fromkeys(name for pairs in model.adapters for name in pairs)]
    updates, left_out = dict[str, Update](), dict[str, float]()
    for number, name in enumerate(names):
        rng = np.random.default_rng([how.seed, number])  # a tensor's own draws
        updates[name], left_out[name] = update, lost = _of_tensor(model, name, how, rng)
        if not all(np.isfinite(x).all() for x in (lost, update.a, update.b)):
            raise NotFiniteError(f"{name}: its update is made of what is no finite number")
        progress(number + 1, len(names))
    more = {key: value for key, value in (metadata or {}).items() if value is not None}
    about = base_keys(model) | base_metadata(model.file) | learned_metadata(model.adapters) | more
    write_adapter(path, model, updates, about)
    return left_out


def _of_tensor(
    model: Model, name: str, how: Combination, rng: np.random.Generator
) -> tuple[Update, float]:
    """One tensor's update, and the part of it that is left out."""
    table = model.parts.decoder.tensors()[name].table
    adapters = [pairs for pairs in model.adapters if name in pairs]
    weights = [_weight(pairs) for pairs in adapters]
    halves = [
        _halves(model, name, p[name], w, table) for p, w in zip(adapters, weights, strict=True)
    ]
    of_experts = [combine_updates(each, weights, how, rng) for each in zip(*halves, strict=True)]
    rank = max(rank_of(s, how) for s in of_experts)
    results = [s.halves(rank) for s in of_experts]
    update = as_update(results, table, adapters[0][name].a.shape)
    errors = [s.left_out(rank) for s in of_experts]
    return update, float(np.sqrt(np.mean(np.square(errors))))


def _weight(pairs: LoraPairs) -> float:
    return float(getattr(pairs, "weight", 1.0))


def _check(model: Model, how: Combination) -> None:
    if not model.adapters:
        raise AdapterError("the model has no adapter: there is nothing to combine")
    if not all(map(_weight, model.adapters)):
        raise ConfigError([("lora", "has the weight 0, wanted another: leave that adapter out")])
    is_dora = any(p.magnitude for pairs in model.adapters for p in pairs.values())
    if is_dora and how.rank is None and how.error is None:
        fault = "is None, wanted one, or an error: DoRA's updates have a full rank"
        raise ConfigError([("rank", fault)])


def _halves(
    model: Model, name: str, pair: LoraPair, weight: float, table: bool
) -> Iterator[Halves]:
    """Of a matrix, or of each expert, the update without its adapter's weight."""
    if pair.magnitude is not None:
        whole = merged_weight(model, name) - unpack(model.parts.weights[name])
        yield whole, np.eye(whole.shape[1], dtype=np.float32)
        return
    a, b = read(pair.a), read(pair.b)
    left, right = (a, b.T) if table else (b, a)
    left = left * np.float32(pair.scale / weight)
    yield from zip(left, right, strict=True) if left.ndim == 3 else [(left, right)]


def as_update(halves: Sequence[Halves], table: bool, shape: tuple[int, ...]) -> Update:
    """Halves of a matrix, or of each expert, as a file has them. shape: of the weight, or of an
    adapter's A, with an axis more for experts."""
    left, right = (np.stack(factors) for factors in zip(*halves, strict=True))
    if len(shape) == 2:
        left, right = left[0], right[0]
    a, b = (left, right.T) if table else (right, left)
    return Update(np.ascontiguousarray(a), np.ascontiguousarray(b), float(b.shape[-1]))


# -- one matrix -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Spectrum:
    """An update U diag(values) V by its largest singular values, or whole as a product.

    left     (n_out, k), right (k, n_in): U and V, each times the roots of the values
    values   (k,) descending; None: the product is whole, and none of it may be left out
    energy   the sum of the squares of all values, also of those that are not there
    default  the rank where none is asked for
    """

    left: np.ndarray
    right: np.ndarray
    values: np.ndarray | None
    energy: float
    default: int

    def halves(self, rank: int) -> Halves:
        """Both halves, float32; columns beyond the values are 0."""
        n = min(rank, self.left.shape[1])
        left = np.zeros((self.left.shape[0], rank), np.float32)
        right = np.zeros((rank, self.right.shape[1]), np.float32)
        left[:, :n], right[:n] = self.left[:, :n], self.right[:n]
        return left, right

    def left_out(self, rank: int) -> float:
        """The part that a rank leaves out, by its root mean square."""
        if self.values is None or not self.energy:
            return 0.0
        lost = max(self.energy - float(np.square(self.values[:rank]).sum()), 0.0)
        return float(np.sqrt(lost / self.energy))


def rank_of(spectrum: Spectrum, how: Combination) -> int:
    """The rank that is asked for, as far as there are values; the lowest whose error is small
    enough."""
    if how.error is None or spectrum.values is None:
        return spectrum.default if how.rank is None else min(how.rank, spectrum.left.shape[1])
    lost = spectrum.energy - np.cumsum(np.square(spectrum.values))
    enough = lost <= (how.error**2 + 1e-12) * spectrum.energy  # rounding of the squares' sum
    return int(np.argmax(enough)) + 1 if enough.any() else len(spectrum.values)


def combine_updates(
    updates: Sequence[Halves], weights: Sequence[float], how: Combination, rng: np.random.Generator
) -> Spectrum:
    """The update that several make."""
    if how.method == "sum":
        left = np.concatenate(
            [np.float32(w) * b for (b, _), w in zip(updates, weights, strict=True)], 1
        )
        right = np.concatenate([a for _, a in updates])
        is_whole = how.rank is None and how.error is None
        if is_whole:
            return Spectrum(left, right, None, 0.0, left.shape[1])
        return _nearest_of_product(left, right)
    whole = np.stack([b @ a for b, a in updates])
    for x in whole:
        _keep_drawn(x, how.density, rng) if how.method in DRAWN else _keep_largest(x, how.density)
    w = np.asarray(weights, np.float32)[:, None, None]
    if how.method in ELECTED:
        votes = (np.sign(whole) if how.majority == "frequency" else whole).sum(axis=0)
        agree = np.sign(whole) == np.where(votes >= 0, np.float32(1), np.float32(-1))
        total = (whole * w * agree).sum(axis=0) / np.maximum(agree.sum(axis=0), 1)
    else:
        total = (whole * w).sum(axis=0)
    default = max(a.shape[0] for _, a in updates)
    most = min(total.shape) if how.error is not None else how.rank or default
    return nearest_update(total.astype(np.float32), most, default)


def _keep_largest(x: np.ndarray, density: float) -> None:
    """Set all but this share of the numbers to 0, in place: the largest stay."""
    n_zero = x.size - int(density * x.size)
    if n_zero:
        x.flat[np.argpartition(np.abs(x), n_zero - 1, axis=None)[:n_zero]] = 0


def _keep_drawn(x: np.ndarray, density: float, rng: np.random.Generator) -> None:
    """Set numbers to 0 at random, in place, and divide the others, so that their mean stays."""
    x *= (rng.random(x.shape, np.float32) < density) / np.float32(density)


def _nearest_of_product(left: np.ndarray, right: np.ndarray) -> Spectrum:
    """The singular values of a product, by those of a small matrix."""
    q, r = np.linalg.qr(left.astype(np.float64))
    p, s = np.linalg.qr(right.T.astype(np.float64))
    u, values, v = np.linalg.svd(r @ s.T, full_matrices=False)
    return _of_values(q @ u, values, v @ p.T, float(np.square(values).sum()), left.shape[1])


def nearest_update(x: np.ndarray, most: int, default: int) -> Spectrum:
    """The largest singular values of a matrix, by the eigenvectors of its shorter side's products:
    of values below 1e-7 of the largest little is right, which no float32 shows."""
    x = x.astype(np.float64)
    is_wide = x.shape[0] <= x.shape[1]
    squares, u = np.linalg.eigh(x @ x.T if is_wide else x.T @ x)
    values, u = np.sqrt(np.maximum(squares[: -most - 1 : -1], 0)), u[:, : -most - 1 : -1]
    across = (x.T if is_wide else x) @ u / np.maximum(values, np.finfo(np.float64).tiny)
    left, right = (u, across.T) if is_wide else (across, u.T)
    return _of_values(left, values, right, float(np.square(x).sum()), default)


def _of_values(
    u: np.ndarray, values: np.ndarray, v: np.ndarray, energy: float, default: int
) -> Spectrum:
    roots = np.sqrt(values)
    return Spectrum(u * roots, roots[:, None] * v, values, energy, default)
