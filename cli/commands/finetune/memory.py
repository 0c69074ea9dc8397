"""The memory of a run by part, and settings that stay below `--max-memory`."""

from dataclasses import dataclass, replace
from typing import Any

from pyggml.backends.cpu.pages import have_room_locked
from pyggml.cli import compile_ahead
from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.commands.finetune.results import Trained
from pyggml.cli.terminal.placing import choose
from pyggml.cli.terminal.samples import N_TOKENS
from pyggml.cli.terminal.show import row, size
from pyggml.errors import ConfigError
from pyggml.generation import Session
from pyggml.lora import Fit, Trainer, fit
from pyggml.lora.ranks import Ranks
from pyggml.lora.trainer.fit import Planner
from pyggml.lora.trainer.memory import OnDevice, held_bytes, largest_mapped, limit_slots
from pyggml.lora.trainer.memory import on_devices as on_each
from pyggml.lora.trainer.passes import Passes
from pyggml.model import Model
from pyggml.models.streaming import block_bytes

# What a process gets besides what is planned: kernels, a call of each node, and in a first run of
# its kind the compiler. Runs of models of 3 to 28 blocks took 6.0 to 8.7 MB, and 265 to 270 MB
# more with nothing compiled (benchmarks/compile_memory.py), on a Xeon with AMX.
RUNNING, OF_NODE, COMPILING = 6 * 10**6, 600, 270 * 10**6
MARGIN = 12 * 10**6  # of a limit: for other models and options
LANGUAGES = 114 * 10**6  # while the table is unpacked by which languages are told: 107 to 120 MB
_CHOSEN = ("ctx", "batch", "grad_accum", "grad_checkpointing")


def resident() -> int:
    """The bytes of this process now, pages of files included."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def file_bytes() -> int:
    """The bytes of files, such as libraries, among them; 0 where the system does not tell."""
    import psutil

    return int(getattr(psutil.Process().memory_info(), "shared", 0))


@dataclass(frozen=True, slots=True)
class RunBytes:
    """The bytes of a run at its peak, by part."""

    process: int  # interpreter, text, trained parameters; kernels and what they need to compile
    arena: int
    scratch: int  # of the arena at most, that kernels work in: the more threads, the more
    state: int  # gradients, moments, a copy of parameters that the arena has no room for; the cache
    # of answers on the way; what devices park with the host
    after: int  # at the end, when arena and state are free
    libraries: int  # pages of files
    weights: int  # of the largest one, which stay while it is read

    @property
    def own(self) -> int:
        """Without pages of files, which the system takes back when memory is short."""
        return self.process + max(self.arena + self.state, self.after)

    @property
    def files(self) -> int:
        return self.libraries + self.weights


def spare(passes: Passes, model: Model) -> int:
    """Bytes beside the plan: what compiling takes grows evenly with the kernels that no earlier run
    has compiled."""
    graph = passes.training.graph
    share = compile_ahead.share_to_compile(graph, model.backend.compute)
    return RUNNING + OF_NODE * len(graph.nodes) + round(share * COMPILING)


def parts(trainer: Trainer, n_prompt: int, job: Job) -> RunBytes:
    """The parts of a planned run that has taken no memory yet."""
    reserved, model = trainer.reserve(), trainer.model
    elsewhere = sum(device.arena for device in trainer.on_devices())
    files, p = file_bytes(), trainer.parameters
    process = resident() - files + spare(trainer.passes, model)
    arena = max(reserved.arena - elsewhere, 0)
    copied = arena < p.gradient.nbytes and not trainer.config.step_in_backward
    state = reserved.parameters - p.trained_bytes + copied * p.gradient.nbytes
    cache = _cache(model, n_prompt)
    state += (cache if job.answer_every else 0) + trainer.passes.training.n_parked
    plans = (p for b, own in trainer.passes.plans.items() if b.is_host for p in own)
    scratch = max((n for p in plans for n in p.n_scratch.values()), default=0)  # of a node
    after = max(cache, LANGUAGES)
    return RunBytes(process, arena, scratch, state, after, files, largest_mapped(model))


def on_devices(trainer: Trainer, n_prompt: int) -> list[OnDevice]:
    """The parts of the same run on devices that are not the host."""
    return trainer.on_devices(_session(trainer.model, n_prompt).cache)


def place(job: Job, trained: Trained, n_prompt: int, planner: Planner, ranks: Ranks) -> None:
    """Give the devices as many blocks as their memory holds in training, for --gpu-layers auto."""
    model, p = trained.model, trained.parameters
    if job.gpu_layers != "auto" or model.placement is None:
        return
    cache, held = _session(model, n_prompt).cache, held_bytes(p, job.train, ranks)

    def lack() -> str | None:
        passes = planner(job.train, job.reading.ctx)
        limit_slots(passes, p, held)
        return next(filter(None, (d.lacks for d in on_each(passes, p, held, cache))), None)

    model.place_what_fits(lack, job.split or ())


def stream(job: Job, trainer: Trainer, n_prompt: int) -> None:
    """Have as few weights stream as a planned run requires, if that is left open; and if all do,
    as few results wait with the host."""
    model, is_open = trainer.model, job.stream_weights in (None, "auto")
    if not block_bytes(model.parts.weights):  # as where all of them are trained
        model.stream(model.config.n_layer if job.stream_weights == "on" else 0)
        return
    is_one = model.placement is None and (is_open or model.streaming is not None)
    devices = on_devices(trainer, n_prompt) if is_one else []
    lack = next((d.lacks for d in devices if d.lacks and d.backend.streamed is not None), None)
    if lack is None:
        return

    def left() -> int:
        trainer.free()  # so that it is planned again
        device = on_devices(trainer, n_prompt)[0]
        return (device.backend.memory() or (0, 0))[0] - device.n_bytes

    def lack_of_run() -> str | None:
        trainer.free()
        return next((d.lacks for d in on_devices(trainer, n_prompt) if d.lacks), None)

    if is_open:
        model.stream_for(lack, left)
        choose(model, job.train.batch * job.reading.ctx, lack_of_run, n_ways=2)
        if model.streaming is None:
            return
    n_before = -1
    while (missing := -left()) > 0 and (n := trainer.passes.training.n_parked) > n_before:
        n_before, model.devices.parked = n, n + missing
    if not have_room_locked(model.devices.parked):
        model.devices.parked = 0  # then the device lacks memory, which is said
        trainer.free()


def expect_alike(model: Model, ranks: Ranks) -> None:
    """ConfigError if some ranks leave more layers to the CPU than others, as for want of memory:
    what a pass gives would depend on the rank that computes it."""
    n_all = model.config.n_layer + 1
    everywhere = [model.devices.backends[0]] * n_all
    homes = model.placement.homes.values() if model.placement else everywhere
    told = [*map(int, ranks.texts(str(sum(b.is_host for b in homes))))]
    least, most = (told.index(pick(told)) for pick in (min, max))
    if told[least] < told[most]:
        raise ConfigError(
            f"rank {most} leaves {told[most]} of {n_all} layers to the CPU, rank {least} "
            f"{told[least] or 'none'}: the run would depend on which of them computes a pass; "
            "wanted devices with as much memory free, or --stream-weights on"
        )


def _cache(model: Model, n_prompt: int) -> int:
    return _session(model, n_prompt).n_bytes


def _session(model: Model, n_prompt: int) -> Session:
    return Session(model, min(n_prompt + N_TOKENS, model.config.n_ctx))


def within(job: Job, trained: Trained, n_prompt: int, planner: Planner) -> Job:
    """The job with settings below its memory limit, if it has one; prints the changes.

    planner: the graphs of the run with other settings, see `fit`

    Raises ConfigError, naming the memory that would do, if no settings fit.
    """
    if job.max_memory is None:
        return job
    model, p = trained.model, trained.parameters
    model.tokenizer.rest()
    # The trained numbers are there already; a fit counts them for a copy, see `RunBytes.state`,
    # which steps in the backward pass do without.
    beside = resident() + spare(planner(job.train, job.reading.ctx), model) + MARGIN
    beside += largest_mapped(model)
    beside -= p.trained_bytes * job.train.step_in_backward
    left = job.max_memory - beside - _cache(model, n_prompt)
    best, fits = fit(model, p, job.train, job.reading.ctx, left, job.fixed, planner)
    if not fits:
        free, would = fit(model, p, job.train, job.reading.ctx, left, (), planner)
        raise ConfigError(_refusal(job.max_memory, left, best, free, would))
    settled = replace(job, train=best.config, reading=replace(job.reading, ctx=best.ctx))
    base = job.max_memory - left
    text = f"{size(job.max_memory)}: {_as_options(best)} takes {size(base + best.n_bytes)}"
    row("limit", text + _instead(job, settled, base, planner, trained))
    return settled


def _instead(job: Job, settled: Job, base: int, planner: Planner, trained: Trained) -> str:
    """The settings that were given, where a limit changed them, and what they would take.

    base: the bytes beside those of a fit
    """
    if memory_settings(job) == memory_settings(settled):
        return ", as given"
    given, _ = fit(
        trained.model, trained.parameters, job.train, job.reading.ctx, 0, _CHOSEN, planner
    )
    return f"; {_as_options(given)}, as given, would take {size(base + given.n_bytes)}"


def memory_settings(job: Job) -> dict[str, Any]:
    """The settings that a limit may change, by parameter."""
    values = {"ctx": job.reading.ctx}
    return values | {name: getattr(job.train, name) for name in _CHOSEN if name != "ctx"}


def _as_options(fit: Fit) -> str:
    c = fit.config
    words = f"--ctx {fit.ctx} --batch {c.batch} --grad-accum {c.grad_accum}"
    return words + " --grad-checkpointing" * c.grad_checkpointing


def _refusal(limit: int, left: int, least: Fit, free: Fit, fits: bool) -> str:
    """least: with what is given; free: the best without, and whether it fits."""
    base = limit - left
    text = (
        f"--max-memory {size(limit)} is too little: {_as_options(least)} takes "
        f"{size(base + least.n_bytes)}, the least that the given settings can take"
    )
    if fits:
        return f"{text}; {_as_options(free)} would take {size(base + free.n_bytes)}"
    if free.n_bytes < least.n_bytes:
        return f"{text}; the least of all is {size(base + free.n_bytes)}, with {_as_options(free)}"
    return text
