"""The cache of several sequences: each has a stretch of its rows, and a state of its own."""

from __future__ import annotations

import numpy as np

from pyggml.backends import copy_rows, read, write
from pyggml.dtypes import F16, F32
from pyggml.model import Model
from pyggml.models import Cache

State = dict[str, np.ndarray]  # of recurrent parts, after a sequence's last token


class Memory:
    """Rows of keys and values for n_slots sequences of n_ctx tokens, then n_spare rows that no
    sequence reads; and one state, that of the sequence which runs."""

    def __init__(self, model: Model, n_slots: int, n_ctx: int, n_spare: int) -> None:
        decoder, self.devices = model.parts.decoder, model.devices
        kind = F32 if model.compute == "f32" else F16
        self.n_ctx, self.first_spare = n_ctx, n_slots * n_ctx
        n_rows = self.first_spare + n_spare
        self.cache = Cache.empty(decoder.rows(), decoder.state(), n_ctx, n_rows, kind)
        self.devices.hold(*self.cache.tensors)

    @property
    def n_bytes(self) -> int:
        """Of all rows and states."""
        return sum(t.n_bytes for t in self.cache.tensors)

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
