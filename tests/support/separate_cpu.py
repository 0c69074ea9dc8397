"""A device with the CPU's kernels and memory of its own, as a GPU has: it can do everything, and
what it hands out and is handed is counted."""

from collections import Counter
from weakref import WeakSet

import numpy as np

from pyggml.backends.cpu import CPU
from pyggml.graph.call import Call


class SeparateCPU(CPU):
    """Starts the calls of a part at once, as a captured graph would. `moved` counts tensors that
    were read and written, by direction and shape."""

    name = "separate"
    is_host = False
    beside = 0

    def __init__(self, compute="f32"):
        super().__init__(compute)
        self.moved, self.launches = Counter(), 0
        self.streamed = WeakSet()

    def alloc(self, n_bytes):
        memory = super().alloc(n_bytes)
        memory[:] = 0xA5  # what was not written is found out
        return memory

    def read(self, tensor):
        self.moved["read", tensor.shape] += 1
        return super().read(tensor)

    def write(self, tensor, values):
        self.moved["written", tensor.shape] += 1
        super().write(tensor, np.array(values))

    def join(self, calls):
        return [Call(self._launch, tuple(calls))]

    def _launch(self, calls):
        self.launches += 1
        for call in calls:
            call()
