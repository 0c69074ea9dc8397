"""Log-probabilities of chosen tokens.

A pass computes the hidden states of all its tokens, and logits where a token is scored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyggml.errors import NotFiniteError
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import zeros
from pyggml.look.lens import TokenTable, losses_and_ranks
from pyggml.model import Model
from pyggml.models import Inputs, Net
from pyggml.models.texts import fill
from pyggml.ops import get_rows
from pyggml.ops.loss.head import rows_within
from pyggml.ops.loss.loss import cross_entropies

_LOGITS_BYTES = 20 << 20  # that exist at once, of which a copy is read


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
        net = Net(parts.weights, self.inputs, model.adapters, taps=model.taps(reads=False))
        hidden = parts.decoder.hidden(net)
        self._forward = model.program(hidden)
        self._hidden, self._found = zeros(hidden.shape, F32, "hidden"), hidden
        n_rows = rows_within(n_scored, 4 * parts.config.n_vocab, _LOGITS_BYTES)
        self._rows = zeros((n_rows,), I32, "scored rows")
        net.logits_of = self._rows
        self._logits = parts.decoder.logits(net, get_rows(self._hidden, self._rows))
        self._head = model.program(self._logits)

    def score(self, positions: np.ndarray, targets: np.ndarray) -> Predictions:
        """The targets as predicted at these positions of the pass that `inputs` hold.

        positions may repeat: several tokens may be asked for at one place. Raises NotFiniteError if
        the model makes no numbers there.
        """
        losses, right = np.empty(len(positions)), np.empty(len(positions), np.bool_)
        for part, logits in self.logits(positions):
            losses[part] = cross_entropies(logits, targets[part])
            right[part] = logits.argmax(axis=1) == targets[part]
            del logits  # before the next are read
            check_losses(losses[part])
        return Predictions(losses, right)

    def logits(self, positions: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Which of the positions, and their logits float32 (n, n_vocab), some at a time."""
        self._forward()
        write(self._hidden, self._forward.read(self._found))
        (n_rows,) = self._rows.shape
        for first in range(0, len(positions), n_rows):
            part = slice(first, min(first + n_rows, len(positions)))
            write(self._rows, np.resize(positions[part], n_rows))
            self._head()
            yield part, self._head.read(self._logits)[: part.stop - first]


def check_losses(losses: np.ndarray) -> None:
    """NotFiniteError if a loss is NaN or infinite."""
    if not (is_number := np.isfinite(losses)).all():
        raise NotFiniteError(
            f"the loss of a token is {losses[~is_number][0]}, wanted a finite number: the model's "
            "weights or its adapter make no numbers"
        )


def read_tokens(model: Model, ids: np.ndarray, counted: np.ndarray) -> TokenTable:
    """`token_table` of a model that is not traced, with the logits of some tokens at a time."""
    tokens = model.check_tokens(ids)
    losses, ranks = np.full(len(tokens), np.nan), np.full(len(tokens), -1)
    scorer = Scorer(model, len(tokens), len(tokens))
    fill(scorer.inputs, tokens)
    for part, logits in scorer.logits(np.arange(len(tokens) - 1)):
        after = slice(part.start + 1, part.stop + 1)
        losses[after], ranks[after] = losses_and_ranks(logits, tokens[after])
        del logits
        check_losses(losses[after])
    return TokenTable(tokens, losses, ranks, counted & (np.arange(len(tokens)) > 0))
