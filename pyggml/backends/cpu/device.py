"""The CPU: buffers are byte arrays, kernels are the ones that ops declare, or their references."""

import os
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml import threads
from pyggml.backends.base import Backend
from pyggml.backends.cpu import pages
from pyggml.backends.cpu.rewrites import REWRITES
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.jit.isa import cpu_name
from pyggml.kernels.kernel import KERNELS, Compute, Kernel, Site
from pyggml.kernels.reference import BY_REFERENCE, lacks_of_reference

ALIGNMENT = 64


class CPU(Backend):
    """The host CPU, through Numba. `compute`: how products with quantised weights run."""

    name = "cpu"
    is_host = True

    def __init__(self, compute: Compute = "f32") -> None:
        self.compute: Compute = compute

    @property
    def about(self) -> str:
        return f"{cpu_name()} of {os.cpu_count()}, threads {threads.get()}, {self.compute}"

    def refusal(self, node: Tensor) -> str | None:
        return None if node.op in KERNELS else lacks_of_reference(node)

    def rewritten(self, graph: Graph) -> Graph:
        for rewrite in REWRITES:
            graph = rewrite(graph)
        return graph

    def alloc(self, n_bytes: int) -> np.ndarray:
        """n_bytes uint8, aligned; pages are taken from the system when first written."""
        raw = np.empty(n_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + n_bytes]

    def attach(self, tensor: Tensor, arena: np.ndarray, offset: int) -> None:
        tensor.data = np.ndarray(_stored_shape(tensor), tensor.dtype.numpy, arena, offset)

    def bind(
        self,
        node: Tensor,
        arena: np.ndarray,
        scratch: int | None,
        shared: Tensor | None = None,
        in_place: bool = False,
    ) -> Call:
        start = scratch or 0
        site = Site(
            node,
            array(node),
            tuple(array(s) for s in node.src),
            tuple(array(s) for s in node.saved),
            arena[start : start + self.scratch(node)],
            in_place,
            self.compute,
            None if shared is None else array(shared).view(np.uint8),
            shared is not None and shared.src[0] is node,
        )
        return _kernel(node).bind(site)

    def read(self, tensor: Tensor) -> np.ndarray:
        return read(tensor)

    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        write(tensor, values)

    def scratch(self, node: Tensor) -> int:
        return _kernel(node).scratch(node, self.compute)

    def shared(self, node: Tensor) -> tuple[int, Hashable]:
        shared = _kernel(node).shared  # ops that name the same function make the same
        n_bytes, word = shared(node, self.compute)
        return n_bytes, (word, shared)

    def release(self, leaf: Tensor) -> Call | None:
        return None if leaf.data is None else pages.release(leaf.data)


def read(t: Tensor) -> np.ndarray:
    """A copy of the numbers of a leaf, or of a node that the CPU computed."""
    return np.array(array(t), order="C")


def has_memory(t: Tensor) -> bool:
    """Whether a leaf has its array already."""
    return (t if t.base is None or t.op is None else t.base).data is not None


def write(t: Tensor, values: npt.ArrayLike) -> None:
    """Set the numbers of a leaf: an input, a parameter. Programs that read it see them.

    GraphError for a leaf whose array is read-only.
    """
    to = array(t)
    if not to.flags.writeable:
        raise GraphError(f"{t!r}: its array is read-only, as that of a weight in a file")
    to[...] = values


def copy_rows(t: Tensor, source: int, target: int, n: int) -> None:
    """Rows target … target + n of a leaf become what rows source … were."""
    rows = array(t)
    rows[target : target + n] = rows[source : source + n]


def detach(*tensors: Tensor) -> None:
    """Take tensors, of any device, their memory away; it is free once nobody else has it."""
    for t in tensors:
        t.data = None


LeafArrays = tuple[tuple[Tensor, Any], ...]


def leaf_arrays(leaves: Iterable[Tensor]) -> LeafArrays:
    """Leaves with the arrays that they have now."""
    return tuple((leaf, leaf.data) for leaf in leaves)


def expect_held(leaves: LeafArrays) -> None:
    """GraphError for a leaf that was given another array: kernels still read the first one."""
    for leaf, data in leaves:
        if leaf.data is not data and leaf.data is not None:
            raise GraphError(
                f"{leaf!r} has another array than when the program was bound: write the new "
                "numbers into that, as leaf.data[...] = new, or bind again"
            )


def is_constant(leaf: Tensor) -> bool:
    """Whether a leaf's array is read-only, as a mapped weight is: its numbers never change."""
    return not array(leaf).flags.writeable


def _kernel(node: Tensor) -> Kernel:
    assert node.op is not None
    return KERNELS.get(node.op, BY_REFERENCE)


def _stored_shape(t: Tensor) -> tuple[int, ...]:
    """The shape of the array that holds t: a quantised row counts its bytes."""
    if not t.dtype.quantised:
        return t.shape
    return (*t.shape[:-1], t.dtype.row_bytes(t.shape[-1]))


def array(t: Tensor) -> np.ndarray:
    """The NumPy array of a tensor that has memory, never a copy; a view's looks into its base's."""
    if t.base is None or t.op is None:
        assert t.data is not None, f"{t!r} has no memory yet"
        return t.data
    base = t.base.data
    assert base is not None, f"{t.base!r} has no memory yet"
    strides = (*t.strides[:-1], 1) if t.dtype.quantised else t.strides
    return np.ndarray(_stored_shape(t), t.dtype.numpy, _bytes_of(base), t.offset, strides)


def _bytes_of(base: np.ndarray) -> np.ndarray:
    """The memory from the first element to the last as uint8, gaps included; never a copy."""
    if base.flags.c_contiguous:
        return base.reshape(-1).view(np.uint8)
    first = base[(slice(0, 1),) * base.ndim].reshape(1).view(np.uint8)
    steps = zip(base.shape, base.strides, strict=True)
    n_bytes = base.itemsize + sum((n - 1) * step for n, step in steps)
    return np.lib.stride_tricks.as_strided(first, (n_bytes,), (1,))
