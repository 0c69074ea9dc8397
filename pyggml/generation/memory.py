"""The cache of several sequences: each has a stretch of its rows, and a state of its own."""

import numpy as np

from pyggml.backends.cpu import copy_rows, detach, read, write
from pyggml.errors import ConfigError
from pyggml.graph.dtypes import F16, F32, Q8_0, DType
from pyggml.model import Model
from pyggml.models import Cache

State = dict[str, np.ndarray]  # of recurrent parts, after a sequence's last token


CACHE_TYPES = ("f16", "q8_0")  # of keys and values; with compute f32, f16 stands for float32


def _kind(model: Model, cache_type: str) -> DType:
    """The type of keys and values; ConfigError if it is none or does not fit the model's heads."""
    if cache_type not in CACHE_TYPES:
        known = " or ".join(CACHE_TYPES)
        raise ConfigError([("cache_type", f"is {cache_type!r}, wanted {known}")])
    if cache_type == "f16":
        return F32 if model.compute == "f32" else F16
    unfit = {size for _, size in model.parts.decoder.rows().values() if size % Q8_0.block}
    if unfit:
        raise ConfigError(
            [
                (
                    "cache_type",
                    f"is q8_0, which needs heads of a multiple of {Q8_0.block} numbers; "
                    f"this model's have {min(unfit)}",
                )
            ]
        )
    return Q8_0


class Memory:
    """Rows of keys and values for n_slots sequences of n_ctx tokens, then n_spare rows that no
    sequence reads; and one state, that of the sequence which runs."""

    def __init__(
        self, model: Model, n_slots: int, n_ctx: int, n_spare: int, cache_type: str
    ) -> None:
        decoder, self.devices = model.parts.decoder, model.devices
        kind = _kind(model, cache_type)
        self.n_ctx, self.first_spare = n_ctx, n_slots * n_ctx
        n_rows = self.first_spare + n_spare
        self.cache = Cache.empty(decoder.rows(), decoder.state(), n_ctx, n_rows, kind)
        self.devices.hold(*self.cache.tensors)

    @property
    def n_bytes(self) -> int:
        """Of all rows and states."""
        return sum(t.n_bytes for t in self.cache.tensors)

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
