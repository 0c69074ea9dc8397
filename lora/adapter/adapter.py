"""Adapter: the trained updates of a model's matrices, and the file that holds them.

The start that PiSSA subtracts follows A and B in the file, as further ranks. Two keys of our own
(pyggml.models.adapter) let such a file be trained on.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.errors import AdapterError
from pyggml.graph.arrays import read
from pyggml.lora.adapter.file import Update, base_keys, base_name, write_adapter
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import LoraConfig
from pyggml.model import Model
from pyggml.models import LoraPairs
from pyggml.models.adapter import FIXED_RANKS
from pyggml.models.stack import base_metadata, below_metadata


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Adapter:
    """Low-rank updates of a model's matrices.

    model        their model, with the updates in its graphs: its logits follow training
    parameters   the numbers of the updates; `pairs` are views of these
    fixed        the start that PiSSA subtracts, as a constant adapter below `pairs`
    """

    model: Model
    config: LoraConfig
    parameters: Parameters
    pairs: LoraPairs
    fixed: LoraPairs

    @property
    def base_name(self) -> str:
        """The base model's name, from its file."""
        return base_name(self.model)

    def __repr__(self) -> str:
        c, n = self.config, self.parameters.n_trained
        on = f"{len(self.pairs)} matrices of {self.base_name}"
        return f"<Adapter of rank {c.rank}, alpha {c.alpha:g}, on {on}: {n:,} parameters>"

    @property
    def fits_a_file(self) -> bool:
        """Whether an adapter file can hold the updates: it has no place for DoRA's magnitudes."""
        return not self.config.dora

    def save(self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None) -> None:
        """Write the adapter; an older file at `path` stays whole until the new one is complete.

        metadata: further keys, which replace those of the parameters, such as the template of the
        chats that were learned, which commands then use. A key that is None is left out.

        Raises AdapterError for DoRA, whose result only `pyggml.lora.merge` writes, and PyggmlError
        if the disk refuses.
        """
        self.model.devices.gather(*self.parameters.buffers["data"])  # in a callback a device has it
        if not self.fits_a_file:
            raise AdapterError("an adapter file cannot hold DoRA's magnitudes: merge(model, path)")
        below = [p for p in self.model.adapters if p is not self.pairs and p is not self.fixed]
        more = base_keys(self.model) | below_metadata(below) | base_metadata(self.model.file)
        keys = {**self.parameters.metadata, **(metadata or {})}
        more |= {key: value for key, value in keys.items() if value is not None}
        if self.fixed:
            ranks = [self._rank(n) - p.rank for n, p in self.pairs.items()]
            more[FIXED_RANKS] = np.array(ranks, np.int32)
        write_adapter(path, self.model, {name: self._update(name) for name in self.pairs}, more)

    def _rank(self, name: str) -> int:
        """The rank in the file, the ranks of the subtracted start included."""
        return sum(pairs[name].rank for pairs in (self.pairs, self.fixed) if name in pairs)

    def _update(self, name: str) -> Update:
        """A and B of one tensor as the file has them."""
        pairs = [pairs_of[name] for pairs_of in (self.pairs, self.fixed) if name in pairs_of]
        a, b = (read(t) for t in (pairs[0].a, pairs[0].b))
        if len(pairs) > 1:  # matrices alone have a second one
            a = np.concatenate([a, read(pairs[1].a)])
            b = np.concatenate([b, read(pairs[1].b)], axis=1)
        return Update(a, b, pairs[0].scale * self._rank(name))
