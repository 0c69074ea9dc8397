"""Texts → vectors: passes over many texts at once, bound once for each shape."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ConfigError, NotFiniteError, suggestion
from pyggml.graph.tensor import Tensor
from pyggml.models.build import Parts, build_scores, build_vectors
from pyggml.models.config import POOLINGS
from pyggml.models.low_rank import LoraPairs
from pyggml.models.net import Inputs, Net
from pyggml.models.pooling import Pool, usual_pooling
from pyggml.models.taps import Taps
from pyggml.models.texts import Ids, check_text, fill
from pyggml.ops import l2_norm
from pyggml.runtime import Arenas, Program
from pyggml.sizes import round_up

_MOST_TOKENS, _TOKENS_STEP = 512, 16  # of a pass; padded to multiples
_MOST_TEXTS, _TEXTS_STEP = 64, 8
_MOST_KEPT = 16  # bound passes
_LEAST = 1e-12  # of a vector's length, where it is divided by it
Bind = Callable[[Tensor, Arenas], Program]


@dataclass(frozen=True, slots=True)
class _TextPass:
    inputs: Inputs
    pool: Pool | None
    program: Program
    out: Tensor


class Embedder:
    """Embeds texts, any number at a time. `Model.embedder` makes it.

    pooling     one of POOLINGS; of "none", a text has the vectors of its tokens, of "rank" the
                scores of the model's classifier
    normalise   vectors have the length 1
    """

    def __init__(
        self,
        parts: Parts,
        adapters: Sequence[LoraPairs],
        bind: Bind,
        taps: Callable[[], Taps | None],
        pooling: str | None = None,
        normalise: bool = True,
    ) -> None:
        """taps: what changes a graph's activations. Raises ConfigError for an unknown pooling."""
        self.pooling = usual_pooling(parts.config) if pooling is None else pooling
        if self.pooling not in POOLINGS:
            near = suggestion(self.pooling, POOLINGS)
            raise ConfigError(f"pooling is {self.pooling!r}, known are {', '.join(POOLINGS)}{near}")
        classifier = parts.decoder.classifier
        if self.pooling == "rank" and classifier is None:
            raise ConfigError(
                f"pooling 'rank' wants a classifier, which this {parts.config.architecture} lacks"
            )
        self._pooled = classifier.pooling if classifier and self.ranks else self.pooling
        self.normalise = normalise and not self.ranks
        self._parts, self._adapters, self._taps, self._bind = parts, adapters, taps, bind
        self._arenas, self._passes = Arenas(), OrderedDict[tuple[int, int], _TextPass]()

    @property
    def ranks(self) -> bool:
        """Whether texts get scores of a classifier, (labels,), instead of vectors."""
        return self.pooling == "rank"

    def __call__(self, texts: Sequence[Ids]) -> list[np.ndarray]:
        """The vectors of texts, given by their tokens: float32 (n_embd,), or (tokens, n_embd) where
        nothing is pooled.

        Raises DataError for no tokens, more than the model's context and one outside the
        vocabulary; NotFiniteError where a number is NaN or infinite.
        """
        config = self._parts.config
        ids = [check_text(text, config, f"texts[{i}]") for i, text in enumerate(texts)]
        vectors: list[np.ndarray] = [np.zeros(0)] * len(ids)
        for part in in_passes(ids):
            for i, vector in zip(part, self.run([ids[i] for i in part]), strict=True):
                vectors[i] = vector
        return vectors

    def run(self, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The vectors of checked texts that share a pass: `in_passes` chose them."""
        lengths = [len(text) for text in texts]
        n_tokens, n_texts = sum(lengths), len(texts)
        shape = round_up(n_tokens, _TOKENS_STEP), round_up(n_texts, _TEXTS_STEP)
        run = self._pass(*(shape if n_texts > 1 else (shape[0], 1)))
        rest = np.zeros(run.inputs.tokens.shape[0] - n_tokens, np.int32)  # another text, unread
        fill(run.inputs, *texts, *([rest] if len(rest) else []))
        ends = np.cumsum(lengths)
        if run.pool is not None:
            run.pool.fill([*zip((ends - lengths).tolist(), ends.tolist(), strict=True)])
        run.program()
        values = run.program.read(run.out)
        values = values[:n_tokens] if run.pool is None else values[:n_texts]
        if not np.isfinite(values).all():
            raise NotFiniteError("an embedding is not finite: a number is NaN or infinite")
        if run.pool is None:
            return [np.array(part) for part in np.split(values, ends[:-1])]
        return [np.array(row) for row in values]

    def _pass(self, n_tokens: int, n_texts: int) -> _TextPass:
        key = n_tokens, n_texts
        if key not in self._passes:
            while len(self._passes) >= _MOST_KEPT:
                self._passes.popitem(last=False)
            self._passes[key] = self._build(n_tokens, n_texts)
        self._passes.move_to_end(key)
        return self._passes[key]

    def _build(self, n_tokens: int, n_texts: int) -> _TextPass:
        config = self._parts.config
        n_ctx = min(n_tokens, config.n_ctx)
        inputs = Inputs.empty(n_tokens, n_ctx, causal=config.causal)
        net = Net(self._parts.weights, inputs, self._adapters, taps=self._taps())
        if self.pooling == "none":
            out, pool = self._parts.decoder.hidden(net, scaled=False), None
        else:
            pool = Pool.empty(self._pooled, n_texts, n_tokens)
            out = (build_scores if self.ranks else build_vectors)(self._parts, net, pool)
        out = l2_norm(out, _LEAST) if self.normalise else out
        return _TextPass(inputs, pool, self._bind(out, self._arenas), out)


def in_passes(texts: Sequence[np.ndarray]) -> list[list[int]]:
    """The numbers of texts that share a pass: of alike length, so that passes are of few shapes."""
    lengths = [len(text) for text in texts]
    passes: list[list[int]] = []
    n_tokens = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        n_tokens += lengths[i]
        if not passes or n_tokens > _MOST_TOKENS or len(passes[-1]) == _MOST_TEXTS:
            passes.append([])
            n_tokens = lengths[i]
        passes[-1].append(i)
    return passes
