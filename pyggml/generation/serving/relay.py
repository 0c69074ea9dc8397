"""Several models that take turns: each has a scheduler of its own, and one of them computes."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from pyggml.generation import Slot
from pyggml.generation.serving.request import Failure, Request, expiry_failure
from pyggml.generation.serving.scheduler import Scheduler
from pyggml.model import Model


class Relay:
    """Requests of any models, for one thread.

    A request joins those of the model that runs as long as nobody waits for another. Then these are
    answered first, and the model runs next whose request came first, with all that wait for it. So
    nobody waits for more than one such batch of each other model.

    A model keeps its scheduler, and with it what its cache has of prompts, while all that are open
    fit into memory; the one that ran longest ago is closed, and one always stays.
    """

    def __init__(
        self,
        open: Callable[[Model], Scheduler],
        keep: Callable[[list[Model]], None],
        n_free: Callable[[], int],
    ) -> None:
        """open: the scheduler of a model; keep: called where some were closed, with the models that
        are open or waited for: others are not needed; n_free: bytes of memory that are free now."""
        self._open_new, self._keep, self._n_free = open, keep, n_free
        self._open: list[Scheduler] = []  # the one that runs, or ran last, at the end
        self._waiting: deque[Request] = deque()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting) + sum(each.n_waiting for each in self._open[-1:])

    @property
    def n_active(self) -> int:
        return sum(each.n_active for each in self._open[-1:])

    @property
    def slots(self) -> Sequence[Slot]:
        """The places of the model that runs."""
        return self._open[-1].slots if self._open else ()

    def submit(self, request: Request) -> None:
        runs = bool(self._open) and _is_of(request, self._open[-1].model)
        if runs and not self._waiting:
            self._open[-1].submit(request)
        else:
            self._waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request. Nothing happens if it has ended."""
        if request in self._waiting:
            self._waiting.remove(request)
        for scheduler in self._open[-1:]:
            scheduler.cancel(request)

    def step(self) -> bool:
        """Make one pass of the model that runs; False if there is nothing left to do."""
        now = time.monotonic()
        for request in [r for r in self._waiting if r.deadline <= now]:
            self._waiting.remove(request)
            request.tell(expiry_failure())
        if self._waiting and not any(each.n_active or each.n_waiting for each in self._open[-1:]):
            self._turn()
        return any([*(each.step() for each in self._open[-1:]), self._waiting])

    def fail(self, error: Exception) -> None:
        """End every request with this error."""
        while self._waiting:
            self._waiting.popleft().tell(Failure(error))
        for scheduler in self._open[-1:]:
            scheduler.fail(error)

    def _turn(self) -> None:
        """Let the model run whose request came first."""
        model, fault = self._waiting[0].model, None
        try:
            self._open_for(model)
        except Exception as error:  # such as a context that cannot shift
            fault = Failure(error)
        for request in [r for r in self._waiting if _is_of(r, model)]:
            self._waiting.remove(request)
            if fault is None:
                self._open[-1].submit(request)
            else:
                request.tell(fault)
        self._close()

    def _open_for(self, model: Model) -> None:
        """Put the model's scheduler at the end of those that are open."""
        same = [each for each in self._open if each.model.parts is model.parts]
        scheduler = same[0] if same else self._open_new(model)
        self._open = [each for each in self._open if each is not scheduler] + [scheduler]

    def _close(self) -> None:
        """Close those that ran longest ago until the others fit into memory."""
        n = len(self._open)
        while len(self._open) > 1 and sum(s.n_bytes for s in self._open) > self._n_free():
            self._open.pop(0).release()
        if len(self._open) < n:
            self._keep([s.model for s in self._open] + [r.model for r in self._waiting])


def _is_of(request: Request, model: Model) -> bool:
    return request.model.parts is model.parts
