"""Embeddings: InfoNCE with the batch's other texts as negatives (van den Oord et al. 2018,
arXiv:1807.03748; sentence-transformers' MultipleNegativesRankingLoss).

L = mean over a step's anchors of −ln softmax(s / τ) at the anchor's positive, s the cosines of its
vector with those of all positives and hard negatives of the batch, but for copies of the anchor and
of its positive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyggml.errors import ConfigError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, put_together, zeros
from pyggml.lora.data import Corpus, Dataset, WindowBatch
from pyggml.lora.data.groups import ANCHOR
from pyggml.lora.data.windows.batches import READS
from pyggml.lora.objectives.objective import Leaves, LossNet, Objective, Outputs, Task, Windows
from pyggml.lora.objectives.tally import PairsRight, Tally
from pyggml.lora.ranks import Ranks
from pyggml.model import Model
from pyggml.models import Inputs, ModelConfig
from pyggml.models.pooling import POOLED, Pool, usual_pooling
from pyggml.models.stack import POOLING
from pyggml.ops import add, cross_entropy_rows, l2_norm, mul_mat, scale
from pyggml.runtime import Program
from pyggml.settings import of_optimiser, one_of

_MODEL = "model"
_LEAST = 1e-12  # of a vector's length, where it is divided by it
_NEVER = np.float32(-1e30)  # added to what is compared with nothing


@dataclass(frozen=True, slots=True)
class TextVectorLeaves(Leaves):
    """The leaves of a batch of T tokens and S texts; `TextVectorBatch` explains each."""

    pool: Tensor  # of `Pool`
    compared: Tensor  # (S, S)
    positives: Tensor  # (S,) int32
    share: Tensor  # (S,)


@dataclass(frozen=True, slots=True, eq=False)
class TextVectorBatch(WindowBatch):
    """T tokens as in `WindowBatch`, and the S texts among them.

    pool        which tokens make up each text's vector, as `Pool` has it
    compared    (S, S) 0 where a text is compared with another, else far below 0
    positives   (S,) int32 the number of each anchor's positive
    share       (S,) 1 / anchors of the step at each of them, else 0
    """

    pool: np.ndarray
    compared: np.ndarray
    positives: np.ndarray
    share: np.ndarray

    def fill(self, inputs: Inputs) -> None:
        """A text's mark is not read: not by those before it either, where tokens see both ways."""
        super(TextVectorBatch, self).fill(inputs)
        if not inputs.causal:
            first = np.arange(len(self.positions)) - self.positions
            ends = first + np.maximum(self.length, 1).astype(np.int64)
            ends = np.maximum(ends, np.arange(len(first)) + 1)
            write(inputs.span, np.stack([first, ends], axis=1).astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Embed(Objective):
    """Texts that belong together get vectors that are near to each other."""

    name: ClassVar[str] = "embed"
    purpose: ClassVar[str] = "learns vectors that are near for texts that belong together"
    rows: ClassVar[str] = "groups"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 1e-4, "epochs": 1, "warmup_ratio": 0.1}
    tally: ClassVar[type[Tally]] = PairsRight

    temperature: float = of_optimiser(
        0.05,
        "τ, the temperature by which cosines are divided",
        "above 0, at most 10",
        aliases=("temp",),
    )
    pooling: str = of_optimiser(
        _MODEL,
        "how a text's tokens become its vector: as the model's file says, which is the last token "
        "of a causal model where it says nothing",
        *one_of((_MODEL, *POOLED)),
    )

    def pooling_of(self, config: ModelConfig) -> str:
        """One of POOLED. ConfigError for a model whose file names another."""
        pooling = usual_pooling(config) if self.pooling == _MODEL else self.pooling
        if pooling not in POOLED:
            names = ", ".join(POOLED)
            fault = f"is model, whose file says {pooling}, wanted one of {names}"
            raise ConfigError([("pooling", fault)])
        return pooling

    def metadata(self, model: Model, corpus: Corpus) -> Mapping[str, str]:
        return {POOLING: self.pooling_of(model.config)}

    def unread(self, model: Model) -> Collection[str]:
        """The output matrix, unless it is the table of tokens too."""
        name = model.parts.output_name
        return () if name == "token_embd" else (f"{name}.weight", f"{name}.bias")

    def loss(self, net: LossNet, batch: TextVectorLeaves) -> Outputs:
        pool = Pool(self.pooling_of(net.parts.config), batch.pool)
        vectors = l2_norm(net.vectors(pool), _LEAST)
        cosines = scale(mul_mat(vectors, vectors), 1 / self.temperature)
        loss = cross_entropy_rows(add(cosines, batch.compared), batch.positives, batch.share)
        return {"loss": loss, "n_right": loss.saved[0]}

    def report(self, batch: TextVectorBatch, outputs: Mapping[str, np.ndarray]) -> PairsRight:
        return PairsRight(int(outputs["n_right"]), int(np.count_nonzero(batch.share)))

    def feed(self, task: Task) -> TextVectorFeed:
        if task.corpus.about.get(READS) != self.rows:
            raise ConfigError([("objective", "is embed, but the corpus has no groups of texts")])
        room = max(map(_n_texts, task.corpus.parts))
        return TextVectorFeed(self.pooling_of(task.model.config), room, task.config.batch)


def _n_texts(data: Dataset) -> int:
    """The most texts of a window."""
    most = 1
    for block in data.blocks():
        changes = np.diff(block.documents, axis=1, prepend=-1) != 0
        most = max(most, int((changes & (block.documents >= 0)).sum(axis=1).max(initial=1)))
    return most


@dataclass(frozen=True, slots=True, eq=False)
class TextVectorFeed:
    """Windows of groups, `size` in a batch. room: the most texts of a window."""

    pooling: str
    room: int
    size: int
    graphs: Sequence[Graph] = ()

    def leaves(self, n_tokens: int) -> TextVectorLeaves:
        n = self.size * self.room
        leaves = (
            Pool.empty(self.pooling, n, n_tokens).leaf,
            zeros((n, n), F32, "compared"),
            zeros((n,), I32, "positives"),
            zeros((n,), F32, "share"),
        )
        put_together(*leaves)
        return TextVectorLeaves(*leaves)

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[TextVectorBatch]:
        for batch in data.batches(windows, self.size):
            yield batch.to_batch_of(TextVectorBatch, **self._arrays(batch))

    def _arrays(self, batch: WindowBatch) -> dict[str, np.ndarray]:
        """What `TextVectorBatch` has beside the tokens."""
        last = np.flatnonzero((batch.positions == batch.length - 1) & (batch.length > 0))
        spans = [(int(at - batch.positions[at]), int(at) + 1) for at in last]
        marks, n = batch.targets[last], self.size * self.room
        asks = np.flatnonzero(marks == ANCHOR)
        texts = [batch.tokens[first:end].tobytes() for first, end in spans]
        compared = np.full((n, n), _NEVER, np.float32)
        for i in asks.tolist():
            equal = [j for j, text in enumerate(texts) if marks[j] != ANCHOR
                      and text not in (texts[i], texts[i + 1])]  # fmt: skip
            compared[i, [*equal, i + 1]] = 0
        positives, share = np.zeros(n, np.int32), np.zeros(n, np.float32)
        positives[asks], share[asks] = asks + 1, batch.weights[last[asks]]
        pool = Pool.empty(self.pooling, n, len(batch.tokens)).values(spans)
        return {"pool": pool, "compared": compared, "positives": positives, "share": share}
