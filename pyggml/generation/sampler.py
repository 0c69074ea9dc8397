"""Logits → a token. Each sampler is a function of logits z (n,) → indices of those that stay.

The formulas and their order stand in `pyggml.generation.sampling`. Nothing here sorts a whole
vocabulary unless the settings keep all of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from functools import partial

import numpy as np

from pyggml.errors import ConfigError, DataError
from pyggml.generation.form import follower
from pyggml.generation.sampling import Sampling
from pyggml.jit import JIT, exact
from pyggml.jit.simd import row_max
from pyggml.model import check_greatest
from pyggml.tokenizer import Tokenizer

_FIRST = 256  # tokens that top_p looks at first; more if they do not reach its sum
_LOOK = 512  # logits whose greatest is looked at first, in vectors


class Sampler:
    """Samples the tokens of one sequence: holds the random generator and the recent tokens.

    how    the settings, with the seed in use
    form   the answer's place in its form, or None
    """

    def __init__(
        self,
        how: Sampling,
        tokenizer: Tokenizer | None = None,
        recent: Sequence[int] | np.ndarray = (),
    ) -> None:
        """recent: the tokens before, such as the prompt. tokenizer: for texts in logit_bias, and
        for forms.

        Raises ConfigError for a logit_bias of no token, for one that forbids them all, and for a
        form that is none.
        """
        self.how = how.with_seed()
        self._rng = np.random.default_rng(self.how.seed)
        self._bias = _bias(how.logit_bias or {}, tokenizer)
        self._penalises = how.repeat_last_n != 0 and (
            (how.repeat_penalty, how.frequency_penalty, how.presence_penalty) != (1, 0, 0)
        )
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()
        self._note(recent)
        self.form = follower(how, tokenizer, recent) if tokenizer else None

    @property
    def is_greedy(self) -> bool:
        """Whether it always takes the token with the model's greatest logit."""
        changes = len(self._bias[0]) or self._penalises or self.form
        return self.how.temperature == 0 and not changes

    def __call__(self, logits: np.ndarray) -> int:
        """A token id sampled from logits (n_vocab,), which stay as they are.

        Raises DataError if the greatest logit is NaN or infinite, ConfigError if logit_bias leaves
        no token.
        """
        z = self.adjust(logits)
        try:
            token = sample(z, self.how, self._rng)
        except DataError:
            if not z.max() == -math.inf < logits.max() < math.inf:
                raise
            of_form = " and that the answer's form has here" if self.form else ""
            what = f"forbids every token that the model can write{of_form}"
            raise ConfigError([("logit_bias", what)]) from None
        self.accept([token])
        return token

    def fork(self) -> Sampler:
        """A sampler that goes on as this one would, without its form, and leaves it as it is."""
        other = copy(self)
        other._rng, other.form = deepcopy(self._rng), None
        other._recent, other._counts = self._recent.copy(), self._counts.copy()
        return other

    def accept(self, tokens: Sequence[int]) -> None:
        """Note tokens that the answer goes on with."""
        self._note(tokens)
        if self.form is not None:
            self.form.accept(tokens)

    def _note(self, tokens: Iterable[int]) -> None:
        """Tokens that penalties count."""
        if not self._penalises:
            return
        for token in tokens:
            self._recent.append(token)
            self._counts[token] += 1
            if len(self._recent) > self.how.repeat_last_n > 0:
                oldest = self._recent.popleft()
                self._counts[oldest] -= 1
                if not self._counts[oldest]:
                    del self._counts[oldest]

    def adjust(self, logits: np.ndarray) -> np.ndarray:
        """The logits with biases and penalties, and -inf for what the form has not here."""
        may_come = None if self.form is None else self.form.mask(len(logits))
        if may_come is None and not (len(self._bias[0]) or self._counts):
            return logits
        z, how, (ids, biases) = logits.copy(), self.how, self._bias
        if may_come is not None:
            z[~may_come] = -math.inf
        if len(ids) and ids[-1] >= len(z):
            raise ConfigError([("logit_bias", f"names token {ids[-1]}, wanted below {len(z)}")])
        z[ids] += biases
        if not self._counts:
            return z
        recent = np.fromiter(self._counts, np.int64)
        counts = np.fromiter(self._counts.values(), z.dtype)
        seen, r = z[recent], how.repeat_penalty
        seen = np.where(seen > 0, seen / r, seen * r)
        z[recent] = seen - (counts * how.frequency_penalty + how.presence_penalty)
        return z


def sample(logits: np.ndarray, how: Sampling, rng: np.random.Generator) -> int:
    """One token id from logits (n_vocab,). Tokens with logit -inf are never sampled.

    Without biases and penalties, which are a `Sampler`'s. Raises DataError if the greatest logit
    is NaN or infinite.
    """
    ids, p = distribution(logits, how)
    if len(ids) == 1:
        return int(ids[0])
    total = np.cumsum(p)
    return int(ids[np.searchsorted(total, rng.random() * total[-1], side="right")])


def checked_argmax(logits: np.ndarray) -> int:
    """The token with the greatest logit, the first of equals. Raises as `sample`."""
    best = int(logits.argmax())  # the first NaN, if there is one
    check_greatest(logits[best])
    return best


def distribution(logits: np.ndarray, how: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the tokens that `sample` draws from, and their probabilities, float64.

    Raises as `sample`.
    """
    best = checked_argmax(logits)
    if how.temperature == 0:
        return np.array([best]), np.ones(1)
    if JIT and 0 < how.top_k <= _FIRST:
        those, p = np.empty(how.top_k, np.int64), np.empty(how.top_k)
        log_min_p = np.float32(math.log(how.min_p) if how.min_p > 0 else -math.inf)
        n = _likeliest_ones(logits, how.top_p, log_min_p, how.temperature, those, p)
        return those[:n], p[:n]
    samplers: list[Callable[[np.ndarray], np.ndarray]] = []
    if how.top_k:
        samplers += [partial(likeliest, k=how.top_k)]
    if how.top_p < 1:
        samplers += [partial(_head, top_p=how.top_p)]
    if how.min_p > 0:
        samplers += [partial(_near, min_p=how.min_p)]
    ids, z = None, logits  # None: all
    for those_that_stay in samplers:
        stay = those_that_stay(z)
        ids, z = stay if ids is None else ids[stay], z[stay]
    with np.errstate(over="ignore"):  # near temperature 0 all but the likeliest become -inf
        p = np.exp((z.astype(np.float64) - logits[best]) / how.temperature)
    return np.arange(len(z)) if ids is None else ids, p / p.sum()


@exact
def _likeliest_ones(
    z: np.ndarray, top_p: float, log_min_p: float, temperature: float, ids: np.ndarray,
    p: np.ndarray,
) -> int:  # fmt: skip
    """The samplers with top_k = len(ids), in one pass over the logits: ids and p are filled from
    the likeliest on, and how many are left is returned. p holds logits, then probabilities."""
    n, k = 0, len(ids)
    least = -np.inf
    for first in range(0, z.size, _LOOK):
        end = min(first + _LOOK, z.size)
        if n == k and not row_max(z[first:end]) > least:
            continue
        for i in range(first, end):
            if n < k or z[i] > least:
                at = min(n, k - 1)
                n = min(n + 1, k)
                while at > 0 and p[at - 1] < z[i]:
                    ids[at], p[at] = ids[at - 1], p[at - 1]
                    at -= 1
                ids[at], p[at] = i, z[i]
                least = p[n - 1]
    greatest, mass = z[ids[0]], 0.0
    for i in range(n):
        mass += np.exp(np.float32(p[i]) - greatest)
    reached, n_head = 0.0, 0
    while n_head < n and reached < top_p * mass:
        reached += np.exp(np.float32(p[n_head]) - greatest)
        n_head += 1
    if top_p < 1:
        n = max(n_head, 1)
    while n > 1 and np.float32(p[n - 1]) < greatest + log_min_p:
        n -= 1
    total = 0.0
    for i in range(n):
        p[i] = np.exp((p[i] - greatest) / temperature)
        total += p[i]
    for i in range(n):
        p[i] /= total
    return n


def likeliest(z: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k greatest, the greatest first; of equal ones, the lower index first."""
    ids = _greatest(z, k)
    return ids[np.argsort(-z[ids], kind="stable")[:k]]


def _greatest(z: np.ndarray, k: int) -> np.ndarray:
    """Indices, upwards, of the k greatest, of all that equal these, and perhaps of some more.

    For small k, z is a table: the k columns with the greatest maxima have what reaches the least of
    these maxima. That takes a tenth of the time of the k-th of z.
    """
    if k >= len(z):
        return np.arange(len(z))
    n_columns = max(1024, 16 * k)
    n_rows = len(z) // n_columns
    if n_rows < 4:
        return np.flatnonzero(z >= np.partition(z, -k)[-k])
    n = n_rows * n_columns
    table = z[:n].reshape(n_rows, n_columns)
    maxima = table.max(0)
    least = np.partition(maxima, -k)[-k]
    columns = np.flatnonzero(maxima >= least)
    rows, at = np.divmod(np.flatnonzero(table.take(columns, 1) >= least), len(columns))
    return np.concatenate([rows * n_columns + columns[at], n + np.flatnonzero(z[n:] >= least)])


def _head(z: np.ndarray, top_p: float) -> np.ndarray:
    """Indices of the likeliest whose softmax adds up to top_p, the likeliest first."""
    greatest, n = z.max(), min(_FIRST, len(z))
    mass = np.exp(z - greatest).sum(dtype=np.float64)
    while True:
        ids = likeliest(z, n)
        sums = np.cumsum(np.exp(z[ids] - greatest), dtype=np.float64)
        if sums[-1] >= top_p * mass or n == len(z):
            return ids[: int(np.searchsorted(sums, top_p * mass)) + 1]
        n = min(8 * n, len(z))


def _near(z: np.ndarray, min_p: float) -> np.ndarray:
    """Indices of those whose softmax is at least min_p times the greatest."""
    return np.flatnonzero(z >= z.max() + math.log(min_p))


def logprobs(logits: np.ndarray, token: int, n: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """log_softmax(logits) of a token, and of the n likeliest tokens as (id, log-probability)."""
    z = logits - logits.max()
    log_sum = np.log(np.exp(z).sum(dtype=np.float64))
    top = likeliest(logits, n) if n else ()
    return float(z[token] - log_sum), tuple((int(i), float(z[i] - log_sum)) for i in top)


def _bias(
    given: Mapping[str | int, float], tokenizer: Tokenizer | None
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids in order, and what is added to each one's logit. A key of digits is an id."""
    biases = dict[int, float]()
    for key, bias in given.items():
        if isinstance(key, int) or key.isdecimal():
            ids = [int(key)]
        else:
            ids = tokenizer.encode(key, add_special=False, parse_special=True) if tokenizer else []
        n_vocab = tokenizer.n_vocab if tokenizer else 1 << 31
        if not ids or not 0 <= min(ids) <= max(ids) < n_vocab:
            raise ConfigError([("logit_bias", f"names {key!r}, which is no token of the model")])
        for id in ids:
            biases[id] = biases.get(id, 0.0) + bias
    if tokenizer and len(biases) == tokenizer.n_vocab and max(biases.values()) == -math.inf:
        raise ConfigError([("logit_bias", f"forbids all {len(biases)} tokens of the model")])
    ids = sorted(biases)
    return np.array(ids, np.int64), np.array([biases[i] for i in ids], np.float32)
