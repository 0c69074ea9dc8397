"""The CPU: buffers are byte arrays, kernels are the ones that ops declare, or their references."""

import os
from collections.abc import Hashable, Sequence

import numpy as np

from pyggml import threads
from pyggml.backends.base import Backend
from pyggml.backends.cpu import pages
from pyggml.backends.cpu.rewrites import rewritten
from pyggml.graph import Graph
from pyggml.graph.arrays import array, read, stored_shape, write
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.jit.chains import join_launches
from pyggml.jit.isa import cpu_name
from pyggml.kernels import gemm
from pyggml.kernels.kernel import KERNELS, Compute, Kernel, Site
from pyggml.kernels.reference import BY_REFERENCE, lacks_of_reference

ALIGNMENT = 64


class CPU(Backend):
    """The host CPU, through Numba. `compute`: how products with quantised weights run."""

    name = "cpu"
    is_host = True
    beside = 6

    def __init__(self, compute: Compute = "f32") -> None:
        self.compute: Compute = compute

    @property
    def about(self) -> str:
        return f"{cpu_name()} of {os.cpu_count()}, threads {threads.get()}, {self.compute}"

    @property
    def rounds_floats(self) -> bool:
        return gemm.rounds_matrices(self.compute)

    def refusal(self, node: Tensor) -> str | None:
        return None if node.op in KERNELS else lacks_of_reference(node)

    def rewritten(self, graph: Graph) -> Graph:
        return rewritten(graph, self.compute)

    def alloc(self, n_bytes: int) -> np.ndarray:
        """n_bytes uint8, aligned; pages are taken from the system when first written."""
        raw = np.empty(n_bytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + n_bytes]

    def attach(self, tensor: Tensor, arena: np.ndarray, offset: int) -> None:
        tensor.data = np.ndarray(stored_shape(tensor), tensor.dtype.numpy, arena, offset)

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

    def join(self, calls: Sequence[Call]) -> Sequence[Call]:
        return list(join_launches(calls))

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


def _kernel(node: Tensor) -> Kernel:
    assert node.op is not None
    return KERNELS.get(node.op, BY_REFERENCE)
