"""A card that is not there: nodes are fused and bound, and nothing is computed."""

from contextlib import nullcontext
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from pyggml.backends.cuda.runtime.device import CudaBackend
from pyggml.backends.cuda.runtime.table import kernels
from pyggml.backends.kit.faults import Faults
from pyggml.graph.call import Call


class DryCard(CudaBackend):
    """Stands for a card while nodes are bound: arrays of the same types, on the host."""

    def __init__(self, compute="bf16"):
        self.name, self.index, self.compute = "dry", 0, compute
        self._kernels, self.stream, self._spans = kernels(), 0, WeakKeyDictionary()
        self._lasting, self.unpacked = WeakKeyDictionary(), WeakKeyDictionary()
        self._waited = WeakKeyDictionary()
        self.streamed, self._once = WeakSet(), []
        self._faults = Faults(np.zeros(1, np.int32))

    def alloc(self, n_bytes):
        return np.zeros(n_bytes, np.uint8)

    def memory(self):
        return None

    def write(self, tensor, values):
        pass

    def expect(self, arrays):
        pass

    def load(self, pairs):
        pass

    def bind_write(self, tensor, values):
        return Call(self.write, tensor, values)

    def read(self, tensor):
        return np.zeros(tensor.shape, tensor.dtype.numpy)

    def begin_read(self, tensor):
        return lambda: self.read(tensor)

    def join(self, calls):
        return []

    def _constant(self, values):
        return values

    def _working(self, n_bytes=0):
        return nullcontext()
