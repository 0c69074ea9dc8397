"""A gradient whose parts are on several devices, in one piece, so that its squares add up in the
order of one device."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

from pyggml.backends import Backend
from pyggml.graph.call import one_by_one
from pyggml.graph.tensor import Tensor, leaf, window
from pyggml.lora.adapter.parameters import Parameters
from pyggml.runtime import Devices

_MOST = 1 << 30  # bytes that are gathered on a device: what a full model trains would fill it


class WholeGradient(ABC):
    """All parts as one leaf. devices: that compute with it"""

    def __init__(self, parameters: Parameters, devices: Devices) -> None:
        self._parts: Sequence[Tensor] = parameters.buffers["gradient"]
        self.whole, self.devices = leaf(parameters.gradient, "gradient"), devices

    @abstractmethod
    def collect(self) -> None:
        """Copy the parts' numbers into the whole."""

    @abstractmethod
    def spread(self) -> None:
        """Copy the whole's numbers into the parts."""


class _OnHost(WholeGradient):
    """In the host's array, whose windows the parts are."""

    def __init__(self, parameters: Parameters, devices: Devices) -> None:
        super().__init__(parameters, Devices([devices.host]))
        self._of_parts = devices

    def collect(self) -> None:
        self._of_parts.gather(*self._parts)

    def spread(self) -> None:
        for part in self._parts:
            self._of_parts.note_change(part, self._of_parts.host)


class _OnFirst(WholeGradient):
    """On the first of several devices that are alike: numbers go from one to the other."""

    def __init__(self, parameters: Parameters, devices: Devices) -> None:
        super().__init__(parameters, devices)
        here = devices.first
        devices.hold(self.whole)
        devices.note_change(self.whole, here)
        self._homes = [devices.home(part) or here for part in self._parts]
        self._in, self._out = [], []
        sizes = [part.n_elements for part in self._parts]
        places = accumulate(sizes, initial=0)
        for part, n, at, there in zip(self._parts, sizes, places, self._homes, strict=False):
            place = devices.copy_of(window(self.whole, at, (n,)), here)
            copy = devices.copy_of(part, there)
            self._in.append([*filter(None, here.bind_copy(place, copy, there))])
            self._out.append([*filter(None, there.bind_copy(copy, place, here))])

    def collect(self) -> None:
        for part, home, calls in zip(self._parts, self._homes, self._in, strict=True):
            self.devices.fetch(part, home)
            one_by_one(calls)

    def spread(self) -> None:
        for part, home, calls in zip(self._parts, self._homes, self._out, strict=True):
            one_by_one(calls)
            self.devices.note_change(part, home)


def gather_whole(parameters: Parameters, devices: Devices) -> WholeGradient:
    """The parts of a gradient, where they are measured."""
    is_on_first = bytes_of_whole(parameters, devices, devices.first) > 0
    return (_OnFirst if is_on_first else _OnHost)(parameters, devices)


def bytes_of_whole(parameters: Parameters, devices: Devices, backend: Backend) -> int:
    """Bytes that the whole takes of a device that is not the host."""
    n, first = parameters.gradient.nbytes, devices.first
    several = len(parameters.buffers["gradient"]) > 1
    alike = not first.is_host and all(map(first.is_like, devices.homes.values()))
    return n if several and alike and n <= _MOST and backend is first else 0
