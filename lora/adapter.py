"""Adapter → a GGUF file that llama.cpp loads.

general.type = "adapter", adapter.type = "lora", general.architecture as the base model's,
adapter.lora.alpha float32; F32 tensors NAME.lora_a (rank, n_in) and NAME.lora_b (n_out, rank) for
the base tensor NAME, with one more axis in front for experts, and (n_vocab, rank), (n_embd, rank)
for the token embedding. llama.cpp takes the rank from the tensors and scales by alpha / rank.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from pyggml import gguf
from pyggml.backends import read
from pyggml.dtypes import F32
from pyggml.gguf import TensorSource
from pyggml.lora.config import LoraConfig
from pyggml.lora.parameters import Parameters
from pyggml.model import Model
from pyggml.models import LoraPairs
from pyggml.tensor import Tensor


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Adapter:
    """Low-rank updates of a model's matrices.

    model        the model that they were made for, with them: what it computes follows training
    parameters   their numbers; `pairs` are views of these
    """

    model: Model
    config: LoraConfig
    parameters: Parameters
    pairs: LoraPairs

    @property
    def base_name(self) -> str:
        """What the base model's file calls it."""
        return str(self.model.file.get("general.name", self.model.config.architecture))

    def __repr__(self) -> str:
        c, n = self.config, self.parameters.n_trained
        on = f"{len(self.pairs)} matrices of {self.base_name}"
        return f"<Adapter of rank {c.rank}, alpha {c.alpha:g}, on {on}: {n:,} parameters>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the adapter; an older file at `path` stays whole until the new one is complete.

        Raises PyggmlError if the disk refuses.
        """
        metadata = {
            "general.type": "adapter",
            "general.architecture": self.model.config.architecture,
            "general.name": f"{self.base_name} LoRA",
            "adapter.type": "lora",
            "adapter.lora.alpha": np.float32(self.config.alpha),
        }
        tensors = [_source(t) for pair in self.pairs.values() for t in (pair.a, pair.b)]
        gguf.write(path, metadata, tensors)


def _source(t: Tensor) -> TensorSource:
    return t.name, F32, t.shape, read(t)
