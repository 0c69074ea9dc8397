"""The cache of several sequences: each has a stretch of its rows, and a state of its own."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from pyggml.errors import ConfigError
from pyggml.graph.arrays import copy_rows, detach, read, write
from pyggml.graph.dtypes import DTYPES, F32, DType
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.model import Model
from pyggml.models import Cache
from pyggml.sizes import round_up

State = dict[str, np.ndarray]  # of recurrent parts, after a sequence's last token


# Of keys and values, by their names; with compute f32, f16 stands for float32.
CACHE_TYPES = ("f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
CacheType = str | tuple[str, str]  # of both, or of keys and of values


def _kinds(model: Model, cache_type: CacheType) -> dict[str, DType]:
    """The type of each of the cache's rows; ConfigError for one that is none, or does not fit."""
    both = cache_type if isinstance(cache_type, tuple) else (cache_type, cache_type)
    same = both[0] == both[1]
    sizes = model.parts.decoder.rows()
    kinds = dict[str, DType]()
    for side, kind in zip("kv", both, strict=True):
        setting = "cache_type" if same else f"cache_type_{side}"
        own = {name: n for name, (_, n) in sizes.items() if name.endswith("_v") == (side == "v")}
        kinds |= dict.fromkeys(own, _kind(setting, kind, model.compute, own.values()))
    return kinds


def _kind(setting: str, name: str, compute: str, sizes: Iterable[int]) -> DType:
    if name not in CACHE_TYPES:
        names = f"{', '.join(CACHE_TYPES[:-1])} or {CACHE_TYPES[-1]}"
        raise ConfigError([(setting, f"is {name!r}, wanted {names}")])
    if name == "f16" and compute == "f32":
        return F32
    kind = DTYPES[name.upper()]
    unfit = [size for size in sizes if size % kind.block]
    if unfit:
        raise ConfigError(
            [
                (
                    setting,
                    f"is {name}, which needs heads of a multiple of {kind.block} numbers; "
                    f"this model's have {min(unfit)}",
                )
            ]
        )
    return kind


_LINE = 64  # bytes


def _bytes_aligned(shape: Shape, dtype: DType) -> int:
    return round_up(prod(shape[:-1]) * dtype.row_bytes(shape[-1]), _LINE)


@dataclass(slots=True)
class _Rest:
    """What is left of some memory."""

    memory: np.ndarray


def _leaf_in(rest: _Rest, shape: Shape, dtype: DType, name: str) -> Tensor:
    """A leaf in the first bytes of what is left."""
    held = (*shape[:-1], dtype.row_bytes(shape[-1])) if dtype.quantised else shape
    n = int(np.prod(held)) * np.dtype(dtype.numpy).itemsize
    own, rest.memory = rest.memory[:n], rest.memory[round_up(n, _LINE) :]
    return leaf(own.view(dtype.numpy).reshape(held), name, dtype)


def _zeros(n: int) -> np.ndarray:
    """(n,) uint8 from the start of a cache line on; Linux grants large arrays huge pages."""
    room = np.zeros(n + _LINE, np.uint8)
    return room[-room.ctypes.data % _LINE :][:n]


class CacheMemory:
    """Rows of keys and values for n_slots sequences of n_ctx tokens, then n_spare rows that no
    sequence reads; and one state, that of the sequence which runs."""

    def __init__(
        self,
        model: Model,
        n_slots: int,
        n_ctx: int,
        n_spare: int,
        cache_type: CacheType,
        memory: np.ndarray | None = None,
    ) -> None:
        """memory: (n,) uint8 of the host's, at least `n_bytes_aligned`, in which all lies; None:
        its own"""
        decoder, self.devices = model.parts.decoder, model.devices
        kinds = _kinds(model, cache_type)
        self.n_ctx, self.first_spare = n_ctx, n_slots * n_ctx
        n_rows = self.first_spare + n_spare
        rows, state = decoder.rows(), decoder.state()
        sizes = [_bytes_aligned((n_rows, h * n), kinds[name]) for name, (h, n) in rows.items()]
        n = sum(sizes) + sum(_bytes_aligned(s.shape, s.dtype) for s in state.values())
        if memory is None:  # one array: a prompt's first tokens write to all of its parts
            memory = _zeros(n)
        else:
            memory[:n] = 0
        make = partial(_leaf_in, _Rest(memory))
        self.cache = Cache.empty(rows, state, n_ctx, n_rows, kinds, make)
        self.devices.hold(*self.cache.tensors)
        model.group({**self.cache.rows, **self.cache.state})

    @property
    def n_bytes(self) -> int:
        """Of all rows and states."""
        return sum(t.n_bytes for t in self.cache.tensors)

    @property
    def n_bytes_aligned(self) -> int:
        """Bytes of one piece of memory that has room for all."""
        return sum(_bytes_aligned(t.shape, t.dtype) for t in self.cache.tensors)

    def release(self) -> None:
        """Free all rows and states, on every device."""
        self.devices.drop(*self.cache.tensors)
        detach(*self.cache.tensors)

    def copy_rows(self, source: int, target: int, n: int) -> None:
        """The rows of a sequence's first n tokens become those of another; both by number."""
        of, to = source * self.n_ctx, target * self.n_ctx
        for rows in self.cache.rows.values():
            self.devices.gather(rows)
            copy_rows(rows, of, to, n)
            self.devices.hold(rows)

    def state(self) -> State:
        """A copy of the state."""
        self.devices.gather(*self.cache.state.values())
        return {name: read(t) for name, t in self.cache.state.items()}

    def set_state(self, state: State) -> None:
        """Make this the state that the next pass begins with."""
        for name, t in self.cache.state.items():
            write(t, state[name])
            self.devices.hold(t)
