"""How a device computes an op: the site that a kernel is bound to, and the table of its kernels."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from pyggml.graph.tensor import Tensor

Memory = TypeVar("Memory")
OfDevice = TypeVar("OfDevice")  # what scratch depends on besides the node
SiteT = TypeVar("SiteT")
Bound = TypeVar("Bound")
KernelT = TypeVar("KernelT")
Fields = ParamSpec("Fields")


@dataclass(frozen=True, slots=True)
class NodeSite(Generic[Memory]):
    """The memory of one node, as a kernel is bound to it; each device adds what its kernels need.

    scratch    the bytes that the kernel asks for
    in_place   whether the plan gave the result the memory of the first source
    """

    node: Tensor
    out: Memory
    src: tuple[Memory, ...]
    saved: tuple[Memory, ...]
    scratch: Memory
    in_place: bool

    @property
    def scalars(self) -> tuple[Any, ...]:
        """The node's parameters in order of declaration, floats as float32 for the kernels."""
        values = self.node.params.values()
        return tuple(np.float32(v) if isinstance(v, float) else v for v in values)


def nothing_lacks(_node: Tensor) -> str | None:
    """Of a kernel that computes every node of its op."""
    return None


def no_scratch(_node: Tensor, _of_device: Any) -> int:
    """Of a kernel without scratch."""
    return 0


def nothing_shared(_node: Tensor, _of_device: Any) -> tuple[int, str]:
    """Of a kernel that shares no scratch with others."""
    return 0, ""


@dataclass(frozen=True, slots=True)
class DeviceKernel(Generic[SiteT, Bound, OfDevice]):
    """A device's way to compute an op; each device says what its kernels have besides.

    bind      (NodeSite) -> what computes the node, asked once when a plan is bound to memory
    lacks     (node) -> what is missing to compute it, in a few words; None if nothing
    scratch   (node, of the device) -> bytes of scratch
    shared    the same -> (bytes, key) of the scratch made of the last source alone, 0 bytes if
              none; nodes with the same source, function and key share it
    """

    bind: Callable[[SiteT], Bound]
    lacks: Callable[[Tensor], str | None] = nothing_lacks
    scratch: Callable[[Tensor, OfDevice], int] = no_scratch
    shared: Callable[[Tensor, OfDevice], tuple[int, str]] = nothing_shared


class KernelTable(Generic[Fields, KernelT]):
    """The kernels of a device, of this kind, by the name of their op.

    The modules of a package and of its rooms, and further `packages`, enter their own when they are
    imported, at the first call of `kernels`.
    """

    def __init__(self, kind: Callable[Fields, KernelT], package: str, *packages: str) -> None:
        self._kind, self._package, self._others = kind, package, packages
        self._kernels: dict[str, KernelT] = {}

    def declare(self, name: str, *fields: Fields.args, **more: Fields.kwargs) -> None:
        """Enter the kernel of these fields for the op with this name. Raises ValueError if it has
        one."""
        if name in self._kernels:
            raise ValueError(f"op {name!r} has two kernels")
        self._kernels[name] = self._kind(*fields, **more)

    def kernels(self) -> dict[str, KernelT]:
        """All kernels by the op's name."""
        package = importlib.import_module(self._package)
        walked = pkgutil.walk_packages(package.__path__, f"{self._package}.")
        for module in (*self._others, *(module.name for module in walked)):
            importlib.import_module(module)
        return self._kernels
