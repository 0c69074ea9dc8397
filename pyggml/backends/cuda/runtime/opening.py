"""Which cards there are, and what is missing where there is none. Numba's CUDA comes on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyggml.backends.cuda.runtime.capability import most
from pyggml.errors import DeviceError
from pyggml.extras import how_to_install

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend
    from pyggml.backends.cuda.runtime.kernel import Compute

WANTED = how_to_install("cuda")
OLDEST = (8, 0)  # compute capability from which tensor cores multiply BF16: Ampere, 2020


@dataclass(frozen=True, slots=True)
class Card:
    """An NVIDIA card: its number, its name, its compute capability and its memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    n_bytes: int


_OPENED: list[Card] = []  # by this process


def cards() -> list[Card]:
    """The cards that can be used; the simulator's is one.

    Raises DeviceError, one sentence that names what is missing, if there is none, and ConfigError
    if kernels are to be made for a capability that is not known (capability.py).
    """
    most()
    try:
        from pyggml.backends.cuda.runtime.driver import description_of, driver, versions
    except ImportError as error:
        missing = f"the package {error.name}" if error.name else str(error)
        raise DeviceError(f"no CUDA device: {missing} is missing, wanted {WANTED}") from error
    try:
        runs, made_for = versions()
        if runs[0] < made_for[0]:
            raise DeviceError(
                f"no CUDA device: the driver runs CUDA {runs[0]}.{runs[1]}, wanted a driver for "
                f"{made_for[0]}.{made_for[1]}, the version of numba-cuda's compiler"
            )
        present = [Card(i, *description_of(i)) for i in range(driver.get_device_count())]
    except Exception as error:
        if (reason := _reason(error)) is None:
            raise
        raise DeviceError(f"no CUDA device: {reason}") from error
    usable = [card for card in present if card.capability >= OLDEST]
    if not usable:
        names = ", ".join(f"{c.name} ({c.capability[0]}.{c.capability[1]})" for c in present)
        advice = f"wanted one of compute capability {OLDEST[0]}.{OLDEST[1]} or later"
        raise DeviceError(f"no CUDA device: found {names or 'no card'}, {advice}")
    return usable


def _reason(error: Exception) -> str | None:
    """Why the driver cannot be asked; None if the error has another cause."""
    from pyggml.backends.cuda.runtime.driver import CudaSupportError
    from pyggml.backends.cuda.runtime.failures import is_failure, reason_of

    if not isinstance(error, CudaSupportError) and not is_failure(error):
        return None
    reason = reason_of(error).removeprefix("Error at driver init:").strip(" .:")
    if type(error).__name__ == "DynamicLibNotFoundError":  # of the compiler's, with where it was
        return f"{reason.partition(':')[0]}, wanted {WANTED}"
    if "CUDA_ERROR" in reason:
        return reason
    return f"{reason.split('. ')[0]}, wanted NVIDIA's driver"  # it is not there, or does not load


def open_cuda(index: int | None = None, compute: Compute = "bf16") -> CudaBackend:
    """The backend of the card with this number, by default of the first that can be used.

    Raises DeviceError if there is none, or if the process uses one of another compute capability:
    it decides what kernels are compiled for, and how much shared memory they may have.
    """
    present = cards()
    if index is not None and index not in {card.index for card in present}:
        names = ", ".join(f"cuda:{card.index} ({card.name})" for card in present)
        raise DeviceError(f"cuda:{index}: no such device, found {names}")
    chosen = next(card for card in present if index in (None, card.index))
    for other in _OPENED:
        if other.capability != chosen.capability:
            raise DeviceError(
                f"{_full_name(chosen)}: this process uses {_full_name(other)}, "
                "wanted cards of one compute capability"
            )
    from pyggml.backends.cuda.runtime.device import CudaBackend

    backend = CudaBackend(chosen.index, compute)
    _OPENED.append(chosen)
    return backend


def _full_name(card: Card) -> str:
    major, minor = card.capability
    return f"cuda:{card.index} ({card.name}, compute capability {major}.{minor})"
