"""Weights of blocks that stay in the model's file, and are copied to a device in every pass."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pyggml.backends import Backend
from pyggml.backends.cpu.pages import have_room_locked, map_of
from pyggml.errors import ConfigError
from pyggml.gguf.mapped import MappedFile
from pyggml.graph.arrays import array, is_constant
from pyggml.graph.tensor import Tensor
from pyggml.models.placement import group_of
from pyggml.runtime import Devices

WORDS = ("auto", "on", "off")
_ASSUMED = 20e9  # bytes a second to a device that does not tell
_READ = 64 << 20  # bytes, of which a disk's speed is measured


@dataclass(frozen=True, slots=True)
class Streaming:
    """What streams, and how fast.

    n_blocks, n_all   blocks that stream, and those that there are
    n_bytes           of their weights
    rate              bytes a second to the device
    how               how the rate is known, in brackets
    why               what decided it, if that was not the caller
    """

    n_blocks: int
    n_all: int
    n_bytes: int
    rate: float
    how: str
    why: str = ""

    def __str__(self) -> str:
        """12 of 80 blocks stay in the file, 6.3 GB, copied in 0.11 s at 55.2 GB/s (measured)"""
        blocks = f"{self.n_blocks} of {self.n_all} blocks stay in the file"
        return "; ".join(filter(None, (f"{blocks}, {self.copies(self.n_bytes)}", self.why)))

    def copies(self, n_bytes: int) -> str:
        """So many bytes, and what copying them takes."""
        taken = f"{n_bytes / self.rate:.2g} s at {self.rate / 1e9:.3g} GB/s ({self.how})"
        return f"{n_bytes / 1e9:.3g} GB, copied in {taken}"


def block_bytes(weights: Mapping[str, Tensor]) -> Counter[int]:
    """Bytes of the weights of each block that can stream: those that never change."""
    sizes = Counter[int]()
    for name, w in weights.items():
        if isinstance(block := group_of(name), int) and w.op is None and is_constant(w):
            sizes[block] += w.n_bytes
    return sizes


def is_streamed(block: int, n_blocks: int, n_streamed: int) -> bool:
    """Whether a block is among those that stream, which are spread evenly."""
    return (block + 1) * n_streamed // n_blocks > block * n_streamed // n_blocks


def fewest_blocks(sizes: Mapping[int, int], n_blocks: int, n_bytes: int) -> int:
    """How many blocks must stream, so that the others take at most n_bytes."""
    for n in range(n_blocks):
        if sum(s for i, s in sizes.items() if not is_streamed(i, n_blocks, n)) <= n_bytes:
            return n
    return n_blocks


def stream_blocks(
    weights: Mapping[str, Tensor], devices: Devices, n_blocks: int, n_streamed: int, why: str = ""
) -> Streaming | None:
    """Have devices stream the weights of so many blocks, if they compute with them; None: of none.

    It holds of graphs that are scheduled from now on. Raises ConfigError where no device can, and
    if there are no such weights.
    """
    able = [d for d in devices.backends if d.streamed is not None]
    sizes = {i: n for i, n in block_bytes(weights).items() if is_streamed(i, n_blocks, n_streamed)}
    if n_streamed and not (able and sizes):
        lack = "a device that can stream: device cuda" if not able else "weights that never change"
        raise ConfigError([("stream_weights", f"is on, wanted {lack}")])
    own = (w for name, w in weights.items() if group_of(name) in sizes and w.op is None)
    chosen = [w for w in own if is_constant(w)]
    for device in able:
        assert device.streamed is not None
        device.streamed.clear()
        device.streamed.update(chosen)
    devices.ahead, devices.parked = max(sizes.values(), default=0), 0
    if not chosen:
        return None
    largest = max(chosen, key=lambda w: w.n_bytes)
    return Streaming(n_streamed, n_blocks, sum(sizes.values()), *_rate(able[0], largest), why)


def _rate(device: Backend, weight: Tensor) -> tuple[float, str]:
    """Bytes a second of copies to a device, and how that is known."""
    values = array(weight)
    measured = device.copy_rate(values)
    rate, how = (_ASSUMED, "assumed") if measured is None else (measured, "measured")
    mapped = map_of(values)
    if isinstance(mapped, MappedFile) and not have_room_locked(len(mapped)):
        from_disk = mapped.disk_rate(_READ)
        if from_disk < rate:
            return from_disk, "as measured from the disk, since memory is too small for the file"
    return rate, how
