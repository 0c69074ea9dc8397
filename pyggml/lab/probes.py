"""Linear probes: what can be read from an activation by a linear function, layer by layer.

    table = linear_probes(model, texts, ["noun", "verb", …], "blk.*.out")
    print(table)                                     # held-out accuracy by layer
    probe = table["blk.3.out"]
    model.grad(probe.metric(), ids, "token_embd")    # its score as a metric
    model.trace(add={probe.name: 4 * probe.direction()})

Classes are told apart by logistic regression, numbers fitted by ridge regression; both are convex,
so that there is one answer, whatever the seed of the split. Alain and Bengio 2016.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyggml.eager.value import Value
from pyggml.errors import ConfigError, DataError
from pyggml.lab.logistic import logistic_regression
from pyggml.lab.passages import activations_of
from pyggml.look.control import AFTER_FIRST
from pyggml.look.intervals import Interval, clustered_proportion, mean
from pyggml.model import Model
from pyggml.models.metric import Activations, Metric
from pyggml.models.texts import Ids

_BAR = 20  # characters


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """A linear function of an activation: scores (…, n_out) = x (…, n) @ weightsᵀ + bias.

    name      the activation; "" for rows without one
    weights   (n_out, n) float32: a row a class, one row for two classes or for a number
    bias      (n_out,) float32
    classes   (n_classes,), sorted; None if the target is a number
    score     of rows that it did not learn from: the share that is right, or R² of numbers, with
              the bounds between which it lies with 95 %
    baseline  the score without the activation: of the most frequent class; 0 for numbers
    n_rows    learned from, and held out
    """

    name: str
    weights: np.ndarray
    bias: np.ndarray
    classes: np.ndarray | None
    score: Interval
    baseline: float
    n_rows: tuple[int, int]

    def scores(self, x: np.ndarray) -> np.ndarray:
        """(…, n_out): the number itself, or the log-odds of classes."""
        return np.asarray(x @ self.weights.T + self.bias)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The class, or the number, of each row: (…,)."""
        scores = self.scores(x)
        if self.classes is None:
            return np.asarray(scores[..., 0])
        best = scores[..., 0] > 0 if len(self.bias) == 1 else scores.argmax(axis=-1)
        return np.asarray(self.classes[best.astype(np.int64)])

    def direction(self, of: Any = None) -> np.ndarray:
        """(n,) float32 of length 1: along it the score rises. of: a class, where there are several.

        Of two classes it leads from the first to the second. ConfigError for no such class.
        """
        w = self.weights[self._row(of)]
        return np.asarray(w / np.linalg.norm(w), np.float32)

    def metric(self, position: int = -1, of: Any = None) -> Metric:
        """The score at a position as a metric of `Model.grad`."""
        row = self._row(of)
        w, b = self.weights[row], float(self.bias[row])

        def score(t: Activations) -> Value:
            return (t[self.name][position].reshape(-1) * w).sum() + b

        if not self.name:
            raise ConfigError("the probe is of rows without a name: replace(probe, name=…) first")
        return score

    def _row(self, of: Any) -> int:
        if len(self.bias) == 1 and of is None:
            return 0
        classes = [] if self.classes is None or len(self.bias) == 1 else self.classes.tolist()
        if of not in classes:
            raise ConfigError(f"of is {of!r}, wanted {f'one of {classes}' if classes else 'None'}")
        return classes.index(of)


@dataclass(frozen=True, slots=True, eq=False)
class ProbeTable(Mapping[str, Probe]):
    """Probes of one target by the name of the activation; printed, a row each."""

    _probes: Mapping[str, Probe]

    def __getitem__(self, name: str) -> Probe:
        return self._probes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._probes)

    def __len__(self) -> int:
        return len(self._probes)

    def __str__(self) -> str:
        first = next(iter(self._probes.values()))
        what = "R²" if first.classes is None else "right"
        width = max(map(len, self._probes))
        rows = [
            f"{name:<{width}}  {p.score.value:6.3f}  {p.score.low:6.3f} to {p.score.high:5.3f}  "
            + "█" * round(_BAR * min(max(p.score.value, 0), 1))
            for name, p in self._probes.items()
        ]
        learned, held = first.n_rows
        about = f"of {held:,} rows held out, {learned:,} learned; without any: {first.baseline:.3f}"
        return "\n".join([f"{'':<{width}}  {what:>6}  95 % of samples", *rows, about])


def linear_probes(
    model: Model,
    texts: Sequence[Ids],
    targets: Sequence[Any],
    *patterns: str,
    positions: slice = AFTER_FIRST,
    l2: float = 1e-3,
    held_out: float = 0.25,
    seed: int = 0,
) -> ProbeTable:
    """A probe of each activation that the patterns name, from texts (token ids) and their targets.

    targets: one of each text, for which the mean over its positions counts; or of each text (T,)
    one of each of its tokens. Floats are numbers, all else classes. positions: all but the first by
    default. l2, held_out and seed: as `fit_probe` has them; whole texts are held out.

    Raises DataError for unlike numbers of texts and targets and for texts without such positions,
    and what `fit_probe` and `activations_of` do.
    """
    if not len(texts) or len(texts) != len(targets):
        raise DataError(f"{len(texts)} texts and {len(targets)} targets, wanted as many, and some")
    rows: dict[str, list[np.ndarray]] = {}
    kept: list[np.ndarray] = []
    read = activations_of(model, texts, *patterns)
    for number, ((ids, arrays), target) in enumerate(zip(read, targets, strict=True), 1):
        of_tokens = np.ndim(target) > 0
        if of_tokens and np.shape(target) != ids.shape:
            raise DataError(f"text {number} has {len(ids)} tokens, and {len(target)} targets")
        if not len(ids[positions]):
            raise DataError(f"text {number} has {len(ids)} tokens, none at the positions wanted")
        for name, a in arrays.items():
            chosen = a.reshape(len(a), -1)[positions]
            rows.setdefault(name, []).append(chosen if of_tokens else chosen.mean(0, keepdims=True))
        kept.append(np.asarray(target)[positions] if of_tokens else np.asarray([target]))
    y = np.concatenate(kept)
    groups = np.repeat(np.arange(len(kept)), [len(k) for k in kept])
    fitted = {
        n: fit_probe(np.concatenate(r), y, groups, l2, held_out, seed) for n, r in rows.items()
    }
    return ProbeTable({name: replace(p, name=name) for name, p in fitted.items()})


def fit_probe(
    rows: np.ndarray,
    targets: Sequence[Any] | np.ndarray,
    groups: np.ndarray | None = None,
    l2: float = 1e-3,
    held_out: float = 0.25,
    seed: int = 0,
) -> Probe:
    """A probe of rows (N, n) for targets (N,): floats are numbers, all else classes.

    The mean loss, plus l2/2 · ‖w‖² of rows that are centred and divided by their root mean square,
    is lowered to its minimum: cross entropy of classes (in the engine), half the squared error of
    numbers (in closed form, float64). The bias is free.
    groups: (N,) which rows belong together; a share `held_out` of the groups, drawn by `seed`, is
    not learned from and gives the score, whose interval counts rows of a group as alike.

    Raises DataError for rows and targets that do not fit or are not finite, and if fewer than two
    classes are learned from; ConfigError for settings out of range.
    """
    x, y = np.asarray(rows, np.float32), np.asarray(targets)
    groups = np.arange(len(x)) if groups is None else np.asarray(groups)
    _check(x, y, groups, l2, held_out)
    learned = _split(groups, held_out, seed)
    centre = x[learned].mean(axis=0, dtype=np.float64)
    size = float(np.sqrt(np.square(x[learned] - centre, dtype=np.float64).mean())) or 1.0
    z = ((x[learned] - centre) / size).astype(np.float32)
    fit = _ridge if y.dtype.kind == "f" else _logistic
    w, b, classes = fit(z, y[learned], l2)
    weights = w / size
    probe = Probe(
        name="",
        weights=weights.astype(np.float32),
        bias=(b - weights @ centre).astype(np.float32),
        classes=classes,
        score=Interval(0.0, 0.0, 0.0),
        baseline=0.0,
        n_rows=(int(learned.sum()), int((~learned).sum())),
    )
    return _held_out_score(probe, x, y, groups, learned)


def _check(x: np.ndarray, y: np.ndarray, groups: np.ndarray, l2: float, held_out: float) -> None:
    if x.ndim != 2 or y.shape != (len(x),) or groups.shape != (len(x),):
        raise DataError(f"rows {x.shape}, targets {y.shape} and groups {groups.shape}, wanted one "
                        "target and one group a row")  # fmt: skip
    if not np.isfinite(x).all() or (y.dtype.kind == "f" and not np.isfinite(y).all()):
        raise DataError("rows or targets hold NaN or infinity, wanted numbers")
    if not 0 < l2 < np.inf or not 0 < held_out < 1:
        raise ConfigError(f"l2 is {l2} and held_out {held_out}, wanted above 0, and 0 to 1")


def _split(groups: np.ndarray, held_out: float, seed: int) -> np.ndarray:
    """(N,) bool: which rows are learned from. One group at least is, and one is held out."""
    distinct = np.unique(groups)
    if len(distinct) < 2:
        raise DataError("all rows are of one group or text, wanted two at least: one is held out")
    n_held = min(max(round(held_out * len(distinct)), 1), len(distinct) - 1)
    held = np.random.default_rng(seed).permutation(distinct)[:n_held]
    return ~np.isin(groups, held)


Fit = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # weights, bias float64; classes


def _ridge(z: np.ndarray, y: np.ndarray, l2: float) -> Fit:
    x = z.astype(np.float64)
    gram = x.T @ x / len(x) + l2 * np.eye(x.shape[1])
    w = np.linalg.solve(gram, x.T @ (y - y.mean()) / len(x))
    return w[None], np.array([y.mean() - x.mean(axis=0) @ w]), None


def _logistic(z: np.ndarray, y: np.ndarray, l2: float) -> Fit:
    classes, number = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"all rows learned from are of class {classes[0]}, wanted two or more")
    return *logistic_regression(z, number, len(classes), l2), classes


def _held_out_score(
    probe: Probe, x: np.ndarray, y: np.ndarray, groups: np.ndarray, learned: np.ndarray
) -> Probe:
    """The probe with its score of the rows that are held out. R² takes their variance, around the
    mean of those learned from, as it is."""
    held = ~learned
    predictions = probe.predict(x[held])
    if probe.classes is not None:
        values, counts = np.unique(y[learned], return_counts=True)
        baseline = float((y[held] == values[counts.argmax()]).mean())
        return replace(
            probe,
            score=clustered_proportion(predictions == y[held], groups[held]),
            baseline=baseline,
        )
    spread = float(np.square(y[held] - y[learned].mean()).mean())
    shares = 1 - np.square(y[held] - predictions, dtype=np.float64) / (spread or 1.0)
    return replace(probe, score=mean(shares, groups[held]))
