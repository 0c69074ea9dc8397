"""Devices that do what they are asked for later, each in its own order, as cards do.

The order among them is drawn: what need not wait for another device may come first, or last.
"""

from collections import Counter, deque
from functools import partial

import numpy as np
from separate_cpu import SeparateCPU

from pyggml.graph.arrays import array
from pyggml.graph.call import Call


class Desk:
    """What several devices are still asked for: of each (whether it may begin, what it does)."""

    def __init__(self, seed):
        self.rng, self.queues = np.random.default_rng(seed), []

    def work(self, until):
        while not until():
            ready = [queue for queue in self.queues if queue and queue[0][0]()]
            assert ready, "devices wait for each other"
            ready[self.rng.integers(len(ready))].popleft()[1]()


class LateCPU(SeparateCPU):
    """One of the devices of a desk."""

    def __init__(self, desk, name):
        super().__init__()
        self.desk, self.name, self.queue = desk, name, deque()
        desk.queues.append(self.queue)

    def ask(self, act, may_begin=lambda: True):
        self.queue.append((may_begin, act))

    def read(self, tensor):
        return self.begin_read(tensor)()

    def begin_read(self, tensor):
        place, found = array(tensor), []
        self.ask(lambda: found.append(place.copy()))

        def wait():
            self.desk.work(lambda: found)
            return found[0]

        return wait

    def write(self, tensor, values):
        self.ask(partial(np.copyto, array(tensor), np.array(values)))

    def join(self, calls):
        return [Call(self.ask, Call(self._launch, tuple(calls)))]

    def bind_copy(self, target, source, giver):
        to, of, asked, done = array(target), array(source), Counter(), Counter()

        def mark():
            asked["mark"] += 1
            giver.ask(partial(done.update, ["mark"]))

        def take():
            asked["copy"] += 1
            marks, copies = asked["mark"], asked["copy"]
            self.ask(partial(np.copyto, to, of), lambda: done["mark"] >= marks)
            self.ask(partial(done.update, ["copy"]))
            giver.ask(lambda: None, lambda: done["copy"] >= copies)

        return Call(mark), Call(take)
