"""A limit of memory → the batch, checkpointing and window length that stay below it.

Only plans are compared, nothing runs: the planner knows the size of an arena before it is taken.
They are those of the graphs that the run will have, with its objective and its data.
Candidates in their order, each with the largest batch that fits:

1. everything kept
2. layers computed again: the same gradients in more time
3. both again with windows half as long, down to SHORTEST, if the length is free

A step keeps its number of windows, so a smaller batch means more passes a step.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from pyggml.errors import DataError
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.trainer.memory import held_bytes, largest_mapped
from pyggml.lora.trainer.passes import Passes
from pyggml.model import Model

SHORTEST = 32  # tokens of a window, below which nothing is worth learning
Planner = Callable[[TrainConfig, int], Passes]  # settings, tokens of a window -> a run's graphs


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings, and the bytes of a run with them.

    The bytes are the arena's, the parameters' with gradients and moments, and those of the largest
    weight that stays in the file, whose pages are mapped while it is read.
    """

    config: TrainConfig
    ctx: int
    arena: int
    parameters: int
    largest_weight: int

    @property
    def n_bytes(self) -> int:
        return self.arena + self.parameters + self.largest_weight


def fit(
    model: Model,
    parameters: Parameters,
    config: TrainConfig,
    ctx: int,
    limit: int,
    fixed: Collection[str] = (),
    planner: Planner | None = None,
) -> tuple[Fit, bool]:
    """Settings with which a run takes at most `limit` bytes, and True. If there are none, those
    with which it takes the least, and False.

    fixed     settings of "ctx", "batch", "grad_accum", "grad_checkpointing" that must not change.
              If batch and grad_accum are both among them, neither changes; else their product stays
    planner   plans the graphs of a run; None: those of next-token training on full windows. It
              raises DataError for windows that are too short for the data, which are left out
    """
    plan = planner or (lambda each, n: Passes.of(model, parameters, each, n))
    largest = largest_mapped(model)
    least: Fit | None = None
    for each, n in _candidates(config, ctx, fixed):
        try:
            arena = plan(each, n).n_bytes
        except DataError:
            if n == ctx:
                raise
            continue
        candidate = Fit(each, n, arena, held_bytes(parameters, each), largest)
        if candidate.n_bytes <= limit:
            return candidate, True
        if least is None or candidate.n_bytes < least.n_bytes:
            least = candidate
    assert least is not None
    return least, False


def _candidates(
    config: TrainConfig, ctx: int, fixed: Collection[str]
) -> Iterator[tuple[TrainConfig, int]]:
    """Settings and window lengths, in the order of trial."""
    whole = config.windows_per_step
    split = not ({"batch", "grad_accum"} <= set(fixed) or config.step_in_backward)
    batches = [b for b in range(config.batch, 0, -1) if whole % b == 0] if split else [config.batch]
    again = [config.grad_checkpointing]
    if "grad_checkpointing" not in fixed and not config.grad_checkpointing:
        again.append(True)
    lengths = [ctx]
    while "ctx" not in fixed and lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    for n in lengths:
        for checkpointing in again:
            for batch in batches:
                n_passes = whole // batch
                c = replace(config, batch=batch, grad_accum=n_passes)
                yield replace(c, grad_checkpointing=checkpointing), n
