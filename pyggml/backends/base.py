"""The seam between the engine and a device."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from pyggml.call import Call
from pyggml.tensor import Tensor


class Backend(Protocol):
    """A device. `Buffer` is whatever it addresses memory with; only it looks inside one."""

    name: str

    def alloc(self, n_bytes: int) -> Any:
        """A buffer of n_bytes, aligned to 64 bytes; its contents are undefined."""

    def unsupported(self, node: Tensor) -> str | None:
        """None if this backend can run the node, else the reason in a few words."""

    def scratch(self, node: Tensor) -> int:
        """Bytes of scratch that the node's kernel needs while it runs."""

    def shared(self, node: Tensor) -> tuple[int, Hashable]:
        """Bytes of scratch that its kernel makes of its last source alone, 0 if none, and what it
        makes: nodes with the same last source for which this is equal can share it."""

    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        """Give a tensor `n_bytes` of the arena from `offset` on as its memory."""

    def bind(self, node: Tensor, scratch: Any, shared: Tensor | None = None) -> Call:
        """The kernel of a node whose tensors all have memory, and its arguments.

        `shared` is scratch that nodes with the same last source share; its own source fills it.
        """

    def release(self, leaf: Tensor) -> Call | None:
        """What lets go of a leaf's memory until it is read again, or None if there is no need."""
