"""ROME: an edit of rank one that makes a model say something else of a subject.

Meng et al. 2022, arXiv:2202.05262. The last matrix W of a feed-forward is read as a memory: the
subject's neurons are a key, and what W writes for them is a value. A new value is sought that makes
the target likely, and W gets the smallest update that gives it for this key:

    ΔW = δ (C⁻¹k)ᵀ / (k · C⁻¹k)      C the mean of k kᵀ over a text, so that keys of other words
                                     are changed as little as may be

key_covariance   C, of texts
rome             the update, and how likely the target was and is

Left out of the paper's objective are the term that keeps what the model says of the subject's kind,
and the random texts before the prompt, over which it is a mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.eager.functions import log_softmax
from pyggml.eager.optim import AdamW
from pyggml.eager.value import Value, tensor
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.lab.as_adapter import down, neurons_of, update
from pyggml.lab.linear import exact
from pyggml.look.lens import log_softmax as log_probs
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs
from pyggml.models.edits import At
from pyggml.models.metric import Activations
from pyggml.models.texts import Ids

_LR, _DECAY, _BETAS = 0.5, 1e-3, (0.9, 0.999)  # of Adam, as the paper's code has them
_LIKELY = 0.05  # loss at which the search ends


def key_covariance(model: Model, layer: int, texts: Sequence[Ids]) -> np.ndarray:
    """The mean of k kᵀ over all tokens of texts, (n_ff, n_ff) float64.

    k is what the last matrix of a block's feed-forward reads. Raises ConfigError for a block
    without such a matrix, DataError for no texts.
    """
    model = exact(model)
    down(model, layer)
    keys = neurons_of(model, layer, texts)
    return np.asarray(keys.T @ keys / len(keys))


@dataclass(frozen=True, slots=True, eq=False)
class RankOneEdit:
    """An update of rank one of a feed-forward's last matrix.

    updates   of that matrix: `model.with_adapters(*model.adapters, edit.updates)`
    change    (n_embd,) float32, what it adds to the matrix's output for the subject
    before    probability of the target after the prompt without it
    after     and with it
    """

    updates: LoraPairs
    change: np.ndarray
    before: float
    after: float

    def __str__(self) -> str:
        (name,) = self.updates
        return f"{name}: the target's probability from {self.before:.3g} to {self.after:.3g}"


def rome(
    model: Model,
    ids: Ids,
    target: Ids,
    layer: int,
    at: int,
    covariance: np.ndarray,
    *,
    n_steps: int = 25,
    most: float = 4.0,
    damping: float = 1e-2,
) -> RankOneEdit:
    """The edit after which `target` follows the prompt.

    ids         the prompt (T,); at: the subject's last token in it, negative from the end
    target      tokens that are to follow
    layer       the block whose feed-forward is edited
    covariance  (n_ff, n_ff), of `key_covariance`; `damping` times its mean diagonal is added to the
                diagonal, which fewer tokens than neurons need
    n_steps     of Adam, at most: it ends when the target's loss is below 0.05
    most        the longest change, by the length of the output itself

    Raises ConfigError for a block without a last matrix and settings out of range, DataError for
    tokens that are none, and ShapeError for a covariance of another shape.
    """
    model, module = exact(model), down(model, layer)
    prompt, answer = model.check_tokens(ids), model.check_tokens(target)
    _check(len(prompt), at, n_steps, most, damping)
    whole, at = np.concatenate([prompt, answer[:-1]]), at % len(prompt)
    names = [f"blk.{layer}.ffn_neurons", module]
    with model.trace(*names) as t:
        model.logits(whole)
    key, value = (t[name][at].astype(np.float64) for name in names)
    if covariance.shape != (len(key), len(key)):
        raise ShapeError(f"the covariance has shape {covariance.shape}, wanted n_ff = {len(key)}²")
    change = _seek(model, whole, answer, module, at, most * _length(value), n_steps)
    pair = _smallest_update(model, change, key, covariance, damping)
    edited = model.with_adapters(*model.adapters, {f"{module}.weight": pair})
    chances = [_probability(m, whole, answer) for m in (model, edited)]
    return RankOneEdit({f"{module}.weight": pair}, change, *chances)


def _length(x: np.ndarray) -> float:
    return float(np.linalg.norm(x))


def _check(n: int, at: int, n_steps: int, most: float, damping: float) -> None:
    if not -n <= at < n:
        raise DataError(f"at is {at}, wanted a position of the prompt's {n} tokens")
    if n_steps < 1 or not most > 0 or not damping >= 0:
        raise ConfigError("n_steps, most and damping are to be 1 or more, above 0, and 0 or more")


def _smallest_update(
    model: Model, change: np.ndarray, key: np.ndarray, covariance: np.ndarray, damping: float
) -> LoraPair:
    """The update that adds `change` (n_embd,) for the key (n_ff,), and least for others."""
    mean = np.trace(covariance) / len(key)
    direction = np.linalg.solve(covariance + damping * mean * np.eye(len(key)), key)
    direction /= direction @ key
    size = np.linalg.norm(direction)  # shared out, so that neither factor is tiny
    return update(model, change[:, None] * size, direction[None] / size)


def _seek(
    model: Model,
    whole: np.ndarray,
    answer: np.ndarray,
    module: str,
    at: int,
    most: float,
    n_steps: int,
) -> np.ndarray:
    """What is to be added to the matrix's output at one token, by Adam."""
    first = len(whole) - len(answer)
    chosen = np.zeros((len(answer), model.config.n_vocab), np.float32)
    chosen[np.arange(len(answer)), answer] = 1

    def likelihood(t: Activations) -> Value:
        return (log_softmax(t["logits"][first:]) * chosen).sum()

    change = np.zeros(model.config.n_embd, np.float64)
    adam = AdamW([tensor(change, requires_grad=True)], lr=_LR, betas=_BETAS, weight_decay=0.0)
    for _ in range(n_steps):
        with model.trace(add={module: At(change.astype(np.float32), tokens=[at])}):
            g = model.grad(likelihood, whole, module)
        if -g.metric / len(answer) < _LIKELY:
            break
        slope = -g[module][at].astype(np.float64) / len(answer)
        slope += 2 * _DECAY * change / max(most, 1e-30) ** 2
        adam.n += 1
        change = adam.update(0, change, slope)
        change *= min(1.0, most / max(_length(change), 1e-30))
    return change.astype(np.float32)


def _probability(model: Model, whole: np.ndarray, answer: np.ndarray) -> float:
    """Of the wanted tokens at the end of a text, the last of which the text has not."""
    logs = log_probs(model.logits(whole)[-len(answer) :])[np.arange(len(answer)), answer]
    return float(np.exp(logs.sum()))
