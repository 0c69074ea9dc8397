"""The seam between the engine and a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from pyggml.call import Call
from pyggml.tensor import Tensor


class Backend(ABC):
    """A device: memory, and kernels by op.

    A buffer is whatever the device addresses memory with; only the device looks inside. It keeps
    the buffer of a tensor in `Tensor.data`. `is_host`: it computes in the memory of leaves, as that
    lies; any other device has copies of them.
    """

    name: str
    is_host: bool = False

    @abstractmethod
    def unsupported(self, node: Tensor) -> str | None:
        """None if this device can run the node, else the reason in a few words."""

    @abstractmethod
    def alloc(self, n_bytes: int) -> Any:
        """A buffer of n_bytes, aligned to 64 bytes; its contents are undefined."""

    @abstractmethod
    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        """Give a tensor `n_bytes` of the arena from `offset` on as its memory."""

    @abstractmethod
    def bind(
        self, node: Tensor, arena: Any, scratch: int | None, shared: Tensor | None = None
    ) -> Call:
        """The kernel of a node whose tensors all have memory, and its arguments.

        `scratch` is where in the arena the node's scratch begins, None if it needs none. `shared`
        is scratch that nodes with the same last source share; its own source fills it.
        """

    @abstractmethod
    def read(self, tensor: Tensor) -> np.ndarray:
        """A copy of a tensor's numbers without gaps; rows of quantised types as bytes."""

    @abstractmethod
    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        """Set a tensor's numbers to `values`, of its shape and type or such as NumPy casts."""

    def scratch(self, node: Tensor) -> int:
        """Bytes of scratch that the node's kernel needs while it runs."""
        return 0

    def shared(self, node: Tensor) -> tuple[int, Hashable]:
        """Bytes of scratch that its kernel makes of its last source alone, 0 if none, and what it
        makes: nodes with the same last source for which this is equal can share it."""
        return 0, None

    def joined(self, calls: Sequence[Call]) -> Sequence[Call]:
        """The calls of nodes that run one after the other, as the device starts them: as they are,
        or fewer that do the same, such as one captured launch of all."""
        return calls

    def release(self, leaf: Tensor) -> Call | None:
        """What lets go of a leaf's memory until it is read again, or None if there is no need."""
        return None
