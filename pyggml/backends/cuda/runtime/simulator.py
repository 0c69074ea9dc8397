"""What only Numba's simulator needs (NUMBA_ENABLE_CUDASIM=1), where Python threads run the kernels.

It has no PTX and no warps: there a warp is one thread, and a block has one row. A function of
pyggml/backends/cuda/code without which kernels could not run there has a twin here, by its name;
the others raise when they are called, and products take paths without tensor cores. Launches are
small: each thread of a block is a thread of Python. A function of the runtime that asks the driver
is `on_card`, and has a twin here as well: the card's memory is the host's, and all work is done at
once.
"""

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

from pyggml.backends.cuda.runtime.toolkit import SIMULATED, cuda

F = TypeVar("F", bound=Callable)
HAS_PTX = not SIMULATED  # and warps of 32 lanes
_CODE = "pyggml.backends.cuda.code."
_device: Any = cuda.jit(device=True)


def small(n: int, simulated: int = 2) -> int:
    """n of a card; in the simulator a smaller number."""
    return simulated if SIMULATED else n


def twin_of(function: Callable) -> Any:
    """What takes the place of a device function in the simulator; None if the function itself."""
    if not SIMULATED:
        return None
    return TWINS.get(function.__name__) if (function.__module__ or "").startswith(_CODE) else None


def on_card(function: F) -> F:
    """A function, or class, of a card; in the simulator its twin."""
    return TWINS[function.__name__] if SIMULATED else function


def absent(function: Callable) -> Callable:
    """What stands for an instruction that the simulator lacks."""

    def missing(*_: Any) -> None:
        raise NotImplementedError(f"the simulator has no {function.__name__}")

    return missing


# -- twins --------------------------------------------------------------------------------------


def _bytes(raw, at, n):
    return bytes(int(raw[at + i]) for i in range(n))


def load_half(raw, at):
    return np.frombuffer(_bytes(raw, at, 2), np.float16)[0].astype(np.float32)


def load_byte(raw, at):
    return np.uint32(raw[at])


def load_short(raw, at):
    return np.frombuffer(_bytes(raw, at, 2), np.uint16)[0].astype(np.uint32)


def load_word(raw, at):
    return np.frombuffer(_bytes(raw, at, 4), np.uint32)[0]


def as_float(word):
    return np.uint32(word).view(np.float32)


def bits_of(x):
    return np.float32(x).view(np.uint32)


def bits_of_all(_values):
    return np.uint32(0)


def power_of_two(x):
    return np.exp2(np.float32(x))


def reciprocal(x):
    return np.float32(1) / np.float32(x)


def logarithm_of_two(x):
    return np.log2(np.float32(x))


def bf16_bits(x):
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint16(0x7FC0)
    return np.uint16((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) >> 16)


def put_four_bf16(out, i, *numbers):
    for k, x in enumerate(numbers):
        out[i + k] = bf16_bits(x)


def put_eight(out, i, *numbers):
    for k, x in enumerate(numbers):
        out[i + k] = x


def load_four(x, i):
    return x[i], x[i + 1], x[i + 2], x[i + 3]


def load_four_bf16(x, i):
    return tuple((np.uint32(x[i + k]) << np.uint32(16)).view(np.float32) for k in range(4))


def without_operands():
    """One without operands, such as one that orders what threads of a card do."""


def sync_warp():
    """A warp is one thread."""


def warp_sum(x):
    return x


@_device
def take_ticket(tickets, at, last):
    return cuda.atomic.inc(tickets, at, last)


@_device
def block_sum(x, parts):
    parts[cuda.threadIdx.x] = x
    cuda.syncthreads()
    total = parts[0]
    for i in range(1, cuda.blockDim.x):
        total += parts[i]
    cuda.syncthreads()
    return total


@_device
def block_max(x, parts):
    parts[cuda.threadIdx.x] = x
    cuda.syncthreads()
    top = parts[0]
    for i in range(1, cuda.blockDim.x):
        top = max(top, parts[i])
    cuda.syncthreads()
    return top


# -- twins of what asks the driver --------------------------------------------------------------


class SimulatedEvent:
    """All work is done at once: nobody waits."""

    def record(self, _stream: Any) -> None: ...

    def hold(self, _stream: Any) -> None: ...

    def wait(self, _before: float = 0.0) -> float:
        return 0.0


def address(array: Any) -> int:
    return int((array if isinstance(array, np.ndarray) else array._ary).ctypes.data)


def shared_cell() -> tuple[Any, np.ndarray]:
    cell = cuda.mapped_array(1, np.int32)
    cell._ary[0] = 0
    return cell, cell._ary


def sender(target: Any, values: np.ndarray, _stream: Any) -> Callable[[], object]:
    return partial(ctypes.memmove, target.address, values.ctypes.data, target.n)


def receive(start: int, source: Any, _stream: Any) -> None:
    ctypes.memmove(start, source.address, source.n)


@cache
def driver_calls() -> tuple[Any, Any, Any]:
    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 4)
    def copy(target: int, source: int, n: int, _stream: int) -> int:
        ctypes.memmove(target, source, n)
        return 0

    wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)(lambda _event: 0)
    mark = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_size_t] * 2)(lambda _event, _stream: 0)
    return copy, wait, mark


def copy_between(_to: int, target: int, _of: int, source: int, n: int, _stream: Any) -> None:
    ctypes.memmove(target, source, n)


def nothing(*_: Any) -> None:
    """There is nothing to do, or there is none."""


_BY_THEIR_NAMES = (
    address, shared_cell, copy_between, load_half, load_byte, load_short, load_word, as_float,
    bits_of, bits_of_all, power_of_two, reciprocal, logarithm_of_two, bf16_bits, put_four_bf16,
    put_eight, load_four, load_four_bf16, without_operands, sync_warp, warp_sum, take_ticket,
    block_sum, block_max,
)  # fmt: skip
TWINS: dict[str, Any] = {
    **{twin.__name__: twin for twin in _BY_THEIR_NAMES},
    **dict.fromkeys(("make_current", "free_what_is_gone", "unlock_pages", "_wait"), nothing),
    **dict.fromkeys(("_end_stream", "_end_events", "_library"), nothing),
    **dict.fromkeys(("_new_stream", "least_shared"), lambda: 0),
    "Event": SimulatedEvent,
    "_sender": sender,
    "_receive": receive,
    "_driver_calls": driver_calls,
    "_copy": ctypes.memmove,
    "_lock_memory": lambda n_bytes: np.empty(n_bytes, np.uint8),
    "_new_events": lambda: np.zeros(2, np.int64),
    "start_of": address,
    "lock_pages": lambda _start, _n: True,
    "tile_rows": lambda _: 4,
    "has_clusters": lambda: False,
    "versions": lambda: ((0, 0), (0, 0)),
    "description_of": lambda _: ("simulator", (8, 0), 0),
    "put_eight_bf16": put_four_bf16,
    "store_four": put_eight,
    "warp_max": warp_sum,
}
