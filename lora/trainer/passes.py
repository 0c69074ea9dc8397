"""The graphs of a run: the loss with its gradients, and the loss alone, over the same inputs.

An objective defines the loss. Batches of another length have graphs of their own. All graphs are
built and planned first, without memory. They run one after the other, so each device has one arena
that fits its largest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

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
from pyggml.heap import without_collector
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.data import WindowBatch
from pyggml.lora.objectives import USUAL
from pyggml.lora.objectives.objective import Leaves, LossNet, Objective, TextLeaves
from pyggml.lora.optim import OPTIMISERS, StepsInBackward
from pyggml.lora.trainer.experts import LOAD, BalanceLeaves
from pyggml.lora.trainer.overlap import are_alike, gradient_groups, have_one_chain, n_stages
from pyggml.model import Model
from pyggml.models import Inputs, record
from pyggml.models.batch_rows import BatchRows
from pyggml.ops.arithmetic.dropout import DRAW, draw_words
from pyggml.runtime import Arenas, DevicePart, Program, Schedule, bind, compile_backwards, schedule

_USUAL = USUAL()
Arrays = dict[str, np.ndarray]
Reads = dict[str, Callable[[], np.ndarray]]


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
        leaves_of_graph, rounds = {**trained, **read}, not objective.has_reference
        keeps = None if model.devices.have_copies else parameters.keeps
        graph = training_graph(
            forward, leaves_of_graph, sums, model.kept_as, keep, rounds=rounds, keeps=keeps
        )
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


@dataclass(frozen=True, slots=True, eq=False)
class BoundPair:
    """Both graphs over batches of one length, with memory."""

    pair: _Pair
    training: Program
    alone: Program

    def program(self, alone: bool) -> Program:
        return self.alone if alone else self.training

    def begin_reads(self, alone: bool, i: int | None = None) -> Reads:
        """Begin to read the loss and what is read beside it; i: what a device has of it that runs
        part i as its last one, and may begin another pass then."""
        program = self.program(alone)
        plan = program.schedule
        last = {part.backend: k for k, part in enumerate(plan.parts)}
        outputs = {name: plan.graph[name] for name in ("loss", *self.pair.further)}
        return {
            name: program.begin_read(t)
            for name, t in outputs.items()
            if i is None or last[plan.place(t)[1]] == i
        }


def _inputs(
    n_ctx: int, n_rows: int, causal: bool, noisy: bool, n_tokens: int, draw: Tensor
) -> Inputs:
    """Those of training, with what is drawn anew for each batch. noisy: noise, too."""
    return replace(
        Inputs.empty(n_tokens, n_ctx, causal=causal),
        draw=draw,
        noise=zeros((n_tokens,), F32, "noise") if noisy else None,
        batch=BatchRows((n_tokens // n_rows,) * n_rows),
    )


def _pairs(
    lengths: Iterable[int],
    inputs: Callable[[int, Tensor], Inputs],
    leaves: Callable[[int], Leaves],
    pair: Callable[..., _Pair],
) -> dict[int, _Pair]:
    """Those of batches of these lengths, with leaves of their own."""
    draw = zeros((DRAW,), I32, "draw")
    return {n: pair(drawn=inputs(n, draw), leaves=leaves(n)) for n in lengths}


def _graphs(pairs: Mapping[int, _Pair]) -> list[Graph]:
    return [graph for pair in pairs.values() for graph in (pair.training, pair.alone)]


class Passes:
    """Forward and backward over batches of `n_tokens`; gradients are added to the parameters' own,
    or on the host alone, written over them by the first pass after `StepGradient` begins a batch.

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
    n_passes    of a step: several overlap where the model's blocks lie on several devices

    Raises NoGradientError if a parameter cannot be trained.
    """

    @without_collector()
    def __init__(
        self,
        model: Model,
        parameters: Parameters,
        n_tokens: int,
        n_ctx: int | None = None,
        keep: Keep = Keep.COSTLY,
        objective: Objective = _USUAL,
        leaves: Callable[[int], Leaves] = TextLeaves.empty,
        further: Sequence[Graph] = (),
        noise: float = 0.0,
        shorter: Sequence[int] = (),
        factor: float = 0.0,
        n_rows: int = 1,
        beside: int = 0,
        steps: StepsInBackward | None = None,
        n_passes: int = 1,
    ) -> None:
        self.steps = steps
        self._keeps = parameters.keeps
        self._model, self._noise = model, noise / sqrt(model.config.n_embd)
        self._traces, self._next = model.traces, (0, 0)
        inputs = partial(_inputs, n_ctx or n_tokens, n_rows, model.config.causal, bool(noise))
        settings: dict[str, Any] = {"keep": keep, "objective": objective, "factor": factor}
        pair = partial(_Pair.of, model, parameters, steps=steps, **settings)
        pairs = partial(_pairs, (n_tokens, *shorter), inputs, leaves, pair)
        self._pairs = pairs()
        checked = {p.training["loss"]: steps.check_loss for p in self._pairs.values() if steps}
        self._schedules = tuple(
            schedule(g, model.devices, {t: c for t, c in checked.items() if t in g.outputs})
            for g in (*_graphs(self._pairs), *further)
        )
        self._programs: tuple[Program, ...] = ()
        self._host, self._beside = model.devices.host, beside
        self.groups = gradient_groups(self._trainings, parameters.buffers["gradient"])
        self._plan_overlap(pairs, n_passes)
        self._last: Program | None = None  # of the last batch
        self.outputs: Mapping[str, np.ndarray] = {}  # of the last batch, beside the loss

    def _plan_overlap(self, pairs: Callable[[], dict[int, _Pair]], n_passes: int) -> None:
        """Plan the graphs of further passes that can be under way at once."""
        self._further: list[tuple[dict[int, _Pair], list[Schedule]]] = []
        self._why = ""  # no more of them overlap
        self.slots: list[dict[int, BoundPair]] = []  # of each of them, by length, once bound
        alone = self._schedules[1 : 2 * len(self._pairs) : 2]
        is_clear = all(map(have_one_chain, (self._trainings, alone)))
        if not self.groups or self._traces or not is_clear:
            return
        for _ in range(min(n_passes, n_stages(self.training)) - 1):
            another = pairs()
            schedules = [schedule(g, self._model.devices) for g in _graphs(another)]
            if not all(map(are_alike, schedules, self._schedules)):
                self._why = "free memory has changed, by which devices choose what they keep"
                return
            self._further.append((another, schedules))

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
        further: Sequence[Graph] = (),
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
                model, parameters, n_tokens, ctx, keep, objective, leaves, further, noise, shorter,
                factor=config.router_aux_loss_coef, n_rows=config.batch, beside=beside,
                steps=steps, n_passes=config.grad_accum,
            )  # fmt: skip

    @property
    def n_bytes(self) -> int:
        """Bytes of the arenas of all devices."""
        most = {b: self.arena_bytes(b) for b in self.plans}
        return sum((most | {self._host: max(most.get(self._host, 0), self._beside)}).values())

    @property
    def n_slots(self) -> int:
        """Passes that are under way at once, at most."""
        return 1 + len(self._further)

    def limit_slots(self, n: int, why: str = "") -> None:
        """Have no more than n passes under way at once; why: a clause."""
        del self._further[n - 1 :]
        self._why = why

    @property
    def overlap(self) -> str | None:
        """How many passes of a step overlap, in words; None where none could."""
        if self.n_slots == 1 and not self._why:
            return None
        n = f"up to {self.n_slots}" if self.n_slots > 1 else "no"
        return "; ".join(filter(None, (f"{n} passes of a step overlap", self._why)))

    def arena_bytes(self, backend: Backend) -> int:
        """Bytes of a device's arenas: one, or one for each pass under way that it comes back to."""
        most = max(p.n_bytes for p in self.plans[backend])
        return most if backend in self._devices_of_one_arena else most * self.n_slots

    @property
    def _trainings(self) -> Sequence[Schedule]:
        """Those of all lengths."""
        return self._schedules[: 2 * len(self._pairs) : 2]

    @property
    def _devices_of_one_arena(self) -> set[Backend]:
        """Devices on which a pass is one part, so that passes under way can share an arena."""
        n_parts = Counter(part.backend for part in self.training.parts)
        return {b for b in self.plans if n_parts[b] <= 1}

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
            self.slots = [_bound(self._pairs, self._programs)]
            for pairs, schedules in self._further:
                arenas = self._arenas.beside(self._devices_of_one_arena)
                for backend, plans in self.plans.items():
                    arenas.of(backend, max(p.n_bytes for p in plans))
                self.slots.append(_bound(pairs, [bind(s, release, arenas) for s in schedules]))

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
        return self.begin(batch, alone=False)()

    def evaluate(self, batch: WindowBatch) -> float:
        """The batch's part of the loss."""
        return self.begin(batch, alone=True)()

    def begin(self, batch: WindowBatch, alone: bool) -> Callable[[], float]:
        """Begin to train on a batch, or to evaluate it; what waits for its part of the loss, which
        is called before the next one begins."""
        self.bind()
        bound = self.slots[0][len(batch.tokens)]
        self.give(batch, bound, alone)
        program = bound.program(alone)
        program()
        if not alone:
            write(self._keeps, 1.0)
        if self.steps and not alone:
            self.steps.end(program)
        reads = bound.begin_reads(alone)

        def end() -> float:
            read = {name: read() for name, read in reads.items()}
            loss = float(read.pop("loss"))
            self.outputs = read
            record(self._traces, *bound.pair.read_traces(program, alone), validation=alone)
            return loss

        return end

    def give(self, batch: WindowBatch, bound: BoundPair, alone: bool) -> None:
        """Give a batch to graphs that are to run next."""
        if not alone:
            self._write_random(bound.pair.inputs, batch)
            self._last = bound.training
        bound.pair.write(batch)

    def _write_random(self, inputs: Inputs, batch: WindowBatch) -> None:
        """What dropout and noise draw for this batch."""
        seed, number = self._next
        self._next = (seed, number + 1)
        if inputs.draw is not None:
            write(inputs.draw, draw_words(seed, number))
        if inputs.noise is not None:
            write(inputs.noise, self._noise / np.sqrt(_document_lengths(batch.span)))

    def first_not_finite(self) -> str | None:
        """Run the last batch again; the first node that gives NaN or infinity, if one does."""
        for node, device in (self._last or self.programs[0]).walk():
            if not all(_is_finite(device.read(t)) for t in (node, *node.saved)):
                return repr(node)
        return None


def _bound(pairs: Mapping[int, _Pair], programs: Sequence[Program]) -> dict[int, BoundPair]:
    """programs: of each pair training and the loss alone."""
    both = zip(pairs.items(), programs[::2], programs[1::2], strict=False)
    return {n: BoundPair(pair, training, alone) for (n, pair), training, alone in both}


def _document_lengths(span: np.ndarray) -> np.ndarray:
    """(T,): tokens of each token's document, which all see its first one."""
    _, document, lengths = np.unique(span[:, 0], return_inverse=True, return_counts=True)
    return np.asarray(lengths[document])


def _is_finite(values: np.ndarray) -> bool:
    return values.dtype != np.float32 or bool(np.isfinite(values).all())
