"""The seam between the engine and a device."""

from __future__ import annotations

from typing import Any, Protocol

from pyggml.tensor import Call, Tensor


class Backend(Protocol):
    """A device. `Buffer` is whatever it addresses memory with; only it looks inside one."""

    name: str

    def alloc(self, n_bytes: int) -> Any:
        """A buffer of n_bytes, aligned to 64 bytes; its contents are undefined."""

    def unsupported(self, node: Tensor) -> str | None:
        """None if this backend can run the node, else the reason in a few words."""

    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        """Give a tensor `n_bytes` of the arena from `offset` on as its memory."""

    def bind(self, node: Tensor, work: Any, shared: Tensor | None = None) -> Call:
        """The kernel of a node whose tensors all have memory, and its arguments.

        `shared` is scratch that nodes with the same last source share; its own source fills it.
        """

    def release(self, leaf: Tensor) -> Call | None:
        """What lets go of a leaf's memory until it is read again, or None if there is no need."""
