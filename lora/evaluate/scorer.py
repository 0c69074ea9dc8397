"""Log-probabilities of chosen tokens.

A pass computes the hidden states of all its tokens, and logits where a token is scored.
"""

from dataclasses import dataclass

import numpy as np

from pyggml.backends.cpu import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import zeros
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.ops import get_rows
from pyggml.ops.loss.head import chunk_rows
from pyggml.ops.loss.loss import cross_entropies


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """n predictions: −log p of the wanted token, (n,) float64; whether it was the likeliest,
    (n,) bool."""

    losses: np.ndarray
    right: np.ndarray


class Scorer:
    """Two graphs: the hidden states of a pass, and the logits of a few of its positions."""

    def __init__(
        self, model: Model, n_tokens: int, n_scored: int, n_ctx: int | None = None
    ) -> None:
        """n_tokens of a pass; n_scored: the positions whose logits are made at a time, at most;
        n_ctx: the longest sequence, n_tokens unless it is given."""
        parts = model.parts
        self.inputs = Inputs.empty(n_tokens, n_ctx)
        net = Net(parts.weights, self.inputs, model.adapters)
        hidden = parts.decoder.hidden(net)
        self._forward = model.program(hidden)
        self._hidden, self._found = zeros(hidden.shape, F32, "hidden"), hidden
        n_rows = chunk_rows(n_scored, parts.config.n_vocab)
        self._rows = zeros((n_rows,), I32, "scored rows")
        self._logits = parts.decoder.logits(net, get_rows(self._hidden, self._rows))
        self._head = model.program(self._logits)

    def score(self, positions: np.ndarray, targets: np.ndarray) -> Predictions:
        """The targets as predicted at these positions of the pass that `inputs` hold.

        positions may repeat: several tokens may be asked for at one place.
        """
        self._forward()
        write(self._hidden, self._forward.read(self._found))
        (n_rows,) = self._rows.shape
        losses, right = np.empty(len(positions)), np.empty(len(positions), np.bool_)
        for first in range(0, len(positions), n_rows):
            some = slice(first, min(first + n_rows, len(positions)))
            write(self._rows, np.resize(positions[some], n_rows))
            self._head()
            logits = self._head.read(self._logits)[: some.stop - first]
            losses[some] = cross_entropies(logits, targets[some])
            right[some] = logits.argmax(axis=1) == targets[some]
        return Predictions(losses, right)
