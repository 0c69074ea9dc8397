"""The likeliest continuation, made by a device that runs ahead of the host.

Between two passes a device waits: its logits go to the host, which chooses a token and starts the
next pass. Here the device chooses by itself (pyggml.ops.next_token), and keeps what a pass reads.
So the host starts a pass before it has read the choice of the one before.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.arrays import detach, write
from pyggml.graph.tensor import Tensor, put_together, zeros
from pyggml.model import Model, check_greatest
from pyggml.models import Cache, Inputs, build
from pyggml.ops import advance, likeliest
from pyggml.runtime import Arenas, bind, schedule

Coming = Callable[[], int]  # waits for a token, and returns it


def runs_ahead(model: Model) -> bool:
    """Whether the model's first device computes while the host goes on, and can choose tokens.

    No model whose blocks are on several devices: the one that has the logits reads no tokens.

    No model with recurrent parts: their state would be that of a token which the caller may never
    ask for. Nor one that is traced: a trace reads each pass.
    """
    first = model.devices.backends[0]
    if first.is_host or not model.batches or model.traces or model.placement is not None:
        return False
    choice, moved = _step(zeros((1,)), _inputs())
    return first.refusal(choice) is None and first.refusal(moved) is None


def _inputs() -> Inputs:
    return Inputs.empty(1, with_rows=True)


def _leaves(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert inputs.rows is not None
    return inputs.tokens, inputs.positions, inputs.rows, inputs.span


def _step(logits: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The choice, and the inputs' tokens after it."""
    choice, (tokens, *positions) = likeliest(logits), _leaves(inputs)
    return choice, advance(tokens, choice, *positions)


class Ahead:
    """The pass of one token that becomes the pass of the likeliest next one.

    run   counts the sequences that have begun: a caller that starts passes compares it
          with the number it began with
    """

    def __init__(self, model: Model, cache: Cache, arenas: Arenas) -> None:
        self.run = 0
        inputs, self._devices = _inputs(), model.devices
        self._leaves, self._length = _leaves(inputs), inputs.length
        put_together(*self._leaves)
        logits = build(model.parts, inputs, model.adapters, cache)
        self._choice, moved = _step(logits, inputs)
        plan = schedule(Graph.of(self._choice, moved), model.devices)
        self._program = bind(plan, arenas=arenas)

    def begin(self, token: int, position: int, first: int, length: int) -> int:
        """Make this the token of the next pass; returns the number of the run.

        position: of the token in its sequence. first: the cache's row of position 0. length: of the
        sequence; its rotary factors have to be those of all the run
        """
        write(self._length, np.array([length]))
        row = first + position
        numbers = [token], [position], [row], [[first, row + 1]]
        for leaf, values in zip(self._leaves, numbers, strict=True):
            write(leaf, np.array(values, np.int32))
        self._devices.hold(*self._leaves, self._length)  # from here on the device has the newest
        self.run += 1
        return self.run

    def start(self) -> Coming:
        """Start a pass, the first time that of the token given, then that of the token chosen last;
        returns what waits for the choice of this one."""
        self._program()
        return partial(_token, self._program.begin_read(self._choice))

    def release(self) -> None:
        """Let go of the arena, as Pass.release. Nobody's run goes on."""
        self.run += 1
        self._devices.drop(*self._leaves, self._length)
        for plan in self._program.schedule.plans.values():
            detach(*plan.offsets)


def _token(coming: Callable[[], np.ndarray]) -> int:
    """Raises DataError if its logit is NaN or infinite."""
    choice = coming()
    check_greatest(choice[1:].view(np.float32)[0])
    return int(choice[0])
