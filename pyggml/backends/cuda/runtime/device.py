"""The card as a backend: buffers of plain device memory, and a stream of its own."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from pyggml.backends.base import Backend, Links
from pyggml.backends.cuda.gemm.cublas import workspaces
from pyggml.backends.cuda.rewrites import rewritten
from pyggml.backends.cuda.runtime.ahead import compile_missing
from pyggml.backends.cuda.runtime.branches import may_begin_early, side_by_side
from pyggml.backends.cuda.runtime.captures import Capture
from pyggml.backends.cuda.runtime.driver import (
    abandon,
    address,
    cuda,
    description_of,
    free_what_is_gone,
    make_current,
    shared_cell,
)
from pyggml.backends.cuda.runtime.early import knows_early
from pyggml.backends.cuda.runtime.events import Event
from pyggml.backends.cuda.runtime.failures import is_failure, lost_by, ran_out, reason_of
from pyggml.backends.cuda.runtime.kernel import BoundCall, Compute, CudaKernel, CudaSite, OwnOp
from pyggml.backends.cuda.runtime.launches import of_library
from pyggml.backends.cuda.runtime.links import NcclLinks
from pyggml.backends.cuda.runtime.loading import copy_rate, expect, load, lock_file
from pyggml.backends.cuda.runtime.slabs import MemoryPlace, Slabs, taken
from pyggml.backends.cuda.runtime.table import kernels
from pyggml.backends.cuda.runtime.transfers import Bytes, Crossing, End, Transfers, is_locked
from pyggml.backends.cuda.weights.unpack import is_placing, placed_at_once
from pyggml.backends.kit.faults import Faults
from pyggml.backends.kit.places import BufferPlace, host_view, span
from pyggml.errors import DeviceError, DeviceLostError, DeviceMemoryError, PyggmlError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

# What kernels take, and cuBLAS for its handles; what a node of a captured graph does. The driver's
# context is there when a card is asked what is free.
_LIBRARIES, _OF_NODE = 316 << 20, 34 << 10

_OF_DRIVER = "the driver's own memory is wanted"  # of a context, which every process needs


class CudaBackend(Backend):
    """One NVIDIA card. `compute`: how products with weights round their operands.

    unpacked   weights that stay in bfloat16 beside what they are packed, each with its place there

    Raises DeviceError if there is no such card.
    """

    room = 64 << 20
    passes_together = 4

    def __init__(self, index: int = 0, compute: Compute = "bf16") -> None:
        self.name, self.index, self.compute = f"cuda:{index}", index, compute
        self._kernels = kernels()
        self._spans: WeakKeyDictionary[Tensor, tuple[BufferPlace, Bytes]] = WeakKeyDictionary()
        self._lasting: WeakKeyDictionary[Tensor, Any] = WeakKeyDictionary()
        self.unpacked: WeakKeyDictionary[Tensor, MemoryPlace] = WeakKeyDictionary()
        self._waited: WeakKeyDictionary[Tensor, tuple[float, float]] = WeakKeyDictionary()
        self.streamed: WeakSet[Tensor] = WeakSet()
        self._unprepared: list[Call] = []
        self._once: list[Call] = []
        with self._working():
            self.stream = cuda.stream()
            self._slabs = Slabs(self._array)
            self._transfers = Transfers(self.stream)
            self._last_copy = cuda.device_array(1, np.uint8)  # which each copy writes, as it were
            cell, self._fault = shared_cell()
            self._faults = Faults(cell)

    @property
    def about(self) -> str:
        with self._working():
            return f"{description_of(self.index)[0]}, {self.compute}"

    @property
    def rounds_floats(self) -> bool:
        return self.compute == "bf16"

    def refusal(self, node: Tensor) -> str | None:
        kernel = self._declaration(node)
        return "no kernel is declared" if kernel is None else kernel.lacks(node)

    def rewritten(self, graph: Graph) -> Graph:
        """By the passes of pyggml.backends.cuda.rewrites."""
        with self._working():  # the card is asked how much shared memory it has
            return rewritten(graph, self)

    # -- memory -----------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Any:
        """n_bytes uint8 on the card, aligned to 256."""
        with self._working(n_bytes):
            return self._slabs.take(n_bytes)

    def _array(self, n_bytes: int) -> Any:
        return cuda.device_array(n_bytes, np.uint8, stream=self.stream)

    def own(self, n_nodes: int) -> int:
        return _LIBRARIES + workspaces() + _OF_NODE * n_nodes

    def memory(self) -> tuple[int, int]:
        with self._working():
            free_what_is_gone()
            return cuda.current_context().get_memory_info()

    def allocation(self, n_bytes: int) -> int:
        return taken(n_bytes)

    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        tensor.data = BufferPlace(arena, offset)

    def read(self, tensor: Tensor) -> np.ndarray:
        """As Backend.read. Raises PyggmlError if a kernel has found a fault in its data."""
        return self.begin_read(tensor)()

    def begin_read(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """As Backend.begin_read. The function raises PyggmlError as `read` does."""
        with self._working():
            copy, arrived = self._transfers.to_host(self._bytes(tensor))
        return partial(self._wait_for, host_view(tensor, copy), arrived, tensor)

    def _wait_for(self, array: np.ndarray, arrived: Event, tensor: Tensor) -> np.ndarray:
        with self._working():
            last = self._waited.get(tensor, (0.0, 0.0))
            self._waited[tensor] = last[1], arrived.wait(min(last))
        if fault := int(self._fault[0]):
            self._fault[0] = 0
            raise PyggmlError(self._faults.sentence(fault))
        return np.asarray(array, order="C")

    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        with self._working():
            target = self._bytes(tensor)
            if tensor.is_contiguous:
                spanned = np.asarray(values, tensor.dtype.numpy, order="C")
            else:  # what lies in the gaps stays
                spanned, arrived = self._transfers.to_host(target)
                arrived.wait()
                host_view(tensor, spanned)[...] = values
            self._transfers.to_card(target, spanned)

    def expect(self, arrays: Iterable[np.ndarray]) -> None:
        expect(self.index, arrays)

    def load(self, pairs: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        with self._working():
            load(self.index, self._with_addresses(pairs))

    def _with_addresses(
        self, pairs: Iterable[tuple[Tensor, np.ndarray]]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Arrays without gaps, and where they go; others are written."""
        places = dict[int, int]()  # a buffer -> its address, for which Numba takes its time
        for t, values in pairs:
            if not t.is_contiguous:
                self.write(t, values)
                continue
            buffer, first = t.root.data.buffer, t.root.data.offset + t.offset
            if id(buffer) not in places:
                places[id(buffer)] = address(buffer)
            yield places[id(buffer)] + first, values

    def place(self, tensors: Sequence[Tensor]) -> None:
        """As Backend.place, in one piece: to take many takes longer."""
        starts = [0, *accumulate(round_up(t.n_bytes, 256) for t in tensors)]
        memory = self.alloc(starts[-1])
        for t, start in zip(tensors, starts, strict=False):
            self.attach(t, memory, start)

    def bind_write(self, tensor: Tensor, values: np.ndarray) -> Call:
        with self._working():
            target = self._bytes(tensor)
        if not tensor.is_contiguous or is_locked(values):
            return super().bind_write(tensor, values)
        return Call(self._run, self._transfers.bind_to_card(target, values), target, values)

    def bind_copy(self, target: Tensor, source: Tensor, giver: Backend) -> tuple[Call | None, Call]:
        """As Backend.bind_copy: from card to card, if the bytes lie alike on both."""
        alike = span(source) == span(target) and source.strides == target.strides
        if not (isinstance(giver, CudaBackend) and alike and source.n_elements):
            return super().bind_copy(target, source, giver)
        crossing = Crossing(self._end(target), giver._end(source))
        return Call(crossing.mark), Call(crossing.take)

    def _end(self, t: Tensor) -> End:
        with self._working():
            return End(self.index, self.stream, self._working, self._bytes(t))

    def bind_stream(self, tensor: Tensor, values: np.ndarray) -> Call:
        """As Backend.bind_stream: straight from the locked pages of its file, if the driver locks
        them. Copies wait for each other, so that those come first that are read first."""
        with self._working():
            lock_file(values)
            return self._bind_copy(tensor, values, reads=[])

    def _bind_copy(self, tensor: Tensor, values: np.ndarray, reads: Sequence[np.ndarray]) -> Call:
        target = self._bytes(tensor)
        send = self._transfers.bind_to_card(target, values)
        writes = [target.array, self._last_copy]
        return BoundCall(of_library(send, reads=reads, writes=writes, keeps=values))

    def host_memory(self, n_bytes: int) -> np.ndarray:
        with self._working(n_bytes):
            return np.asarray(cuda.pinned_array(n_bytes, np.uint8))

    def bind_send(self, tensor: Tensor, memory: np.ndarray) -> Call:
        with self._working():
            source = self._bytes(tensor)
            send = self._transfers.bind_to_host(memory, source)
            return BoundCall(of_library(send, reads=[source.array], writes=[memory]))

    def bind_return(self, tensor: Tensor, memory: np.ndarray) -> Call:
        with self._working():
            return self._bind_copy(tensor, memory, reads=[memory])

    def copy_rate(self, values: np.ndarray) -> float:
        memory = self.alloc(values.nbytes)
        with self._working():
            return copy_rate(Bytes(memory[: values.nbytes]), values)

    def _bytes(self, t: Tensor) -> Bytes:
        """The bytes from the tensor's first element to its last, on the card."""
        place = t.root.data
        assert isinstance(place, BufferPlace), f"{t!r} has no memory on {self.name}"
        cut = self._spans.get(t)
        if cut is None or cut[0] is not place:  # Numba takes longer to cut than to copy
            start = place.offset + t.offset
            cut = self._spans[t] = place, Bytes(place.buffer[start : start + span(t)])
        return cut[1]

    # -- calls ------------------------------------------------------------------------------------

    def bind(
        self,
        node: Tensor,
        arena: Any,
        scratch: int | None,
        shared: Tensor | None = None,
        in_place: bool = False,
    ) -> Call:
        start = scratch or 0
        with self._working():  # arrays are cut, and a library may take memory of its own
            site = CudaSite(
                node,
                self._elements(node),
                tuple(self._elements(s) for s in node.src),
                tuple(self._elements(s) for s in node.saved),
                arena[start : start + self.scratch(node)],
                in_place,
                None if shared is None else self._bytes(shared).array,
                shared is not None and shared.src[0] is node,
                self.compute,
                self.stream,
                self._faults,
                self._constant,
                partial(self._lasting_memory, node),
                self._once.append,
            )
            return BoundCall(self._kernel(node).bind(site), site)

    def scratch(self, node: Tensor) -> int:
        with self._working():  # the card is asked how much shared memory it has
            return self._kernel(node).scratch(node, self.compute)

    def shared(self, node: Tensor) -> tuple[int, Hashable]:
        shared = self._kernel(node).shared
        with self._working():
            n_bytes, word = shared(node, self.compute)
        return n_bytes, (word, shared)

    def join(self, calls: Sequence[Call]) -> Sequence[Call]:
        """One captured graph of all, its branches side by side."""
        with self._working():
            bound = cast(Sequence[BoundCall], calls)
            early = partial(may_begin_early, bound) if knows_early() else None
        steps, waits = side_by_side(bound)
        if not steps:
            return []
        self._unprepared += steps
        if (joint := self._placed_at_once(steps)) is not None:
            self._unprepared.append(joint[1])
        capture = Capture(steps, self.stream, waits, early, self._prepare, self._placed_at_once)
        return [Call(self._run, capture)]

    def _placed_at_once(self, steps: Sequence[Call]) -> tuple[Sequence[Call], Call] | None:
        """Those of the steps that place thin factors, if they are several, and one for all."""
        placing = [step for step in steps if is_placing(step)]
        if len(placing) < 2:
            return None
        with self._working():
            return placing, placed_at_once(placing, self.stream)

    def _prepare(self) -> None:
        """Compile the kernels of all programs that were bound since the last that began to run: a
        pass, its validation and the optimiser's step wait together for the longest kernel."""
        steps, once = self._unprepared, self._once[:]
        self._unprepared = []
        self._once.clear()
        compile_missing([*once, *steps])
        for call in once:
            call()

    def _run(self, work: Callable[[], object], *_kept: object) -> None:
        """Put work on the stream; `_kept` must live as long as the call."""
        with self._working():
            work()

    def _declaration(self, node: Tensor) -> CudaKernel | None:
        assert node.op is not None
        own = node.op.kernel if isinstance(node.op, OwnOp) else None
        return own or self._kernels.get(node.op.name)

    def _kernel(self, node: Tensor) -> CudaKernel:
        kernel = self._declaration(node)
        assert kernel is not None
        return kernel

    def _constant(self, values: np.ndarray) -> Any:
        """A copy of a small array on the card."""
        with self._working():
            return cuda.to_device(values, stream=self.stream)

    def _lasting_memory(
        self, node: Tensor, i: int, n_bytes: int, place: MemoryPlace | None = None
    ) -> tuple[Any, bool]:
        """(Memory that lasts as long as this card's copy of the leaf that a node reads as source i,
        whether it is new), at its place if it has one. All nodes that read the leaf get the
        same."""
        leaf = node.src[i].root
        is_new = leaf not in self._lasting
        if is_new:
            self._lasting[leaf] = place.memory(self.alloc) if place else self.alloc(n_bytes)
        return self._lasting[leaf], is_new

    def lasting(self, node: Tensor) -> Iterator[tuple[Tensor, int]]:
        kernel = self._declaration(node)  # a view has none
        for i, n_bytes in kernel.lasting(node) if kernel is not None else ():
            yield node.src[i].root, n_bytes

    def links(self) -> Links:
        with self._working():
            return NcclLinks(self.index, self.stream, self._bytes, self._working)

    def _elements(self, t: Tensor) -> Any:
        """The tensor's elements and the gaps between, as one axis of the type that holds them."""
        return self._bytes(t).array.view(t.dtype.numpy)

    def _working(self, n_bytes: int = 0) -> AbstractContextManager[None]:
        """Makes the card current for a while. What it refuses becomes the fitting DeviceError.

        n_bytes: what is asked of its memory
        """
        return _Working(self, n_bytes)

    def explain(self, error: BaseException, n_bytes: int, is_current: bool = True) -> None:
        """Raise a DeviceError if the card refused something; other errors stay what they are.

        is_current: whether this card is the current one; another one is asked nothing
        """
        if not (isinstance(error, Exception) and is_failure(error)):
            return
        if ran_out(error):
            demand = self._demand(n_bytes) if is_current else _OF_DRIVER
            raise DeviceMemoryError(f"{self.name} is out of memory: {demand}") from error
        if (cause := lost_by(error, is_current)) is not None:
            abandon(self.index)
            raise DeviceLostError(f"{self.name} has failed: {reason_of(cause)}") from error
        raise DeviceError(f"{self.name} refuses a call: {reason_of(error)}") from error

    def _demand(self, n_bytes: int) -> str:
        try:
            free, total = cuda.current_context().get_memory_info()
        except Exception as error:
            if not is_failure(error):
                raise
            return _OF_DRIVER
        demand = f"{n_bytes:,} bytes are wanted" if n_bytes else "a kernel's own memory is wanted"
        return f"{demand}, {free:,} of {total:,} are free"


class _Working(AbstractContextManager[None]):
    """What `CudaBackend._working` returns: a generator in its place takes three times as long."""

    __slots__ = ("_card", "_n_bytes")

    def __init__(self, card: CudaBackend, n_bytes: int) -> None:
        self._card, self._n_bytes = card, n_bytes

    def __enter__(self) -> None:
        try:
            make_current(self._card.index)
        except Exception as error:
            self._card.explain(error, self._n_bytes, is_current=False)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._card.explain(error, self._n_bytes)
