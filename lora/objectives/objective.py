"""What an objective declares. Each one of `pyggml.lora.objectives` is a file of its own.

name       the word for it on a command line
purpose    what it learns from what, as the rest of a sentence that starts with the name
rows       the rows that it reads: "training", "pairs", "labels" or "prompts", see
           `pyggml.lora.data.records`
defaults   what suits it of a run's settings: learning rate, epochs, warm-up
settings   the fields of its dataclass, each with default, range and help (`pyggml.settings`)
loss       the graph from the tokens of a batch to the loss and to what is reported
report     the numbers of a batch for the log

A run asks an objective for nothing else. `TextObjective` serves those that learn to write tokens,
`pyggml.lora.objectives.answers` those that compare answers, `pyggml.lora.objectives.sampled` those
that learn from answers which the model writes as it trains: these have a `Practice`, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Shape, Tensor, put_together, zeros
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Corpus, Dataset, WindowBatch
from pyggml.lora.objectives.tally import Tally, TokensRight
from pyggml.lora.ranks import Ranks
from pyggml.model import Model
from pyggml.models import (
    Inputs,
    Net,
    Parts,
    Taps,
    logits_among,
    soft_token_loss,
    token_loss,
    token_losses,
)
from pyggml.models.pooling import Pool, pooled
from pyggml.runtime import Arenas, Program
from pyggml.settings import Settings

Windows = np.ndarray | range  # numbers of some windows of a dataset
Outputs = Mapping[str, Tensor]  # "loss" (), and what is read of each batch
WARM_UP = {"warmup_steps", "warmup_ratio"}


@dataclass(frozen=True, slots=True)
class LossNet:
    """The graph that a loss is built on: the model over the tokens of a batch.

    trained    names of the tensors that get gradients
    gradient   whether a backward pass follows
    """

    parts: Parts
    net: Net
    trained: Collection[str]
    gradient: bool

    @classmethod
    def of(
        cls,
        model: Model,
        inputs: Inputs,
        trained: Collection[str],
        gradient: bool,
        taps: Taps | None = None,
    ) -> LossNet:
        """A model over these inputs, with its adapters."""
        net = Net(model.parts.weights, inputs, model.adapters, taps=taps)
        return cls(model.parts, net, trained, gradient)

    def hidden(self) -> Tensor:
        """The hidden states (T, n_embd), for a loss of several terms."""
        return self.parts.decoder.hidden(self.net)

    def token_loss(self, targets: Tensor, weights: Tensor, h: Tensor | None = None) -> Tensor:
        """Σ weight · cross entropy of the targets, (); `saved[0]` counts those that are right.
        h: `hidden`, if that is called at all."""
        return token_loss(self.parts, self.net, targets, weights, self.trained, self.gradient, h)

    def soft_loss(
        self, h: Tensor, goals: tuple[Tensor, Tensor, Tensor], temperature: float, beta: float = 0
    ) -> Tensor:
        """Σ weight · cross entropy of probabilities at a temperature, with beta their divergence,
        (); `saved[0]` counts the first targets that are right. wanted: targets, shares, weights, as
        of `soft_token_loss`."""
        return soft_token_loss(
            self.parts, self.net, h, goals, self.trained, self.gradient, temperature, beta
        )

    def token_losses(self, targets: Tensor, weights: Tensor, temperature: float = 1.0) -> Tensor:
        """The terms of that sum, (T,), of logits over a temperature."""
        return token_losses(
            self.parts, self.net, targets, weights, self.trained, self.gradient, temperature
        )

    def vectors(self, pool: Pool) -> Tensor:
        """The vectors (n, n_embd) of texts, pooled."""
        return pooled(self.parts.decoder.hidden(self.net, scaled=False), pool)

    def logits_among(self, tokens: Tensor) -> Tensor:
        """The logits (T, n) of some tokens (n,) alone."""
        return logits_among(self.parts, self.net, tokens, self.trained)


class Leaves:
    """The leaves of a batch beside the model's inputs: a frozen dataclass of tensors with slots.
    Each has the name of the batch's array that is written into it."""

    __slots__: tuple[str, ...] = ()

    @classmethod
    def of_shapes(cls, integers: Collection[str] = (), **shapes: Shape) -> Self:
        """Zeros of these shapes, by name, which lie side by side: float32, or int32 of integers."""
        types = {name: I32 if name in integers else F32 for name in shapes}
        leaves = {name: zeros(shape, types[name], name) for name, shape in shapes.items()}
        put_together(*leaves.values())
        return cast(Any, cls)(**leaves)

    def write(self, batch: Any) -> None:
        for name in self.__slots__:
            write(getattr(self, name), getattr(batch, name))


@dataclass(frozen=True, slots=True)
class Task:
    """What one run learns: a model, rows and settings. reference: the fixed model, if it has one"""

    model: Model
    corpus: Corpus
    config: TrainConfig
    reference: Model | None = None


class Feed(Protocol):
    """What one run feeds to the graphs of an objective.

    graphs   further graphs, which run in the same memory
    """

    @property
    def graphs(self) -> Sequence[Graph]: ...

    def leaves(self, n_tokens: int) -> Leaves:
        """Those of a batch of so many tokens."""

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[WindowBatch]:
        """The batches of one step over these windows, of which another rank's may have no tokens.
        programs: `graphs`, bound.

        All ranks call this alike.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What a step trains on: windows of the corpus, or windows that were made of them.

    n_read    windows of the corpus that it uses up
    tally     what was counted as it was made; None: nothing
    about     what a record of the step holds of that
    """

    dataset: Dataset
    windows: Windows
    n_read: int
    tally: Tally | None = None
    about: Mapping[str, Any] | None = None


class Practice(Protocol):
    """What makes the windows of a step as training goes.

    state     (n,) float64, of the lesson under way, while others of its steps follow; else empty
    n_bytes   of the host's arena, which it takes between two passes

    arenas: the run's; None takes memory of its own.
    """

    state: np.ndarray

    @property
    def n_bytes(self) -> int: ...

    def lesson(
        self, step: int, data: Dataset, windows: np.ndarray, ranks: Ranks, arenas: Arenas | None
    ) -> Lesson:
        """That of the step after so many, of these windows. All ranks call this alike."""

    def measure(
        self, data: Dataset, windows: Windows, ranks: Ranks, arenas: Arenas | None
    ) -> Lesson | tuple[float, Tally, np.ndarray]:
        """What a validation tells of these windows: the lower, the better; and what a step counts;
        and the parts (n, 2) that it is the sum of, each with its weight. Or windows whose loss
        tells it. All ranks call this."""


@dataclass(frozen=True, kw_only=True)
class Objective(Settings, ABC):
    """What a run minimises. Fields are its settings; see the top of this file."""

    name: ClassVar[str]
    purpose: ClassVar[str]
    rows: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]  # settings of TrainConfig
    tally: ClassVar[type[Tally]]  # of `report`
    has_reference: ClassVar[bool] = False  # whether answers are compared with a fixed model

    @property
    def steps_a_lesson(self) -> int:
        """Steps that train on the same windows."""
        return 1

    @classmethod
    def settle(cls, config: TrainConfig) -> TrainConfig:
        """The settings of a run, with the objective's defaults for those that are not given: for
        the warm-up if neither its steps nor its ratio is, for epochs if max_steps is not either."""
        names = {f.name for f in fields(config) if getattr(config, f.name) is not None}
        names |= WARM_UP if names & WARM_UP else set()
        names |= {"epochs"} if config.max_steps else set()
        mine = {name: value for name, value in cls.defaults.items() if name not in names}
        return replace(config, **mine) if mine else config

    def n_figures(self, corpus: Corpus) -> int:
        """How many numbers its tally has."""
        return len(fields(self.tally))

    def metadata(self, model: Model, corpus: Corpus) -> Mapping[str, str]:
        """Keys of the file that a run writes: what whoever reads it must know."""
        return {}

    def unread(self, model: Model) -> Collection[str]:
        """Names of tensors that its loss does not read."""
        return ()

    @abstractmethod
    def loss(self, net: LossNet, batch: Any) -> Outputs:
        """The outputs of the graph: "loss" (), and what `report` reads. batch: its leaves."""

    @abstractmethod
    def report(self, batch: Any, outputs: Mapping[str, np.ndarray]) -> Tally:
        """The numbers of a batch. outputs: those of `loss`, read."""

    @abstractmethod
    def feed(self, task: Task) -> Feed:
        """What feeds the graphs of one run. Raises ConfigError if the corpus has other rows."""

    def practice(self, task: Task) -> Practice | None:
        """What makes the windows of the steps of one run; None: they are the corpus's."""
        return None


# -- texts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextLeaves(Leaves):
    """The leaves of a batch of T tokens; `pyggml.lora.data.WindowBatch` explains each."""

    targets: Tensor  # (T,) int32
    weights: Tensor  # (T,)

    @classmethod
    def empty(cls, n_tokens: int) -> TextLeaves:
        return cls.of_shapes({"targets"}, targets=(n_tokens,), weights=(n_tokens,))


@dataclass(frozen=True, slots=True)
class TextFeed:
    """Windows of tokens, as many in a batch as the settings say."""

    size: int
    graphs: Sequence[Graph] = ()

    def leaves(self, n_tokens: int) -> TextLeaves:
        return TextLeaves.empty(n_tokens)

    def batches(
        self, programs: Sequence[Program], data: Dataset, windows: Windows, ranks: Ranks
    ) -> Iterator[WindowBatch]:
        return data.batches(windows, self.size, ranks.share(-(-len(windows) // self.size)))


@dataclass(frozen=True, kw_only=True)
class TextObjective(Objective):
    """An objective that learns tokens of texts and answers; its leaves are `TextLeaves`.

    `report` reads "n_right" (): how many learned tokens have the highest probability.
    """

    rows: ClassVar[str] = "training"
    defaults: ClassVar[Mapping[str, Any]] = {"lr": 2e-4, "epochs": 1, "warmup_steps": 10}
    tally: ClassVar[type[Tally]] = TokensRight

    def report(self, batch: WindowBatch, outputs: Mapping[str, np.ndarray]) -> Tally:
        return TokensRight(int(outputs["n_right"]), int(np.count_nonzero(batch.weights)))

    def feed(self, task: Task) -> Feed:
        return TextFeed(task.config.batch)
