"""The likeliest continuation, made by a device that runs ahead of the host.

Between two passes a device waits: its logits go to the host, which chooses a token and starts the
next pass. Here the device chooses by itself (pyggml.ops.next_token), and keeps what a pass reads.
So the host starts a pass before it has read the choice of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from pyggml.backends import detach, write
from pyggml.generation.sampler import check_greatest
from pyggml.graph import Graph
from pyggml.model import Model
from pyggml.models import Cache, Inputs, build
from pyggml.ops import advance, likeliest
from pyggml.schedule import Arenas, bind, schedule
from pyggml.tensors import put_together, zeros

Coming = Callable[[], int]  # waits for a token, and returns it


def runs_ahead(model: Model) -> bool:
    """Whether the model's first device computes while the host goes on, and can choose tokens.

    No model with recurrent parts: their state would be that of a token which the caller may never
    ask for. Nor one that is traced: a trace reads each pass.
    """
    first = model.devices.backends[0]
    if first.is_host or not model.batches or model.traced is not None:
        return False
    return first.unsupported(likeliest(zeros((1,)))) is None


class Ahead:
    """The pass of one token that becomes the pass of the likeliest next one."""

    def __init__(self, model: Model, cache: Cache, arenas: Arenas) -> None:
        inputs = Inputs.empty(1, with_rows=True)
        assert inputs.rows is not None
        self._leaves = inputs.tokens, inputs.positions, inputs.rows, inputs.span
        put_together(*self._leaves)
        self._choice = likeliest(build(model.parts, inputs, model.adapters, cache))
        moved = advance(inputs.tokens, self._choice, inputs.positions, inputs.rows, inputs.span)
        self._devices = model.devices
        (self._program,) = bind(
            schedule(Graph.of(self._choice, moved), model.devices), arenas=arenas
        )

    @contextmanager
    def starting(self, token: int, position: int, first: int) -> Iterator[Callable[[], Coming]]:
        """A context with a function that starts a pass: the first time that of this token, then
        that of the token which the last pass has chosen. It returns what waits for the choice.

        position: of the token in its sequence. first: the cache's row of position 0
        """
        row = first + position
        numbers = [token], [position], [row], [[first, row + 1]]
        for leaf, values in zip(self._leaves, numbers, strict=True):
            write(leaf, np.array(values, np.int32))
        with self._devices.holding(*self._leaves):
            yield self._start

    def _start(self) -> Coming:
        self._program()
        return partial(_token, self._program.begin_read(self._choice))

    def release(self) -> None:
        """Let go of the arena, as Pass.release."""
        for plan in self._program.schedule.plans.values():
            detach(*plan.offsets)


def _token(coming: Callable[[], np.ndarray]) -> int:
    """Raises DataError if its logit is NaN or infinite."""
    choice = coming()
    check_greatest(choice[1:].view(np.float32)[0])
    return int(choice[0])
