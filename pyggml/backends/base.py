"""The seam between the engine and a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


class Backend(ABC):
    """A device: memory, and kernels by op.

    A buffer is the device's own handle of memory; only the device looks inside. It keeps the buffer
    of a tensor in `Tensor.data`. `is_host` says that it computes on the leaves' own memory; any
    other device has copies of them.

    `room` is for devices that run nodes side by side. A node that writes to used memory must wait
    for the last reader of what was there. So a plan holds back the last `room` bytes that became
    free.

    `beside` is for devices that may begin so many nodes while an earlier one runs: small scratch is
    held back as long.

    `streamed` are leaves that are copied to the device anew in every run, a few at a time; None of
    a device that cannot do that.

    `copies_from` is for devices that may keep weights unpacked: the share of a training step's time
    that this must save at least.

    `passes_together` is for devices that unpack weights in every pass: so many passes of one long
    sequence take less time as one.
    """

    name: str
    is_host: bool = False
    room: int = 0
    beside: int = 0
    streamed: WeakSet[Tensor] | None = None
    copies_from: float = 0.05
    passes_together: int = 1

    @property
    def about(self) -> str:
        """What computes and how its products round: what is measured here holds for all such."""
        return self.name

    def is_like(self, other: "Backend") -> bool:
        """Whether another device has the same ops and computes the same bits."""
        return type(self) is type(other) and self.about == other.about

    @property
    def rounds_floats(self) -> bool:
        """Whether products with a matrix in BF16 round what they multiply with it."""
        return False

    @abstractmethod
    def refusal(self, node: Tensor) -> str | None:
        """None if this device can run the node, else the reason in a few words."""

    def rewritten(self, graph: Graph) -> Graph:
        """A graph with the same outputs, at the same positions, that suits this device better.

        It may have ops of the device's own. The nodes that it leaves out are computed nowhere.
        """
        return graph

    @abstractmethod
    def alloc(self, n_bytes: int) -> Any:
        """A buffer of n_bytes, aligned to 64 bytes; its contents are undefined."""

    @abstractmethod
    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        """Give a tensor its memory: `n_bytes` of the arena, from `offset` on."""

    def place(self, tensors: Sequence[Tensor]) -> None:
        """Give many tensors, such as weights, memory that lasts as long as one of them."""
        for tensor in tensors:
            self.attach(tensor, self.alloc(tensor.n_bytes), 0)

    @abstractmethod
    def bind(
        self,
        node: Tensor,
        arena: Any,
        scratch: int | None,
        shared: Tensor | None = None,
        in_place: bool = False,
    ) -> Call:
        """The kernel of a node, with its arguments. All its tensors have memory.

        `scratch` is the offset of the node's scratch in the arena, None if it needs none. `shared`
        is scratch of all nodes with the same last source; the first of them fills it. `in_place`
        says that the plan gave the result the memory of the first source.
        """

    @abstractmethod
    def read(self, tensor: Tensor) -> np.ndarray:
        """A contiguous copy of a tensor's numbers; rows of quantised types as bytes."""

    def begin_read(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """Begin to read a tensor; the function waits for its numbers and returns them.

        They are the numbers of now, even if later runs change the tensor. The host can go on while
        the device computes, and waits when it calls the function.
        """
        values = self.read(tensor)
        return lambda: values

    @abstractmethod
    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        """Set a tensor's numbers. `values` has its shape, and a type that NumPy casts to its
        own."""

    def expect(self, arrays: Iterable[np.ndarray]) -> None:
        """Note that arrays of the host, such as a file's weights, will soon be loaded."""
        return

    def load(self, pairs: Iterable[tuple[Tensor, np.ndarray]]) -> None:
        """Set the numbers of many tensors, such as weights, to those of arrays of the same shape,
        type and strides."""
        for tensor, values in pairs:
            self.write(tensor, values)

    def bind_write(self, tensor: Tensor, values: np.ndarray) -> Call:
        """A call that sets a tensor's numbers to those that an array holds when it is called.

        The array has the tensor's shape, type and strides.
        """
        return Call(self.write, tensor, values)

    def bind_copy(
        self, target: Tensor, source: Tensor, giver: "Backend"
    ) -> tuple[Call | None, Call]:
        """Calls that copy a tensor of another device, the giver, to one of this one: one that marks
        that the giver has made it, if there is need, and one before this device reads it. Nothing
        that the giver is asked for after the second changes what arrives."""
        return None, Call(self._copy, target, source, giver)

    def _copy(self, target: Tensor, source: Tensor, giver: "Backend") -> None:
        self.write(target, giver.read(source))

    def bind_stream(self, tensor: Tensor, values: np.ndarray) -> Call:
        """A call that copies a streamed leaf's array, which never changes, to a tensor. It can be
        joined with those of nodes, and run beside them."""
        return self.bind_write(tensor, values)

    def host_memory(self, n_bytes: int) -> np.ndarray:
        """Memory of the host, uint8, for results of this device that lie there for a while."""
        return np.empty(n_bytes, np.uint8)

    def bind_send(self, tensor: Tensor, memory: np.ndarray) -> Call:
        """A call that copies a tensor's numbers to such memory; joined as bind_stream's."""
        return Call(self._send, tensor, memory)

    def bind_return(self, tensor: Tensor, memory: np.ndarray) -> Call:
        """A call that copies them back from there, to another tensor of the same shape and type."""
        return self.bind_write(tensor, memory.view(tensor.dtype.numpy).reshape(tensor.shape))

    def _send(self, tensor: Tensor, memory: np.ndarray) -> None:
        memory[:] = self.read(tensor).reshape(-1).view(np.uint8)

    def copy_rate(self, values: np.ndarray) -> float | None:
        """Bytes a second at which an array is streamed, measured; None if it does not tell."""
        return None

    def scratch(self, node: Tensor) -> int:
        """Bytes of scratch that the node's kernel needs while it runs."""
        return 0

    def shared(self, node: Tensor) -> tuple[int, Hashable]:
        """(bytes, key) of the scratch that the kernel makes of the node's last source alone.

        Nodes with the same last source and equal answers can share it. 0 bytes: there is none.
        """
        return 0, None

    def join(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The calls to start for consecutive nodes: these, or fewer with the same effect.

        An example of fewer is one captured launch of all.
        """
        return calls

    def allocation(self, n_bytes: int) -> int:
        """Bytes of the device's memory that `alloc(n_bytes)` takes."""
        return n_bytes

    def own(self, n_nodes: int) -> int:
        """Bytes of the device's memory that its driver and libraries take besides, for programs of
        so many nodes, of those that are free when it is open."""
        return 0

    def memory(self) -> tuple[int, int] | None:
        """(bytes free now, bytes in all) of a device with memory of its own; None if it cannot
        tell."""
        return None

    def lasting(self, node: Tensor) -> Iterable[tuple[Tensor, int]]:
        """(A leaf that the node reads, bytes of the device's memory that its kernel takes beside
        this leaf's, for all nodes and as long) of each such leaf."""
        return ()

    def links(self) -> "Links | None":
        """Ways to the devices of other processes, not joined yet; None if devices of this kind have
        none. Raises DeviceError, which names what is missing."""
        return None

    def release(self, leaf: Tensor) -> Call | None:
        """A function that frees a leaf's memory until its next read; None if there is no need."""
        return None


class Links(ABC):
    """Ways from a device to those of other processes, by which numbers go without the host.

    place: names the device among all of its host
    """

    place: str

    @abstractmethod
    def word(self) -> str:
        """A word of one process, by which all of them find each other."""

    @abstractmethod
    def join(self, word: str, rank: int, size: int) -> None:
        """Become rank of size processes, all of which call this with the same word."""

    @abstractmethod
    def exchange(
        self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]
    ) -> None:
        """Send tensors of this device to ranks, and receive others from ranks, all at once.

        It is work like a kernel's, after what the device has to do already. What a rank sends
        another, or itself, is received there in the order of sending.
        """

    @abstractmethod
    def wait(self, look: Callable[[], None]) -> None:
        """Wait until exchanges are done. `look` is called meanwhile; by an error that it raises the
        links are cut."""

    @abstractmethod
    def cut(self) -> None:
        """Have the device wait for no other rank; there is no exchange any more."""
