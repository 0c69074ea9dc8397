"""The graphs of a run: the loss with its gradients, and the loss alone, over the same inputs.

An objective defines the loss. Batches of another length have graphs of their own. All graphs are
built and planned first, without memory. They run one after the other, so each device has one arena
that fits its largest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from pyggml.alloc import Plan
from pyggml.backends import Backend
from pyggml.backends.cpu import pages
from pyggml.backward import Keep, training_graph
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor, put_together, zeros
from pyggml.graph.verify import verifies, verifying
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import WindowBatch
from pyggml.lora.objectives import USUAL
from pyggml.lora.objectives.objective import Leaves, LossNet, Objective, TextLeaves
from pyggml.lora.optim import OPTIMISERS, StepsInBackward
from pyggml.lora.trainer.experts import LOAD, BalanceLeaves
from pyggml.model import Model
from pyggml.models import Inputs, record
from pyggml.models.batch_rows import BatchRows
from pyggml.ops.arithmetic.dropout import DRAW, draw_words
from pyggml.runtime import Arenas, DevicePart, Program, Schedule, bind, compile_backwards, schedule

_USUAL = USUAL()
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both graphs over batches of one length: training and the loss alone; and their leaves.

    further       names of what is read of each batch beside the loss
    activations   names of those that a trace reads
    """

    inputs: Inputs
    leaves: Leaves
    balance: BalanceLeaves
    training: Graph
    alone: Graph
    further: tuple[str, ...]
    activations: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: Model,
        parameters: Parameters,
        drawn: Inputs,
        keep: Keep,
        objective: Objective,
        leaves: Leaves,
        factor: float,
        steps: StepsInBackward | None,
    ) -> _Pair:
        """drawn: the inputs of training, with what is drawn anew for each batch. factor: of the
        balance loss in training. steps: taken within its backward pass."""
        put_together(drawn.tokens, drawn.positions, drawn.span, drawn.length)
        trained, inputs = parameters.operands, replace(drawn, draw=None, noise=None)
        taps, balance = model.taps(), BalanceLeaves.empty(drawn.tokens.shape[0])
        # With halves memory is short: the loss is fused, and makes logits again for W's gradient,
        # for which the host alone has a kernel.
        is_short = parameters.has_halves and not model.devices.have_copies
        separate = () if is_short else trained
        net = LossNet.of(model, drawn, separate, True, taps)
        forward, further = _forward(net, objective, leaves, balance, factor)
        read = taps.read if taps else {}
        sums = [None if steps else g for g in parameters.gradients.values()]
        sums += [None for _ in read]
        wanted, rounds = {**trained, **read}, not objective.has_reference
        graph = training_graph(forward, wanted, sums, model.kept_as, keep, rounds=rounds)
        graph = steps.within(graph) if steps else graph
        net = LossNet.of(model, inputs, separate, False, model.taps())
        alone, _ = _forward(net, objective, leaves, balance, 0.0)
        return cls(drawn, leaves, balance, graph, alone, further, tuple(read))

    def write(self, batch: WindowBatch) -> None:
        """Give a batch to both graphs."""
        batch.fill(self.inputs)
        self.leaves.write(batch)
        if LOAD in self.further:
            self.balance.write(batch)

    def read_traces(self, program: Program, alone: bool) -> tuple[Arrays, Arrays]:
        """A batch's activations that a trace reads, and their gradients, none of the loss alone."""
        graph, names = program.schedule.graph, self.activations
        return (
            {name: program.read(graph[name]) for name in names},
            {} if alone else {name: program.read(graph[f"grad:{name}"]) for name in names},
        )


def _forward(
    net: LossNet, objective: Objective, leaves: Leaves, balance: BalanceLeaves, factor: float
) -> tuple[Graph, tuple[str, ...]]:
    """The loss, what is read beside it, and the activations that taps read; the names of what is
    read. factor: of the balance loss."""
    outputs = dict(objective.loss(net, leaves))
    outputs |= balance.outputs(net.net, outputs["loss"], factor)
    outputs = {name: t.named(name) for name, t in outputs.items()}
    return net.net.graph(**outputs), tuple(name for name in outputs if name != "loss")


class Passes:
    """Forward and backward over batches of `n_tokens`; gradients are added to the parameters' own.

    n_ctx       length of a sequence, n_tokens unless it is given
    shorter     further lengths of a batch, each with graphs of its own
    objective   what defines the loss
    leaves      a batch's number of tokens -> the objective's leaves
    noise       α of NEFTune: training adds at most α/√(L·d) to each number of an embedding; L
                tokens in its document, d numbers in an embedding
    others      further graphs that run in the same memory: `other_programs`
    factor      of the balance loss that a mixture of experts is trained with
    n_rows      windows in a batch
    beside      bytes of the host's arena at least: of what runs in it between two passes
    steps       of an optimiser, taken within the backward pass

    Raises NoGradientError if a parameter cannot be trained.
    """

    def __init__(
        self,
        model: Model,
        parameters: Parameters,
        n_tokens: int,
        n_ctx: int | None = None,
        keep: Keep = Keep.COSTLY,
        objective: Objective = _USUAL,
        leaves: Callable[[int], Leaves] = TextLeaves.empty,
        others: Sequence[Graph] = (),
        noise: float = 0.0,
        shorter: Sequence[int] = (),
        factor: float = 0.0,
        n_rows: int = 1,
        beside: int = 0,
        steps: StepsInBackward | None = None,
    ) -> None:
        self.steps = steps
        self._model, self._noise = model, noise / sqrt(model.config.n_embd)
        self._traces = model.traces
        self._draw, self._next = zeros((DRAW,), I32, "draw"), (0, 0)
        self._pairs: dict[int, _Pair] = {}
        for n in (n_tokens, *shorter):
            size = zeros((n,), F32, "noise") if noise else None
            inputs = Inputs.empty(n, n_ctx or n_tokens, causal=model.config.causal)
            rows = BatchRows((n // n_rows,) * n_rows)
            drawn = replace(inputs, draw=self._draw, noise=size, batch=rows)
            self._pairs[n] = _Pair.of(
                model, parameters, drawn, keep, objective, leaves(n), factor, steps
            )
        graphs = [g for pair in self._pairs.values() for g in (pair.training, pair.alone)]
        checked = {p.training["loss"]: steps.check_loss for p in self._pairs.values() if steps}
        self._schedules = tuple(
            schedule(g, model.devices, {t: c for t, c in checked.items() if t in g.outputs})
            for g in (*graphs, *others)
        )
        self._programs: tuple[Program, ...] = ()
        self._host, self._beside = model.devices.host, beside
        self._last = 0  # program of the last batch
        self.outputs: Mapping[str, np.ndarray] = {}  # of the last batch, beside the loss

    @classmethod
    def of(
        cls,
        model: Model,
        parameters: Parameters,
        config: TrainConfig,
        ctx: int,
        lengths: Sequence[int] = (),
        objective: Objective = _USUAL,
        leaves: Callable[[int], Leaves] = TextLeaves.empty,
        others: Sequence[Graph] = (),
        beside: int = 0,
    ) -> Passes:
        """The graphs of a run with these settings, over windows of `ctx` tokens.

        lengths: those in which windows are computed, if not whole; ascending
        """
        keep = Keep.LAYERS if config.grad_checkpointing else Keep.COSTLY
        *shorter, n_tokens = [config.batch * n for n in lengths or (ctx,)]
        noise, steps = config.neftune_alpha, None
        if config.step_in_backward:
            optimiser = OPTIMISERS[config.optimiser](parameters, config, model.devices)
            steps = StepsInBackward(optimiser)
        for backend in model.devices.backends:
            backend.copies_from = config.weight_copies
        with verifying(verifies() or config.verify_graphs):
            return cls(
                model, parameters, n_tokens, ctx, keep, objective, leaves, others, noise, shorter,
                factor=config.router_aux_loss_coef, n_rows=config.batch, beside=beside,
                steps=steps,
            )  # fmt: skip

    @property
    def n_bytes(self) -> int:
        """Bytes of the arenas of all devices."""
        most = {b: max(p.n_bytes for p in plans) for b, plans in self.plans.items()}
        return sum((most | {self._host: max(most.get(self._host, 0), self._beside)}).values())

    @property
    def plans(self) -> dict[Backend, list[Plan]]:
        """Each device's plans of its part of the graphs; one arena fits them all."""
        plans: dict[Backend, list[Plan]] = {}
        for each in self._schedules:
            for backend, plan in each.plans.items():
                plans.setdefault(backend, []).append(plan)
        return plans

    @property
    def parts(self) -> list[DevicePart]:
        """All parts of the graphs, each of one device."""
        return [part for each in self._schedules for part in each.parts]

    @property
    def training(self) -> Schedule:
        """The loss and its gradients, planned."""
        return self._schedules[0]

    @property
    def load_shape(self) -> tuple[int, int]:
        """(layers, experts) of the routers whose load is an output; (0, 0) without any."""
        pair = next(iter(self._pairs.values()))
        if LOAD not in pair.further:
            return 0, 0
        n_layers, n_expert = pair.alone[LOAD].shape
        return n_layers, n_expert

    @property
    def programs(self) -> tuple[Program, ...]:
        """Training and validation, bound: for batches of n_tokens, then for each shorter length."""
        self.bind()
        return self._programs[: 2 * len(self._pairs)]

    @property
    def other_programs(self) -> tuple[Program, ...]:
        """The others, bound."""
        self.bind()
        return self._programs[2 * len(self._pairs) :]

    def idle_memory(self, n: int) -> np.ndarray:
        """(n,) float32 with undefined content, until the next pass: in the host's arena, which is
        idle between two passes, or if that is smaller, anew."""
        arenas = (a for program in self.programs for b, a in program.arenas.items() if b.is_host)
        arena = next((a for a in arenas if a.nbytes >= F32.block_bytes * n), None)
        if arena is None:
            return np.empty(n, np.float32)
        numbers: np.ndarray = arena[: F32.block_bytes * n].view(np.float32)
        return numbers

    def bind(self) -> None:
        """Take the arenas and bind all graphs to them, once."""
        if not self._programs:
            self._arenas = Arenas(*self._schedules)
            if self._beside:
                self._arenas.of(self._host, self._beside)
            weights = sum(w.n_bytes for w in self._model.parts.weights.values())
            release = self._model.release or pages.are_scarce(weights)
            self._programs = tuple(bind(s, release, self._arenas) for s in self._schedules)

    @property
    def arenas(self) -> Arenas:
        """Their memory, which is idle between two passes."""
        self.bind()
        return self._arenas

    def compile_backwards(self) -> Iterator[Tensor]:
        """Compile what the graphs need of the host, running nothing; see
        pyggml.runtime.compile_backwards."""
        for each in self._schedules:
            yield from compile_backwards(each)

    def draw(self, seed: int, number: int) -> None:
        """Seed dropout and noise: the next batch uses this seed and number, each later one the next
        number."""
        self._next = (seed, number)

    def train(self, batch: WindowBatch) -> float:
        """Add a batch's gradients; returns its part of the loss."""
        seed, number = self._next
        write(self._draw, draw_words(seed, number))
        self._next = (seed, number + 1)
        noise = self._pairs[len(batch.tokens)].inputs.noise
        if noise is not None:
            write(noise, self._noise / np.sqrt(_document_lengths(batch.span)))
        return self._run(batch, alone=False)

    def evaluate(self, batch: WindowBatch) -> float:
        """The batch's part of the loss."""
        return self._run(batch, alone=True)

    def _run(self, batch: WindowBatch, alone: bool) -> float:
        n = len(batch.tokens)
        pair, which = self._pairs[n], 2 * list(self._pairs).index(n)
        program, self._last = self.programs[which + alone], which
        pair.write(batch)
        program()
        if self.steps and not alone:
            self.steps.end(program)
        graph = program.schedule.graph
        loss, *others = (program.begin_read(graph[name]) for name in ("loss", *pair.further))
        self.outputs = {name: read() for name, read in zip(pair.further, others, strict=True)}
        record(self._traces, *pair.read_traces(program, alone), validation=alone)
        return float(loss())

    def first_not_finite(self) -> str | None:
        """Run the last batch again; the first node that gives NaN or infinity, if one does."""
        for node, device in self.programs[self._last].walk():
            if not all(_is_finite(device.read(t)) for t in (node, *node.saved)):
                return repr(node)
        return None


def _document_lengths(span: np.ndarray) -> np.ndarray:
    """(T,): tokens of each token's document, which all see its first one."""
    _, document, lengths = np.unique(span[:, 0], return_inverse=True, return_counts=True)
    return np.asarray(lengths[document])


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype != np.float32 or bool(np.isfinite(values).all())
