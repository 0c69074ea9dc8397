"""What a sparse coder is worth: how sparse it is, what it explains, and what the model loses."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pyggml.errors import DataError
from pyggml.lab.linear import exact
from pyggml.lab.passages import Text, activations_of, whole_windows
from pyggml.lab.sparse import SparseCoder
from pyggml.look.lens import token_losses
from pyggml.model import Model

_GROUP = 4  # windows that share a pass


@dataclass(frozen=True, slots=True)
class CoderReport:
    """How well a coder writes an activation, measured on n_tokens; the first of each window is
    left out.

    l0          features above 0, a token
    explained   1 − Σ (y − ŷ)² / Σ (y − mean y)²
    active      the share of the features that were above 0 at least once
    loss        of the model, in nats a token
    loss_coder  with what the coder writes in the activation's place
    loss_zero   with 0 in its place
    """

    n_tokens: int
    l0: float
    explained: float
    active: float
    loss: float
    loss_coder: float
    loss_zero: float

    @property
    def recovered(self) -> float:
        """1 where the coder leaves the loss as it is, 0 where it does no better than zeros."""
        return (self.loss_zero - self.loss_coder) / (self.loss_zero - self.loss)

    def __str__(self) -> str:
        return (
            f"{self.n_tokens:,} tokens: {self.l0:.1f} features each, {self.active:.1%} active\n"
            f"{self.explained:.1%} of the variance explained\n"
            f"loss {self.loss:.4f}, with the coder {self.loss_coder:.4f}, with 0 "
            f"{self.loss_zero:.4f}: {self.recovered:.1%} recovered"
        )


def assess_coder(
    model: Model, coder: SparseCoder, text: Text, n_windows: int = 16, n_window: int = 128
) -> CoderReport:
    """The report of the first whole windows of a text that it was not trained on.

    What the coder writes takes the place of the activation at all positions but the first of a
    window, whose activations are unlike all others in many models. Raises DataError for a text with
    fewer windows, ConfigError for a coder of activations that the model has not.
    """
    model = exact(model)
    windows = [*islice(whole_windows(model, text, n_window), n_windows)]
    if not windows or len(windows) < n_windows:
        raise DataError(f"the text has {len(windows)} windows of {n_window} tokens, wanted more")
    l0, explained, active = _fit(model, coder, windows)
    all_but_first = range(1, n_window)
    clean = _loss(model, windows)
    with model.trace(replace=coder.replacement(), tokens=all_but_first):
        spliced = _loss(model, windows)
    with model.trace(scale={coder.writes: 0.0}, tokens=all_but_first):
        zero = _loss(model, windows)
    n_tokens = n_windows * (n_window - 1)
    return CoderReport(n_tokens, l0, explained, active, clean, spliced, zero)


def _fit(model: Model, coder: SparseCoder, windows: list[np.ndarray]) -> tuple[float, float, float]:
    """(features above 0 a token, share of the variance that is explained, of features active)."""
    seen, n, n_active, left, squares = np.zeros(coder.n_features, bool), 0, 0, 0.0, 0.0
    total = np.zeros(len(coder.b_dec))
    for x, y in _rows(model, coder, windows):
        features = coder.encode(x)
        seen |= (features > 0).any(axis=0)
        n_active += int((features > 0).sum())
        n += len(x)
        left += float(np.square(y - coder.decode(features), dtype=np.float64).sum())
        squares += float(np.square(y, dtype=np.float64).sum())
        total += y.sum(axis=0, dtype=np.float64)
    spread = squares - float(np.square(total).sum()) / n
    return n_active / n, 1 - left / spread, float(seen.mean())


def _rows(
    model: Model, coder: SparseCoder, windows: list[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What a coder reads and what it is to write, (T − 1, n) each, window by window."""
    names = dict.fromkeys((coder.reads, coder.writes))
    for _, arrays in activations_of(model, windows, *names):
        x, y = (arrays[n].reshape(len(arrays[n]), -1)[1:] for n in (coder.reads, coder.writes))
        yield x, y


def _loss(model: Model, windows: list[np.ndarray]) -> float:
    """The mean of all tokens that have one before them."""
    groups = (windows[i : i + _GROUP] for i in range(0, len(windows), _GROUP))
    losses = [each for group in groups for each in token_losses(model, group)]
    return float(np.concatenate(losses).mean())
