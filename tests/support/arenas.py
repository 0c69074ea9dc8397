"""Plans bound to memory that a test gives: what it holds before, and what lies where after."""

from pyggml.runtime import Arenas, Schedule, bind


class Given(Arenas):
    """This memory, whatever a plan needs."""

    def __init__(self, memory):
        self._memory = memory

    def of(self, backend, n_bytes):
        return self._memory


def bound(p, memory=None):
    """A program of a plan as it is: no device rewrites its graph. memory: by default its own."""
    return bind(Schedule.of(p), arenas=None if memory is None else Given(memory))
