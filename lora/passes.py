"""The two graphs of a run: loss with its gradients, and loss alone, over the same inputs.

Both are built and planned first, which takes no memory, then bound to one arena of each device that
fits either.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.backends import write
from pyggml.backward import Keep, build_backward, rematerialise, round_large
from pyggml.dtypes import F32, I32
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import Batch
from pyggml.lora.parameters import Parameters
from pyggml.model import Model
from pyggml.models import Inputs, build_loss
from pyggml.runtime import compile_backwards
from pyggml.schedule import Schedule, ScheduledProgram, bind, schedule
from pyggml.tensor import Tensor, zeros


class Passes:
    """Forward and backward over batches of `n_tokens`; gradients are added to the parameters' own.

    n_ctx is the length of a sequence, n_tokens unless it is given.
    fused=False makes whole logits, as needed when the output matrix itself is trained. Raises
    NoGradientError if a parameter cannot be trained.
    """

    def __init__(
        self,
        model: Model,
        parameters: Parameters,
        n_tokens: int,
        fused: bool,
        n_ctx: int | None = None,
        keep: Keep = Keep.COSTLY,
    ) -> None:
        self._inputs = Inputs.empty(n_tokens, n_ctx)
        self._targets = zeros((n_tokens,), I32, "targets")
        self._weights = zeros((n_tokens,), F32, "weights")
        forward, alone = (
            build_loss(
                model.parts,
                self._inputs,
                self._targets,
                self._weights,
                model.adapters,
                gradient=gradient,
                fused=fused,
            )
            for gradient in (True, False)
        )
        graph = build_backward(
            forward,
            list(parameters.tensors.values()),
            accumulators=list(parameters.gradients.values()),
        )
        graph = round_large(graph, model.kept_as)
        graph = rematerialise(graph, keep)
        self._schedules = tuple(schedule(g, model.devices) for g in (graph, alone))
        self._programs: tuple[ScheduledProgram, ...] = ()

    @classmethod
    def of(
        cls, model: Model, parameters: Parameters, config: TrainConfig, ctx: int, fused: bool = True
    ) -> Passes:
        """The graphs that a run with these settings needs, over windows of `ctx` tokens."""
        keep = Keep.LAYERS if config.grad_checkpointing else Keep.COSTLY
        return cls(model, parameters, config.batch * ctx, fused, ctx, keep)

    @property
    def n_bytes(self) -> int:
        """Of the arenas of all devices."""
        used = {b: None for made in self._schedules for b in made.plans}
        return sum(
            max(made.plans[b].n_bytes for made in self._schedules if b in made.plans) for b in used
        )

    @property
    def training(self) -> Schedule:
        """The loss and its gradients, planned."""
        return self._schedules[0]

    @property
    def programs(self) -> tuple[ScheduledProgram, ...]:
        """Training and validation, bound."""
        self.bind()
        return self._programs

    def bind(self) -> None:
        """Take the arenas and bind both graphs to them, once."""
        if not self._programs:
            self._programs = bind(*self._schedules, release=True)

    def compile_backwards(self) -> Iterator[Tensor]:
        """Compile what both graphs need of the host, running nothing; see
        pyggml.runtime.compile_backwards."""
        for p in (p for made in self._schedules for p in made.plans.values()):
            if p.backend.is_host:
                yield from compile_backwards(p)

    def train(self, batch: Batch) -> float:
        """The batch's part of the loss; its gradients have been added."""
        return self._run(0, batch)

    def evaluate(self, batch: Batch) -> float:
        """The batch's part of the loss."""
        return self._run(1, batch)

    def _run(self, which: int, batch: Batch) -> float:
        program = self.programs[which]
        pairs = (
            (self._inputs.tokens, batch.tokens),
            (self._inputs.positions, batch.positions),
            (self._inputs.span, batch.span),
            (self._targets, batch.targets),
            (self._weights, batch.weights),
        )
        for t, values in pairs:
            write(t, values)
        program()
        return float(program.read(program.schedule.graph.outputs[0]))

    def first_not_finite(self) -> str:
        """Run the last batch again and name the first node that gives NaN or infinity."""
        for node, device in self.programs[0].walk():
            if not _is_finite(device.read(node)):
                return repr(node)
        return "no node of the graph"


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype != np.float32 or bool(np.isfinite(values).all())
