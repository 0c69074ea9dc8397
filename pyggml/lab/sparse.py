"""Sparse coders: an activation as a sum of a few of many features, read here or elsewhere.

    f = activate(x @ w_enc + b_enc)        features (…, n_features), most of them 0
    y = f @ w_dec + b_dec                  the activation again, or another one

An autoencoder writes the activation that it reads, a transcoder another one: from what enters a
feed-forward part to what it adds (Cunningham et al. 2023, Dunefsky et al. 2024). Features are
metrics of `Model.grad` and edits of traces:

    model.grad(coder.metric(1234), ids, "token_embd")          # what the feature is made of
    with model.trace(add={coder.writes: coder.steer(1234, 8.0)}):   # as if it were 8
    with model.trace(replace=coder.replacement(), tokens=range(1, n)):   # what it keeps, alone
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml import ops
from pyggml.eager.activation import Activation
from pyggml.eager.arithmetic import lowest
from pyggml.eager.value import Value, apply
from pyggml.errors import ConfigError, ShapeError
from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.metric import Activations, Metric
from pyggml.runtime import run


@dataclass(frozen=True, slots=True)
class Relu:
    """max(x, 0)."""

    name = "relu"

    def __call__(self, x: Value) -> Value:
        return x.relu()


@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest of a row that are above 0 (Gao et al. 2024); of equals all."""

    k: int
    name = "topk"

    def __call__(self, x: Value) -> Value:
        return x.relu() * apply(_largest, x, k=self.k)


@dataclass(frozen=True, slots=True, eq=False)
class JumpRelu:
    """x where it is above its threshold (n_features,) and above 0 (Rajamanoharan et al. 2024)."""

    threshold: np.ndarray
    name = "jumprelu"

    def __call__(self, x: Value) -> Value:
        return x.relu() * apply(_above, x, self.threshold)


Activate = Relu | TopK | JumpRelu


def kth_largest(x: Tensor, k: int) -> Tensor:
    """The k-th largest of each row (n, n_features), in all of its places: constants of the loss."""
    x = ops.detach(x)
    n = x.shape[-1]
    chosen = ops.get_rows(ops.reshape(x, (-1, n, 1)), ops.reshape(ops.top_k(x, k), (-1, k)))
    return ops.repeat(lowest(ops.reshape(chosen, (*x.shape[:-1], k)), -1, keepdims=True), x.shape)


def _largest(x: Tensor, k: int) -> Tensor:
    """1 for the k largest of each row, else 0."""
    return ops.scale(ops.step(ops.sub(kth_largest(x, k), ops.detach(x))), -1.0, 1.0)


def _above(x: Tensor, threshold: Tensor) -> Tensor:
    return ops.step(ops.sub(ops.detach(x), threshold))


@dataclass(frozen=True, slots=True, eq=False)
class SparseCoder:
    """A sparse autoencoder or transcoder; float32.

    reads     the activation that is encoded, such as "blk.3.out"; "" if nobody says
    writes    the one that is decoded: the same of an autoencoder
    activate  Relu(), TopK(k) or JumpRelu(threshold)
    w_enc     (n_in, n_features)
    b_enc     (n_features,)
    w_dec     (n_features, n_out), a feature's direction in each row
    b_dec     (n_out,)
    centred   b_dec is taken off the input first
    """

    reads: str
    writes: str
    activate: Activate
    w_enc: np.ndarray
    b_enc: np.ndarray
    w_dec: np.ndarray
    b_dec: np.ndarray
    centred: bool

    @property
    def n_features(self) -> int:
        return int(self.w_enc.shape[1])

    def __repr__(self) -> str:
        n_in, n_out = len(self.w_enc), len(self.b_dec)
        return (
            f"<SparseCoder {self.reads or '?'} → {self.writes or '?'}: {n_in} → {self.n_features} "
            f"features ({self.activate.name}) → {n_out}>"
        )

    # -- of arrays -------------------------------------------------------------------------------

    def encode(self, x: np.ndarray) -> np.ndarray:
        """Features (…, n_features) of activations (…, n_in), float32."""
        return _compute_rows(self.features, x, len(self.w_enc))

    def decode(self, features: np.ndarray) -> np.ndarray:
        """Activations (…, n_out) of features (…, n_features), float32."""
        return _compute_rows(self.reconstruct, features, self.n_features)

    # -- of values, and of a model's graph ---------------------------------------------------------

    def features(self, x: Value) -> Value:
        """Features (n, n_features) of values (n, n_in)."""
        inner = x - self.b_dec if self.centred else x
        return self.activate(inner @ self.w_enc + self.b_enc)

    def reconstruct(self, features: Value) -> Value:
        """Values (n, n_out) of features (n, n_features)."""
        return features @ self.w_dec + self.b_dec

    def direction(self, feature: int) -> np.ndarray:
        """(n_out,): what one unit of a feature adds."""
        self._check(feature)
        return self.w_dec[feature]

    def metric(self, feature: int, position: int = -1) -> Metric:
        """A feature at a position as a metric of `Model.grad`. ConfigError for no such feature."""
        self._check(feature)

        def activation(t: Activations) -> Value:
            return self.features(t[self.reads][position].reshape(1, -1))[0, feature]

        return activation

    def steer(self, feature: int, value: float) -> Callable[[Value], Value]:
        """What a trace adds to the activation so that the feature counts as `value` there.

        ConfigError for no such feature, and for a transcoder, of which a multiple of `direction`
        is added.
        """
        self._check(feature)
        if self.reads != self.writes:
            raise ConfigError(
                f"the coder reads {self.reads} and writes {self.writes}: add a multiple of "
                f"direction({feature}) to {self.writes}"
            )

        def addend(x: Value) -> Value:
            rows = x.reshape(x.shape[0], -1)
            missing = value - self.features(rows)[:, feature : feature + 1]
            return (missing * self.w_dec[feature]).reshape(x.shape)

        return addend

    def replacement(self) -> dict[str, Callable[[Value], Value]]:
        """What a trace puts in the place of activations, so that the model goes on with what the
        coder makes of them: `model.trace(replace=coder.replacement())`."""
        if self.reads == self.writes:
            return {self.writes: lambda x: self._through(x, x)}
        read: deque[Value] = deque()  # of each graph that is built: one, or one a prompt

        def remember(x: Value) -> Value:
            read.append(x)
            return x

        return {self.reads: remember, self.writes: lambda y: self._through(read.popleft(), y)}

    def _through(self, x: Value, y: Value) -> Value:
        """What the coder makes of x, in y's shape."""
        return self.reconstruct(self.features(x.reshape(x.shape[0], -1))).reshape(y.shape)

    def _check(self, feature: int) -> None:
        if not 0 <= feature < self.n_features:
            raise ConfigError(f"there is no feature {feature} among {self.n_features}")


def _compute_rows(function: Callable[[Value], Value], x: np.ndarray, n: int) -> np.ndarray:
    """The numbers of a function of rows, by the compiled kernels."""
    given = np.ascontiguousarray(x, np.float32)
    if not given.ndim or given.shape[-1] != n:
        raise ShapeError(f"an array of shape {given.shape}, wanted {n} along its last axis")
    rows = given.reshape(-1, n)
    y: np.ndarray = run(function(Activation(leaf(rows))).node)[0]
    return y.reshape(*given.shape[:-1], y.shape[-1])
