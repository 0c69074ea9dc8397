"""The memory of a run by part, and settings that stay below `--max-memory`."""

from dataclasses import dataclass, replace
from typing import Any

from pyggml.cli import compile_ahead
from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.commands.finetune.results import Trained
from pyggml.cli.terminal.samples import N_TOKENS
from pyggml.cli.terminal.show import row, size
from pyggml.errors import ConfigError
from pyggml.generation import Session
from pyggml.lora import Fit, Trainer, fit
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.trainer.fit import Planner
from pyggml.lora.trainer.memory import OnDevice
from pyggml.lora.trainer.passes import Passes
from pyggml.model import Model

# What a process gets besides what is planned: kernels, and in a first run of its kind the compiler.
# Runs took 65 MB, and 190 MB (plain LoRA) to 270 MB (DoRA) more with nothing compiled, as
# benchmarks/compile_memory.py measures; the rest is for other models and options.
RUNNING, COMPILING = 100 * 10**6, 440 * 10**6
_CHOSEN = ("ctx", "batch", "grad_accum", "grad_checkpointing")


def resident() -> int:
    """The bytes of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True, slots=True)
class Parts:
    """The bytes of a run at its peak, by part."""

    process: int  # interpreter, libraries, text; kernels and what they need to compile and run
    arena: int
    parameters: int  # with gradients and moments, and a copy over a step that is measured
    weights: int  # pages of the largest one, which stay while it is read
    cache: int  # of the answers

    @property
    def peak(self) -> int:
        return self.process + self.arena + self.parameters + self.weights + self.cache


def spare(passes: Passes, model: Model) -> int:
    """Bytes beside the plan: less if an earlier run has compiled the kernels of these graphs."""
    compiled = compile_ahead.is_compiled(passes.training.graph, model.backend.compute)
    return RUNNING if compiled else COMPILING


def parts(trainer: Trainer, n_prompt: int) -> Parts:
    """The parts of a planned run that has taken no memory yet."""
    reserved, model = trainer.reserve(), trainer.model
    elsewhere = sum(device.arena for device in trainer.on_devices())
    largest = max(t.n_bytes for t in model.parts.weights.values())
    cache, process = _cache(model, n_prompt), resident() + spare(trainer.passes, model)
    parameters = reserved.parameters + _copy_bytes(trainer.parameters)
    return Parts(process, max(reserved.arena - elsewhere, 0), parameters, largest, cache)


def on_devices(trainer: Trainer, n_prompt: int) -> list[OnDevice]:
    """The parts of the same run on devices that are not the host."""
    return trainer.on_devices(_cache(trainer.model, n_prompt))


def _copy_bytes(parameters: Parameters) -> int:
    """What the record of gradients keeps over a step: the parameters before it."""
    return parameters.data.nbytes


def _cache(model: Model, n_prompt: int) -> int:
    return Session(model, min(n_prompt + N_TOKENS, model.config.n_ctx)).n_bytes


def within(job: Job, trained: Trained, n_prompt: int, planner: Planner) -> Job:
    """The job with settings below its memory limit, if it has one; prints the changes.

    planner: the graphs of the run with other settings, see `fit`

    Raises ConfigError, naming the memory that would do, if no settings fit.
    """
    if job.max_memory is None:
        return job
    model, p = trained.model, trained.parameters
    beside = resident() + spare(planner(job.train, job.reading.ctx), model) + _copy_bytes(p)
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
    args = (trained.model, trained.parameters, job.train, job.reading.ctx)
    given, _ = fit(*args, 0, _CHOSEN, planner)
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
