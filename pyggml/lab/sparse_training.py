"""Sparse coders, trained on rows of activations.

    rows = activation_rows(model, Path("text.txt"), "blk.3.out", n_rows=100_000)["blk.3.out"]
    coder = train_coder(rows, CoderConfig(4096, TopK(32)), reads="blk.3.out").coder

Of rows scaled to a mean length of √n the loss is, in the mean over a batch,

    Σ (y − ŷ)²  +  sparsity · Σ f                  Relu: L1, as SAELens counts it
    Σ (y − ŷ)²  +  sparsity · number of f > 0      JumpRelu: L0, with the gradient of a rectangle of
                                                   width _BANDWIDTH around the thresholds
    Σ (y − ŷ)²                                     TopK

The decoder's rows have length 1. Features that have not been active for a while count as dead: to
the loss comes _LIFT times what their inputs lack to be active, 0, the threshold or the k-th largest
input, until they are (the auxiliary loss of Conerly et al. 2025, there of JumpRelu).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pyggml import ops
from pyggml.eager.activation import Activation
from pyggml.eager.optim import AdamW
from pyggml.eager.value import Value, apply
from pyggml.errors import ConfigError, DataError, Fault
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import leaf, zeros
from pyggml.lab.sparse import Activate, JumpRelu, Relu, SparseCoder, TopK, kth_largest

_BANDWIDTH, _FIRST_THRESHOLD = 0.1, 0.1
_LIFT = 0.1
_WARMUP, _DECAY = 0.1, 0.2  # shares of the steps


@dataclass(frozen=True, slots=True)
class CoderStep:
    """A step of training: of its batch, before the update.

    loss    all that is lowered
    error   Σ (y − ŷ)² by the variance of y: the share that is not explained
    l0      features above 0, a row
    n_dead  features that were not active in the last dead_after steps
    """

    loss: float
    error: float
    l0: float
    n_dead: int

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.4g}, unexplained {self.error:.3f}, {self.l0:.1f} features a row, "
            f"{self.n_dead} dead"
        )


@dataclass(frozen=True, slots=True, eq=False)
class CoderTraining:
    """A coder, and the steps of its training."""

    coder: SparseCoder
    steps: tuple[CoderStep, ...]


Report = Callable[[int, CoderStep], object]  # steps done, and the last one


@dataclass(frozen=True, slots=True)
class CoderConfig:
    """What a coder is to be, and how it is trained. ConfigError for settings out of range.

    n_features  of the coder
    activate    Relu(), TopK(k), or JumpRelu, whose thresholds are learned
    sparsity    of the loss; it rises to this in the first tenth of the steps
    n_steps     batches of n_batch rows
    lr          of AdamW; it falls to 0 in the last fifth of the steps
    dead_after  steps without a row in which a feature is active
    seed        of the first weights and the order of the rows
    """

    n_features: int
    activate: Activate | type[JumpRelu]
    sparsity: float = 0.0
    n_steps: int = 1000
    n_batch: int = 256
    lr: float = 1e-3
    dead_after: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        faults: list[Fault] = [
            (name, f"is {getattr(self, name)}, wanted 1 or more")
            for name in ("n_features", "n_steps", "n_batch", "dead_after")
            if getattr(self, name) < 1
        ]
        if not 0 <= self.sparsity < np.inf:
            faults.append(("sparsity", f"is {self.sparsity}, wanted 0 or more"))
        if not 0 < self.lr < np.inf:
            faults.append(("lr", f"is {self.lr}, wanted above 0"))
        if isinstance(self.activate, TopK) and not 1 <= self.activate.k <= self.n_features:
            faults.append(f"k is {self.activate.k}, wanted 1 to the {self.n_features} features")
        if not isinstance(self.activate, Relu | TopK) and self.activate is not JumpRelu:
            faults.append(f"activate is {self.activate!r:.40}, wanted Relu(), TopK(k) or JumpRelu")
        if faults:
            raise ConfigError(faults)


def train_coder(
    inputs: np.ndarray,
    config: CoderConfig,
    *,
    outputs: np.ndarray | None = None,
    reads: str = "",
    writes: str = "",
    report: Report | None = None,
) -> CoderTraining:
    """A sparse autoencoder of rows (N, n_in), or with outputs (N, n_out) a transcoder, by AdamW.

    reads, writes: the names of the activations. A run repeats bit for bit. Rows may be a memory
    map. Raises DataError for rows that do not fit, are all alike or not finite, or are fewer than a
    batch.
    """
    inputs = np.asarray(inputs)
    targets = inputs if outputs is None else np.asarray(outputs)
    if inputs.ndim != 2 or targets.ndim != 2 or len(inputs) != len(targets):
        raise DataError(f"rows {inputs.shape} and {targets.shape}, wanted two axes, and as many")
    if len(inputs) < config.n_batch:
        raise DataError(f"{len(inputs)} rows, wanted at least the {config.n_batch} of a batch")
    net = _CoderNet(inputs, None if outputs is None else targets, config)
    quiet, steps = np.zeros(config.n_features, np.int64), list[CoderStep]()
    batches = _batches(len(inputs), config)
    for number, rows in zip(range(config.n_steps), batches, strict=False):
        dead = quiet >= config.dead_after
        net.write(inputs[rows], targets[rows], dead)
        loss, error, counts = net.step(number)
        quiet = np.where(counts > 0, 0, quiet + 1)
        steps.append(CoderStep(loss, error, float(counts.sum()) / len(rows), int(dead.sum())))
        if report is not None:
            report(number + 1, steps[-1])
    return CoderTraining(net.coder(reads, reads if outputs is None else writes), tuple(steps))


def _batches(n: int, config: CoderConfig) -> Iterator[np.ndarray]:
    """Numbers of rows, batch after batch: every row once, in a new order each time, but for those
    that are left over."""
    rng, size = np.random.default_rng([config.seed, 1]), config.n_batch
    while True:
        order = rng.permutation(n)
        yield from (np.sort(order[i : i + size]) for i in range(0, n - size + 1, size))


class _CoderNet:
    """The graph of the loss of a batch, and what is trained: all in scaled numbers."""

    def __init__(self, inputs: np.ndarray, outputs: np.ndarray | None, config: CoderConfig) -> None:
        targets = inputs if outputs is None else outputs
        self.config, self.activate, self.centred = config, config.activate, outputs is None
        self.scale_in, _, _ = _measures(inputs)
        self.scale_out, mean, self.variance = _measures(targets)
        n_in, n_out, n_features = inputs.shape[1], targets.shape[1], config.n_features
        self.x = zeros((config.n_batch, n_in), F32, "x")
        self.y = zeros((config.n_batch, n_out), F32, "y")
        self.dead, self.sparsity = zeros((n_features,)), zeros(())
        rng = np.random.default_rng([config.seed, 0])
        rows = _unit(rng.standard_normal((n_features, n_out)))
        first = rows if n_in == n_out else _unit(rng.standard_normal((n_features, n_in)))
        self.w_enc, self.b_enc = leaf(first.T.copy(), "W_enc"), zeros((n_features,), F32, "b_enc")
        self.w_dec, self.b_dec = leaf(rows, "W_dec"), leaf(mean, "b_dec")
        self.threshold = leaf(np.full(n_features, _FIRST_THRESHOLD, np.float32), "threshold")
        self.loss, self.error, self.counts = (v.node for v in self._losses())
        trained = [self.w_enc, self.b_enc, self.w_dec, self.b_dec]
        trained += [self.threshold] if self.activate is JumpRelu else []
        self.optimiser = AdamW(
            trained, config.lr, weight_decay=0.0, loss=self.loss, reads=[self.error, self.counts]
        )

    def _losses(self) -> tuple[Value, Value, Value]:
        """The loss, the error of the batch, and in how many rows each feature is above 0."""
        w_enc, b_enc, w_dec, b_dec = map(
            Activation, (self.w_enc, self.b_enc, self.w_dec, self.b_dec)
        )
        x, y = Activation(self.x), Activation(self.y)
        directions = apply(ops.l2_norm, w_dec)
        z = (x - b_dec if self.centred else x) @ w_enc + b_enc
        features, penalty = self._features(z)
        left = y - (features @ directions + b_dec)
        n = x.shape[0]
        error = (left**2).sum() / n
        loss = error + self._of_dead(z)
        if penalty is not None:
            loss = loss + penalty * Activation(self.sparsity) / n
        counts = apply(ops.step, features.detach()).sum(axis=0)
        return loss, error, counts

    def _features(self, z: Value) -> tuple[Value, Value | None]:
        """Features, and what sparsity lowers, summed over the batch."""
        if isinstance(self.activate, TopK):
            return self.activate(z), None
        if isinstance(self.activate, Relu):
            features = z.relu()
            return features, features.sum()
        return _jump(z, Activation(self.threshold))

    def _of_dead(self, z: Value) -> Value:
        """What brings dead features back, the mean over rows."""
        goal: Value | float = 0.0
        if isinstance(self.activate, TopK):
            goal = apply(kth_largest, z, k=self.activate.k).detach()
        elif self.activate is JumpRelu:
            goal = Activation(self.threshold).detach()
        return ((goal - z).relu() * Activation(self.dead)).sum() * (_LIFT / z.shape[0])

    def write(self, inputs: np.ndarray, targets: np.ndarray, dead: np.ndarray) -> None:
        """Give a batch to the graph, and which features are dead."""
        write(self.x, np.asarray(inputs * self.scale_in, np.float32))
        write(self.y, np.asarray(targets * self.scale_out, np.float32))
        write(self.dead, dead.astype(np.float32))

    def step(self, number: int) -> tuple[float, float, np.ndarray]:
        """One update; the loss, the share of the variance that is left, and how many rows of the
        batch each feature is above 0 in, all before it."""
        n, c = self.config.n_steps, self.config
        write(self.sparsity, np.float32(c.sparsity * min(1, number / max(_WARMUP * n, 1))))
        self.optimiser.lr = c.lr * min(1, (n - number) / max(_DECAY * n, 1))
        loss, read = self.optimiser.step(), self.optimiser.program.read
        assert loss is not None
        return loss, float(read(self.error)) / self.variance, read(self.counts)

    def coder(self, reads: str, writes: str) -> SparseCoder:
        """The coder of activations as they are: scales are put into its weights."""
        by, activate = np.float32(1 / self.scale_out), self.activate
        read = self.optimiser.program.read
        if not isinstance(activate, Relu | TopK | JumpRelu):
            activate = JumpRelu(np.maximum(read(self.threshold), 0) * by)
        return SparseCoder(
            reads,
            writes,
            activate,
            w_enc=read(self.w_enc) * np.float32(self.scale_in / self.scale_out),
            b_enc=read(self.b_enc) * by,
            w_dec=_unit(read(self.w_dec)),
            b_dec=read(self.b_dec) * by,
            centred=self.centred,
        )


def _measures(rows: np.ndarray) -> tuple[float, np.ndarray, float]:
    """(the factor that makes the mean length √n; of scaled rows the mean (n,), and the mean squared
    distance from it). Read in parts, so that a memory map stays on its disk."""
    n, width = rows.shape
    total, squares, length = np.zeros(width), 0.0, 0.0
    for first in range(0, n, 4096):
        part = rows[first : first + 4096].astype(np.float64)
        total += part.sum(axis=0)
        lengths = np.square(part).sum(axis=1)
        squares += float(lengths.sum())
        length += float(np.sqrt(lengths).sum())
    variance = squares / n - float(np.square(total / n).sum())
    if not np.isfinite(squares) or not variance > 1e-12 * squares / n:
        raise DataError("the rows are all alike, or not finite: there is nothing to learn")
    scale = width**0.5 * n / length
    return scale, (total / n * scale).astype(np.float32), variance * scale**2


def _unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1, as the loss reads them."""
    lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return np.asarray(rows / lengths, np.float32)


def _jump(z: Value, threshold: Value) -> tuple[Value, Value]:
    """(features, how many there are in all), with the gradients of straight-through estimators:
    what is added and taken off again is 0, and has a gradient."""
    apart = (z - threshold).detach()
    open_ = apply(ops.step, apart)
    near = apply(ops.step, 0.5 - apart.abs() / _BANDWIDTH) / _BANDWIDTH
    slope = -threshold * (threshold.detach() * near)
    count_slope = -threshold * near
    features = z.relu() * open_ + (slope - slope.detach())
    count = open_ + (count_slope - count_slope.detach())
    return features, count.sum()
