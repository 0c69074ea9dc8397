"""Adapter → a GGUF file that llama.cpp loads.

general.type           "adapter"
adapter.type           "lora"
general.architecture   the base model's
adapter.lora.alpha     float32
NAME.lora_a, .lora_b   F32 (rank, n_in), (n_out, rank) for the base tensor NAME; one more axis in
                       front for experts; (n_vocab, rank), (n_embd, rank) for the token embedding

llama.cpp takes the rank from the tensors, and scales by alpha / rank with one alpha for the whole
file. An update s·BA of rank r needs the alpha s·r. The file has the alpha of most updates; for any
other one B is multiplied by the ratio. The start that PiSSA subtracts follows A and B, as further
ranks. Two keys of our own (pyggml.models.adapter) let such a file be trained on.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pyggml import gguf
from pyggml.backends import read
from pyggml.dtypes import F32
from pyggml.errors import AdapterError
from pyggml.gguf import TensorSource
from pyggml.lora.config import LoraConfig
from pyggml.lora.parameters import Parameters
from pyggml.model import Model
from pyggml.models import LoraPairs
from pyggml.models.adapter import ALPHAS, FIXED_RANKS


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
        return str(self.model.file.get("general.name", self.model.config.architecture))

    def __repr__(self) -> str:
        c, n = self.config, self.parameters.n_trained
        on = f"{len(self.pairs)} matrices of {self.base_name}"
        return f"<Adapter of rank {c.rank}, alpha {c.alpha:g}, on {on}: {n:,} parameters>"

    @property
    def fits_a_file(self) -> bool:
        """Whether an adapter file can hold the updates: it has no place for DoRA's magnitudes."""
        return not self.config.dora

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapter; an older file at `path` stays whole until the new one is complete.

        Raises AdapterError for DoRA, whose result only `pyggml.lora.merge` writes, and PyggmlError
        if the disk refuses.
        """
        if not self.fits_a_file:
            raise AdapterError("an adapter file cannot hold DoRA's magnitudes: merge(model, path)")
        alphas = {name: pair.scale * self._rank(name) for name, pair in self.pairs.items()}
        alpha = Counter(alphas.values()).most_common(1)[0][0]
        metadata = {
            "general.type": "adapter",
            "general.architecture": self.model.config.architecture,
            "general.name": f"{self.base_name} LoRA",
            "adapter.type": "lora",
            "adapter.lora.alpha": np.float32(alpha),
        }
        if len(set(alphas.values())) > 1:
            metadata[ALPHAS] = np.array([*alphas.values()], np.float64)
        if self.fixed:
            ranks = [self._rank(n) - p.rank for n, p in self.pairs.items()]
            metadata[FIXED_RANKS] = np.array(ranks, np.int32)
        written = [
            tensor
            for name in self.pairs
            for tensor in self._tensors(name, np.float32(alphas[name] / np.float32(alpha)))
        ]
        gguf.write(path, metadata, written)

    def _rank(self, name: str) -> int:
        """The rank in the file, the ranks of the subtracted start included."""
        return sum(pairs[name].rank for pairs in (self.pairs, self.fixed) if name in pairs)

    def _tensors(self, name: str, ratio: np.float32) -> Iterator[TensorSource]:
        """A and B of one update, for a file whose alpha is 1 / ratio of the update's own."""
        pairs = [some[name] for some in (self.pairs, self.fixed) if name in some]
        a, b = (read(t) for t in (pairs[0].a, pairs[0].b))
        if len(pairs) > 1:  # matrices alone have a second one
            a = np.concatenate([a, read(pairs[1].a)])
            b = np.concatenate([b, read(pairs[1].b)], axis=1)
        if ratio != 1:
            b = b * ratio
        for t, values in ((pairs[0].a, a), (pairs[0].b, b)):
            yield t.name, F32, values.shape, values
