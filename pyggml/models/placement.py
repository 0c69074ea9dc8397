"""Which device computes which blocks of a model: llama.cpp's --gpu-layers and --tensor-split.

The last blocks go to the devices, and the output with them if more layers are asked for than there
are blocks; what comes before, with the embedding, stays with the host. Where everything is on
devices, the embedding is on the first.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from math import inf

from pyggml.backends import Backend
from pyggml.errors import ConfigError

OUTPUT = "output"
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


def group_of(name: str) -> Hashable:
    """The block, by number, or OUTPUT, that a weight, a parameter or a cache is named after; None
    for what all blocks read, or an embedding, which the output may read too."""
    block = _BLOCK.search(name)
    return int(block[1]) if block else OUTPUT if name.startswith((OUTPUT, "cls")) else None


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """homes: number of a block, or OUTPUT → its device; first: that of the embedding; why: what
    decided it, a sentence, if that was not the caller."""

    homes: Mapping[Hashable, Backend]
    first: Backend
    why: str = ""

    @classmethod
    def of(
        cls,
        n_blocks: int,
        host: Backend,
        devices: Sequence[Backend],
        n_layers: int,
        shares: Sequence[float] = (),
    ) -> "Placement":
        """n_layers: the blocks on devices, and one more for the output; shares: of each device, in
        any unit, by default as much as it has free; as many again go on from the first device.
        Raises ConfigError for shares that do not fit.
        """
        shares = tuple(shares) or _free(devices)
        if len(shares) % len(devices) or not all(0 <= s < inf for s in shares) or not any(shares):
            words = ",".join(f"{share:g}" for share in shares)
            shape = f"a share from 0 on for each of {_join([d.name for d in devices])}"
            raise ConfigError([("split", f"is {words}, wanted {shape}, not all of them 0")])
        n_layers = min(n_layers, n_blocks + 1)
        ends = [end / sum(shares) for end in accumulate(shares)]
        start = max(n_blocks - n_layers, 0)
        layers = [*range(start, n_blocks), OUTPUT][:n_layers]
        homes: dict[Hashable, Backend] = dict.fromkeys((*range(n_blocks), OUTPUT), host)
        for i, layer in enumerate(layers):
            at = min(bisect_right(ends, i / n_layers), len(shares) - 1)
            homes[layer] = devices[at % len(devices)]
        return cls(homes, devices[0] if n_layers > n_blocks else host)

    def __str__(self) -> str:
        """cpu: the embedding, blocks 0 to 11 and the output; cuda:0: blocks 12 to 35; and why."""
        parts: dict[Backend, list[str]] = {self.first: ["the embedding"]}
        for device, layers in groupby(self.homes, self.homes.__getitem__):
            every = [*layers]
            blocks = [str(n) for n in every if n != OUTPUT]
            words = parts.setdefault(device, [])
            if blocks:
                ends = dict.fromkeys((blocks[0], blocks[-1]))
                words.append(f"block{'s' * (len(ends) > 1)} {' to '.join(ends)}")
            words += ["the output"] if OUTPUT in every else []
        texts = (f"{device.name}: {_join(words)}" for device, words in parts.items())
        return "; ".join(filter(None, (*texts, self.why)))


def lack_of(device: Backend, n_bytes: int) -> str | None:
    """A clause if a device has less memory free than so many bytes; None if it cannot tell."""
    memory = None if device.is_host else device.memory()
    if memory is None or n_bytes <= memory[0]:
        return None
    free = f"of whose {memory[1]:,} bytes {memory[0]:,} are free"
    return f"the model needs {n_bytes:,} bytes of {device.name}, {free}"


def most_layers(n_all: int, lack: Callable[[int], str | None]) -> tuple[int, str]:
    """The most layers that fit on devices, and why no more. lack: says of so many what a device
    lacks; of 0 it is not asked."""
    least, most, why = 0, n_all, f"all {n_all} layers fit"
    while least < most:
        middle = (least + most + 1) // 2
        if (fault := lack(middle)) is None:
            least = middle
        else:
            most, why = middle - 1, f"{middle - 1} of {n_all} layers fit; with one more {fault}"
    return least, why


def _free(devices: Sequence[Backend]) -> tuple[float, ...]:
    """The bytes that each has free; 1 of each where one does not tell."""
    free = [float(memory[0]) if (memory := d.memory()) else inf for d in devices]
    return tuple(free) if 0 < sum(free) < inf else (1.0,) * len(devices)


def _join(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
