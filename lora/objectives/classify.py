"""Classification: the cross entropy of a text's label among all labels, after the text.

L = Σ w_c · −ln softmax(z)_c / Σ w_c over the texts of a step, z the logits of the labels' tokens at
a text's last token, c its class. With weights, it is torch's CrossEntropyLoss(weight=w).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pyggml.errors import ConfigError
from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.look.confusion import Confusion
from pyggml.lora.data import Corpus, Dataset, WindowBatch
from pyggml.lora.data.labels import Labels
from pyggml.lora.objectives.objective import Leaves, LossNet, Objective, Outputs, Task, Windows
from pyggml.lora.objectives.tally import ClassCounts, Tally
from pyggml.lora.ranks import Ranks
from pyggml.model import Model
from pyggml.models.stack import LABELS
from pyggml.ops import cross_entropy_rows
from pyggml.runtime import Program
from pyggml.settings import of_optimiser

_NONE, _BALANCED = "none", "balanced"


@dataclass(frozen=True, slots=True)
class ClassLeaves(Leaves):
    """The leaves of a batch of T tokens; `ClassBatch` explains each."""

    classes: Tensor  # (T,) int32
    weights: Tensor  # (T,)
    labels: Tensor  # (n,) int32


@dataclass(frozen=True, slots=True, eq=False)
class ClassBatch(WindowBatch):
    """T tokens as in `WindowBatch`, whose weights are those of the texts' last tokens; else 0.

    classes   (T,) int32 the class of the text that ends here
    labels    (n,) int32 the token of each class
    """

    classes: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Classify(Objective):
    """Learns the classes of texts."""

    name: ClassVar[str] = "classify"
    purpose: ClassVar[str] = "learns the class of a text, by the token of its label"
    rows: ClassVar[str] = "classes"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 3e-4, "epochs": 3, "warmup_ratio": 0.1}
    tally: ClassVar[type[Tally]] = ClassCounts

    class_weights: str = of_optimiser(
        _NONE,
        "weights of the classes in the loss: balanced, which makes rare ones count as much as "
        "common ones, or LABEL=N,LABEL=N, where others have 1",
        "none, balanced or LABEL=N,LABEL=N with N above 0",
        lambda text: text in (_NONE, _BALANCED) or bool(_weights_in(text)),
    )

    def n_figures(self, corpus: Corpus) -> int:
        return len(_labels(corpus)) ** 2

    def metadata(self, model: Model, corpus: Corpus) -> Mapping[str, str]:
        return {LABELS: corpus.about[LABELS]}

    def loss(self, net: LossNet, batch: ClassLeaves) -> Outputs:
        logits = net.logits_among(batch.labels)
        return {"loss": cross_entropy_rows(logits, batch.classes, batch.weights), "logits": logits}

    def report(self, batch: ClassBatch, outputs: Mapping[str, np.ndarray]) -> ClassCounts:
        at, n = np.flatnonzero(batch.weights), len(batch.labels)
        guesses = outputs["logits"][at].argmax(axis=1)
        counts = Confusion.of(batch.classes[at], guesses, n).counts
        return ClassCounts.of(counts.reshape(-1).tolist())

    def feed(self, task: Task) -> ClassFeed:
        labels = _labels(task.corpus)
        return ClassFeed(labels, self._weights(labels, task.corpus), task.config.batch)

    def _weights(self, labels: Labels, corpus: Corpus) -> np.ndarray:
        """(n,) float32, the weight of each class."""
        if self.class_weights == _BALANCED:
            counts = np.bincount(_classes(corpus.train, labels), minlength=len(labels))
            return (counts.sum() / (len(labels) * np.maximum(counts, 1))).astype(np.float32)
        given = _weights_in(self.class_weights)
        if unknown := [name for name in given if name not in labels.tokens]:
            names = ", ".join(labels.names)
            raise ConfigError([("class_weights", f"names {unknown[0]!r}, wanted some of {names}")])
        return np.array([given.get(name, 1.0) for name in labels.names], np.float32)


def _labels(corpus: Corpus) -> Labels:
    if LABELS not in corpus.about:
        raise ConfigError([("objective", "is classify, but the corpus has no classes")])
    return Labels.read(corpus.about[LABELS])


def _classes(data: Dataset, labels: Labels) -> np.ndarray:
    """The class of each text of these windows."""
    return labels.numbers(data.tokens[:, 1:][data.targets()])


def _weights_in(text: str) -> dict[str, float]:
    """LABEL=N,LABEL=N as numbers; nothing of another text."""
    weights = dict[str, float]()
    for word in text.split(","):
        name, is_there, number = word.rpartition("=")
        try:
            weights[name.strip()] = float(number)
        except ValueError:
            return {}
        if not is_there or not 0 < weights[name.strip()] < np.inf:
            return {}
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class ClassFeed:
    """Windows of texts, `size` in a batch. weights: (n,) of the classes."""

    labels: Labels
    weights: np.ndarray
    size: int
    graphs: Sequence[Graph] = ()

    def leaves(self, n_tokens: int) -> ClassLeaves:
        shapes = {"classes": (n_tokens,), "weights": (n_tokens,), "labels": (len(self.labels),)}
        return ClassLeaves.of_shapes({"classes", "labels"}, **shapes)

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[ClassBatch]:
        of_step = _classes(data.part(np.asarray(windows, np.int64)), self.labels)
        total = max(float(self.weights[of_step].sum(dtype=np.float64)), 1e-30)
        tokens = np.fromiter(self.labels.tokens.values(), np.int32)
        for batch in data.batches(windows, self.size):
            classes = self.labels.numbers(batch.targets)
            own = np.where(batch.weights != 0, self.weights[classes] / total, 0).astype(np.float32)
            yield batch.to_batch_of(ClassBatch, weights=own, classes=classes, labels=tokens)
