"""What a change of a model changed: an adapter of it, or other weight types of one model.

update_sizes     of each matrix that an adapter updates: ‖ΔW‖ / ‖W‖, singular values, effective rank
weight_errors    of each tensor of two files of a model: ‖W' − W‖ / ‖W‖
compare_runs     a text read by both: activations by layer, predictions by token
compare_heads    what each head writes of it, and how much it reads of each token
compare_answers  numbers that any question gives of both: a metric, a table of the lab, a circuit

Two models are a base and another, of one architecture: `model.with_adapters()` and `model`, or two
files. Products are exact, so that what is told is of the weights and not of their rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, NotFiniteError
from pyggml.graph.arrays import read
from pyggml.graph.tensor import Tensor
from pyggml.lab.linear import exact, head_counts
from pyggml.look.lens import log_softmax
from pyggml.model import Model
from pyggml.models import LoraPair
from pyggml.models.texts import Ids
from pyggml.quants import dequantize

_NUMBERS = 1 << 22  # of a tensor that are float32 at a time


@dataclass(frozen=True, slots=True, eq=False)
class UpdateSize:
    """How an adapter changes one tensor; of experts all together.

    norm, weight_norm   ‖ΔW‖ and ‖W‖, of Frobenius
    values              (r,) float64, the singular values of ΔW, the largest first
    """

    name: str
    norm: float
    weight_norm: float
    values: np.ndarray

    @property
    def ratio(self) -> float:
        """‖ΔW‖ / ‖W‖; infinite of a W that is 0."""
        return self.norm / self.weight_norm if self.weight_norm else float("inf")

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the singular values' shares (Roy and Vetterli 2007): n of n equal
        values; 0 of an update that is 0."""
        shares = self.values[self.values > 0] / max(float(self.values.sum()), 1e-300)
        return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def update_sizes(model: Model) -> list[UpdateSize]:
    """How much the model's adapters, added up, change each tensor; in the order of the file.

    Raises ConfigError for a model without adapters, NotFiniteError for numbers that are none.
    """
    if not model.adapters:
        raise ConfigError("the model has no adapter, wanted one: load it with adapter=…")
    sizes = []
    for name, w in model.parts.weights.items():
        pairs = [pairs[name] for pairs in model.adapters if name in pairs]
        if not pairs:
            continue
        table = model.parts.decoder.tensors()[name].table
        halves = [[*_halves(pair, table)] for pair in pairs]
        _check_finite(name, *_parts(w), *(x for of_pair in halves for two in of_pair for x in two))
        each = [_singular_values(of_expert) for of_expert in zip(*halves, strict=True)]
        values = np.sort(np.concatenate(each))[::-1]
        size = float(np.linalg.norm(values))
        sizes.append(UpdateSize(name, size, _norm(w), values))
    return sizes


@dataclass(frozen=True, slots=True)
class WeightError:
    """How a tensor of another file differs: its types, ‖W' − W‖ / ‖W‖, and max |W' − W|."""

    name: str
    types: tuple[str, str]
    error: float
    largest: float


def weight_errors(base: Model, other: Model) -> list[WeightError]:
    """How far each tensor of a model lies from that of another file; adapters do not count.

    They come in the order of the first file.

    Raises ConfigError for tensors that one of them lacks, or of other shapes; NotFiniteError for
    numbers that are none.
    """
    _check_alike(base, other)
    errors = []
    for name, w in base.parts.weights.items():
        v, squares, whole, largest = other.parts.weights[name], 0.0, 0.0, 0.0
        for a, b in zip(_parts(w), _parts(v), strict=True):
            _check_finite(name, a, b)
            d = b.astype(np.float64) - a
            squares += float(np.sum(d * d))
            whole += float(np.sum(np.square(a, dtype=np.float64)))
            largest = max(largest, float(np.abs(d).max()))
        error = float(np.sqrt(squares / whole)) if whole else float("inf") if squares else 0.0
        errors.append(WeightError(name, (w.dtype.name, v.dtype.name), error, largest))
    return errors


def _check_finite(name: str, *arrays: np.ndarray) -> None:
    if not all(np.isfinite(a).all() for a in arrays):
        raise NotFiniteError(f"{name}: holds what is no finite number, or its update does")


@dataclass(frozen=True, slots=True, eq=False)
class RunDifference:
    """How another model reads a text of T tokens.

    names    n activations, in the order of the graph
    errors   (n, T) float64, ‖x' − x‖ / ‖x‖ of each token's activation
    kl       (T,) float64, KL(p ‖ p') in nats of the predictions after each token
    agree    (T,) bool, whether the likeliest token is the same
    """

    names: tuple[str, ...]
    errors: np.ndarray
    kl: np.ndarray
    agree: np.ndarray

    def __str__(self) -> str:
        rows = [
            f"{n:<14} {e.mean():9.4f} {e.max():9.4f}"
            for n, e in zip(self.names, self.errors, strict=True)
        ]
        head = f"{'‖x − x′‖ / ‖x‖':<14}{'mean':>10}{'most':>10}"
        said = f"KL {self.kl.mean():.4g} nats a token, most {self.kl.max():.3g}; "
        return "\n".join([head, *rows, f"{said}the same choice after {self.agree.mean():.1%}"])


def compare_runs(base: Model, other: Model, ids: Ids, *patterns: str) -> RunDifference:
    """A text (T,) as both read it. patterns: of activations; the streams after all blocks by
    default. Raises ConfigError for models whose tensors differ, and as `Model.trace` does."""
    _check_alike(base, other)
    runs, logits = [], []
    for model in (exact(base), exact(other)):
        with model.trace(*(patterns or ("blk.*.out",))) as t:
            logits.append(model.logits(ids))
        runs.append({name: t[name] for name in t.names if len(t[name]) == len(ids)})
    errors = np.array([_relative(runs[1][name], x) for name, x in runs[0].items()])
    p, q = map(log_softmax, logits)
    agree = logits[0].argmax(axis=1) == logits[1].argmax(axis=1)
    return RunDifference((*runs[0],), errors, (np.exp(p) * (p - q)).sum(axis=1), agree)


@dataclass(frozen=True, slots=True, eq=False)
class HeadDifference:
    """How heads of another model read a text; NaN where a block has no such head.

    results    (n_layer, n_head) float64, ‖z' − z‖ / ‖z‖ of what a head gives for all tokens
    patterns   (n_layer, n_head) float64, the part of its attention that is elsewhere, the mean over
               tokens: half the sum of |a' − a|, 0 to 1
    """

    results: np.ndarray
    patterns: np.ndarray


def compare_heads(base: Model, other: Model, ids: Ids) -> HeadDifference:
    """The heads of both on a text (T,). Raises ConfigError for models whose tensors differ, or
    without attention."""
    _check_alike(base, other)
    counts, runs = head_counts(base), []
    for model in (exact(base), exact(other)):
        with model.trace("blk.*.attn_head.*", "blk.*.attn_pattern") as t:
            model.logits(ids)
        runs.append(t)
    shape = len(counts), max(counts)
    results, patterns = np.full(shape, np.nan), np.full(shape, np.nan)
    for layer, n in enumerate(counts):
        for head in range(n):
            z, z2 = (t[f"blk.{layer}.attn_head.{head}"].ravel() for t in runs)
            results[layer, head] = _relative(z2[None], z[None])[0]
        if n and (name := f"blk.{layer}.attn_pattern") in runs[0]:
            a, b = (t[name].astype(np.float64) for t in runs)
            patterns[layer, :n] = np.abs(b - a).sum(axis=-1).mean(axis=0) / 2
    return HeadDifference(results, patterns)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerDifference:
    """What two models answer to one question: arrays float64 of one shape.

    A place where both have NaN counts in none of these:

    error         ‖y' − y‖ / ‖y‖
    correlation   Pearson's; NaN of fewer than two numbers
    shared        of the largest numbers by size, the part that is among the largest of both
    """

    base: np.ndarray
    other: np.ndarray
    error: float
    correlation: float
    shared: float

    def __str__(self) -> str:
        about = f"correlation {self.correlation:.3f}, {self.shared:.0%} of the largest are the same"
        return f"relative error {self.error:.3g}, {about}"


def compare_answers(
    base: Model, other: Model, question: Callable[[Model], np.ndarray | float], most: int = 10
) -> AnswerDifference:
    """What a question that gives numbers makes of both models: a metric, effects of patches or of
    heads' ablation, scores of a circuit's edges.

    question   takes a model; its numbers are of one shape for both
    most       how many of the largest are compared as a set

    Raises ConfigError for models whose tensors differ, and for answers of unlike shapes.
    """
    _check_alike(base, other)
    x, y = (np.asarray(question(model), np.float64) for model in (base, other))
    if x.shape != y.shape:
        raise ConfigError(f"the answers have shapes {x.shape} and {y.shape}, wanted one")
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = x[finite], y[finite]
    n = min(most, len(a))
    top = [{*np.argsort(-np.abs(each), kind="stable")[:n].tolist()} for each in (a, b)]
    varies = len(a) > 1 and a.std() > 0 and b.std() > 0
    correlation = float(np.corrcoef(a, b)[0, 1]) if varies else float("nan")
    shared = len(top[0] & top[1]) / n if n else float("nan")
    return AnswerDifference(x, y, float(_relative(b[None], a[None])[0]), correlation, shared)


# -- how ------------------------------------------------------------------------------------------


def _check_alike(base: Model, other: Model) -> None:
    one, two = ({n: w.shape for n, w in m.parts.weights.items()} for m in (base, other))
    if strange := sorted(one.keys() ^ two.keys()):
        raise ConfigError(f"{strange[0]} is in one of the models alone, wanted two of one model")
    if unlike := [name for name in one if one[name] != two[name]]:
        name = unlike[0]
        raise ConfigError(f"{name} has shapes {one[name]} and {two[name]}, wanted two of one model")


def _parts(w: Tensor) -> Iterator[np.ndarray]:
    """A tensor's numbers, some rows at a time, float32 (n, size)."""
    raw, n = read(w), w.shape[-1] if w.shape else 1
    rows = raw.reshape(-1, raw.shape[-1]) if raw.ndim else raw.reshape(1, 1)
    step = max(1, _NUMBERS // n)
    for first in range(0, len(rows), step):
        yield np.asarray(dequantize(rows[first : first + step], w.dtype.name))


def _norm(w: Tensor) -> float:
    return float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for a in _parts(w))))


def _halves(pair: LoraPair, table: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of a matrix, or of each expert: left (n_out, r), right (n_in, r); left @ rightᵀ is ΔW."""
    a, b = (read(t).astype(np.float64) for t in (pair.a, pair.b))
    left, right = (a, b) if table else (b, np.swapaxes(a, -1, -2))
    left = pair.scale * left
    yield from zip(left, right, strict=True) if left.ndim == 3 else [(left, right)]


def _singular_values(halves: tuple[tuple[np.ndarray, np.ndarray], ...]) -> np.ndarray:
    """Of the sum of several updates of one matrix."""
    left, right = (np.concatenate(factors, axis=1) for factors in zip(*halves, strict=True))
    r, s = (np.linalg.qr(half)[1] for half in (left, right))
    return np.asarray(np.linalg.svd(r @ s.T, compute_uv=False))


def _relative(x: np.ndarray, base: np.ndarray) -> np.ndarray:
    """‖x − base‖ / ‖base‖ of each row; 0 of 0 by 0, else infinite where the base is 0."""
    d = np.linalg.norm((x.astype(np.float64) - base).reshape(len(x), -1), axis=1)
    size = np.linalg.norm(base.astype(np.float64).reshape(len(x), -1), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(d == 0, 0.0, d / size)
