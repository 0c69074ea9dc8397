"""A run before it begins: its graphs, what memory they take, its length and what it validates."""

from collections.abc import Sequence
from functools import cached_property

from pyggml import heap, threads
from pyggml.graph import Graph
from pyggml.graph.arrays import detach, is_constant
from pyggml.graph.tensor import Tensor
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Corpus
from pyggml.lora.data.tokens.chats import chat_metadata
from pyggml.lora.objectives import USUAL, Objective
from pyggml.lora.objectives.objective import Task
from pyggml.lora.ranks import ALONE, Ranks
from pyggml.lora.trainer.checkpoint import Progress
from pyggml.lora.trainer.checks import check_settings
from pyggml.lora.trainer.learning_rate import ScheduleFunction, learning_rate_of
from pyggml.lora.trainer.losses import Losses
from pyggml.lora.trainer.memory import OnDevice, RunMemory, held_bytes, limit_slots, on_devices
from pyggml.lora.trainer.order import WindowOrder
from pyggml.lora.trainer.passes import Passes
from pyggml.lora.trainer.reports import History
from pyggml.lora.trainer.validation import ValidationSample
from pyggml.model import Model


class RunPlan:
    """What a run consists of, see `Trainer`, and where it stands.

    progress, history   of the steps that are made
    order               of its windows
    n_in_last_step      the windows of an epoch's last step
    """

    def __init__(
        self,
        model: Model,
        parameters: Parameters,
        corpus: Corpus,
        config: TrainConfig,
        objective: Objective | None = None,
        ranks: Ranks = ALONE,
        reference: Model | None = None,
        schedule: ScheduleFunction | None = None,
    ) -> None:
        self.objective, self.reference = objective or USUAL(), reference
        of_caller, config = config, self.objective.settle(config)
        check_settings(model, corpus, config, ranks)
        self.model, self.parameters, self.corpus, self.config = model, parameters, corpus, config
        self.ranks, self.progress, self.history = ranks, Progress(), History()
        ranks.wait_at_most(config.rank_timeout)
        metadata = chat_metadata(corpus, model) or parameters.metadata
        parameters.metadata = {**metadata, **self.objective.metadata(model, corpus)}
        self.order = WindowOrder(corpus.train, config, self.objective.steps_a_lesson)
        self.n_steps, self.n_in_last_step = self.order.n_steps, self.order.n_in_last_step
        self.learning_rate = learning_rate_of(
            of_caller if schedule else config, self.n_steps, schedule, lambda: self.history
        )
        self._losses: Losses | None = None

    @property
    def losses(self) -> Losses:
        """The objective, with the graphs of this run."""
        if self._losses is None:
            task = Task(self.model, self.corpus, self.config, self.reference)
            self._losses = Losses(self.objective, self.parameters, task)
            limit_slots(self._losses.passes, self.parameters, self._held_bytes)
        return self._losses

    @property
    def passes(self) -> Passes:
        """The graphs of the run, planned."""
        return self.losses.passes

    @cached_property
    def validation(self) -> ValidationSample | None:
        """What each validation reads; None if nothing is held out."""
        return ValidationSample.of(self.corpus, self.config)

    @property
    def n_threads(self) -> int:
        """Threads to use: those asked for, or this rank's part of all."""
        every = max(threads.most() // self.ranks.n_beside, 1)
        return min(self.config.threads or every, threads.most())

    @property
    def n_first(self) -> int:
        """Steps whose time tells nothing: one may compile, on a device another captures."""
        return 1 + self.model.devices.have_copies

    def reserve(self) -> RunMemory:
        """Build and plan the graphs; returns the bytes that a run will take. Takes none yet."""
        leaves = {leaf for part in self.passes.parts for leaf in part.leaves if is_constant(leaf)}
        trained = {*self.parameters.operands.values()}
        leaves |= {t for t in self.model.parts.weights.values() if t.op is None} - trained
        weights = sum(t.n_bytes for t in leaves)
        return RunMemory(self.passes.n_bytes, self._held_bytes, weights)

    def on_devices(self, cache: Sequence[Tensor] = ()) -> list[OnDevice]:
        """The memory that a run takes of each device but the host. cache: that of a session."""
        return on_devices(self.passes, self.parameters, self._held_bytes, cache)

    @property
    def _held_bytes(self) -> int:
        devices = self.model.devices
        on_card = devices.have_copies and not devices.homes
        return held_bytes(self.parameters, self.config, self.ranks, on_card)

    def free(self) -> None:
        """Free the graphs and their arenas; later steps make them again."""
        self._losses = None
        computed = (w for w in self.model.parts.weights.values() if w.op is not None)
        detach(*Graph.of(*computed).nodes)  # what the model reads of parameters lay in an arena
        heap.give_back()  # the tensors of a graph hold each other
