"""A device that computes with the ops' float64 references, in memory of its own.

It keeps numbers in the types of the graph and hands none of them out but through `read`: what the
engine does with it, it could do with a GPU.
"""

import numpy as np

from pyggml.backends import Backend
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32
from pyggml.quants import dequantize


class Memory:
    """Bytes on the device; NumPy cannot look into them."""

    def __init__(self, n_bytes):
        self.__bytes = np.full(n_bytes, 0xA5, np.uint8)

    def __array__(self, *_, **__):
        raise TypeError("this memory is the device's, wanted Backend.read")

    def of(self, device, offset, shape, dtype, strides):
        assert isinstance(device, ReferenceBackend), "only the device looks inside"
        return np.ndarray(shape, dtype, self.__bytes, offset, strides)


class Place:
    """What `Tensor.data` holds: where in which memory the tensor begins."""

    def __init__(self, memory, offset):
        self.memory, self.offset = memory, offset

    def __array__(self, *_, **__):
        raise TypeError("this tensor is the device's, wanted Backend.read")


class ReferenceBackend(Backend):
    """Runs the named ops where they make one float32 result; `computed` counts nodes by op."""

    name = "reference"

    def __init__(self, ops):
        self.ops, self.computed, self.n_read, self.written = frozenset(ops), {}, 0, []

    def refusal(self, node):
        if node.op.name not in self.ops:
            return "the op is not declared"
        if node.saved or node.op.changes:
            return "the reference makes one result"
        return None if node.dtype is F32 else f"the result is {node.dtype}"

    def alloc(self, n_bytes):
        return Memory(n_bytes)

    def attach(self, tensor, arena, offset):
        tensor.data = Place(arena, offset)

    def bind(self, node, arena, scratch, shared=None, in_place=False):
        assert scratch is None and shared is None
        return Call(self._compute, node)

    def read(self, tensor):
        self.n_read += 1
        return np.array(self._stored(tensor), order="C")

    def write(self, tensor, values):
        self.written.append(tensor)
        self._stored(tensor)[...] = values

    def _stored(self, t):
        """The numbers of a tensor where they lie: rows of quantised types as bytes."""
        place = t.root.data
        assert isinstance(place, Place), f"{t!r} is not on this device"
        shape, strides = t.shape, t.strides
        if t.dtype.quantised:
            shape, strides = (*shape[:-1], t.dtype.row_bytes(shape[-1])), (*strides[:-1], 1)
        offset = place.offset + t.offset
        return place.memory.of(self, offset, shape, t.dtype.numpy, strides)

    def _exact(self, t):
        stored = self._stored(t)
        if t.dtype.quantised or t.dtype is BF16:
            stored = dequantize(np.ascontiguousarray(stored), t.dtype.name)
        return stored.astype(np.float64) if stored.dtype.kind == "f" else stored.copy()

    def _compute(self, node):
        name = node.op.name
        self.computed[name] = self.computed.get(name, 0) + 1
        self._stored(node)[...] = node.op.ref(*(self._exact(s) for s in node.src), **node.params)
