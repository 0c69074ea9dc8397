"""Passes that overlap: while a device computes its part of one, others compute theirs of the next.

Each pass under way has leaves of its own, and memory of its own on devices that it comes back to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pyggml.backends import Backend
from pyggml.graph.tensor import Shape, Tensor
from pyggml.lora.data import WindowBatch
from pyggml.runtime import Schedule
from pyggml.runtime.pipeline import in_turns

if TYPE_CHECKING:
    from pyggml.lora.trainer.passes import Passes

# Called with the number of a batch, and which part of it is next; None: all of it.
Before = Callable[[int, int | None], None]


def n_stages(training: Schedule) -> int:
    """How many parts of devices a pass goes through until it turns: as many passes can be under
    way before the first one must end."""
    return (len(training.parts) + 1) // 2


def gradient_groups(
    trainings: Sequence[Schedule], gradients: Sequence[Tensor]
) -> list[list[Tensor]]:
    """The gradients that each part of a pass makes; none if passes of several lengths differ in
    that, or if a gradient is not made in one part."""
    groups, *same = (
        [[g for g in gradients if g in part.changed] for part in each.parts] for each in trainings
    )
    every = [g for group in groups for g in group]
    is_clear = all(other == groups for other in same) and {*every} == {*gradients}
    return groups if is_clear and len(every) == len(gradients) else []


def have_one_chain(plans: Sequence[Schedule]) -> bool:
    """Whether passes of all lengths go through the same devices in the same order."""
    return len({tuple(part.backend for part in plan.parts) for plan in plans}) == 1


def are_alike(one: Schedule, other: Schedule) -> bool:
    """Whether two graphs are computed in the same way, each of leaves of its own."""

    def kinds(plan: Schedule) -> list[tuple[Backend, list[tuple[str, Shape]]]]:
        return [(p.backend, [(t.op.name, t.shape) for t in p.nodes if t.op]) for p in plan.parts]

    return kinds(one) == kinds(other)


def run_overlapping(
    passes: Passes, batches: Sequence[WindowBatch], alone: bool, before: Before
) -> list[tuple[float, Mapping[str, np.ndarray]]]:
    """The loss of each of some batches, and what is read beside it; in training their gradients are
    added up. before: called ahead of each part of each."""
    if not batches:
        return []
    begun: list[dict[str, Callable[[], np.ndarray]]] = [{} for _ in batches]
    passes.bind()
    runs = [passes.slots[k % passes.n_slots][len(b.tokens)] for k, b in enumerate(batches)]
    parts = [(p.backend, float(len(p.nodes))) for p in runs[0].program(alone).schedule.parts]
    for k, i in in_turns(parts, len(batches), passes.n_slots):
        before(k, i)
        if i == 0:
            passes.give(batches[k], runs[k], alone)
        runs[k].program(alone).start(i)
        begun[k] |= runs[k].begin_reads(alone, i)
    read = ({name: read() for name, read in each.items()} for each in begun)
    return [(float(each.pop("loss")), each) for each in read]
