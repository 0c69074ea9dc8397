"""Updates of a model's tensors → an adapter file that llama.cpp loads.

general.type           "adapter"
adapter.type           "lora"
general.architecture   the base model's
adapter.lora.alpha     float32
NAME.lora_a, .lora_b   F32 (rank, n_in), (n_out, rank) for the base tensor NAME; one more axis in
                       front for experts; (n_vocab, rank), (n_embd, rank) for the token embedding

llama.cpp takes the rank from the tensors, and scales by alpha / rank with one alpha for the whole
file. An update s·BA of rank r needs the alpha s·r. The file has the alpha of most updates; for any
other one B is multiplied by the ratio. A key of our own has each one's alpha, so that B can be had
back.
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import NotFiniteError
from pyggml.gguf import TensorSource
from pyggml.graph.dtypes import F32
from pyggml.model import Model
from pyggml.models.adapter import ALPHAS, BASE_NAME, SUFFIXES


@dataclass(frozen=True, slots=True)
class Update:
    """One tensor's A and B, float32, and the alpha that llama.cpp would divide by their rank."""

    a: np.ndarray
    b: np.ndarray
    alpha: float


def base_name(model: Model) -> str:
    """The base model's name, from its file."""
    return str(model.file.get("general.name", model.config.architecture))


def base_keys(model: Model) -> dict[str, Any]:
    """The keys by which an adapter names the model that it is for."""
    return {"general.base_model.count": np.uint32(1), BASE_NAME: base_name(model)}


def write_adapter(
    path: str | os.PathLike[str],
    model: Model,
    updates: Mapping[str, Update],
    more: Mapping[str, Any],
) -> None:
    """Write updates of a model, by the name of their tensor; `more` are further keys.

    An older file at `path` stays whole until the new one is complete. NotFiniteError for numbers
    that are not finite, PyggmlError if the disk refuses.
    """
    alphas = [u.alpha for u in updates.values()]
    alpha = Counter(alphas).most_common(1)[0][0]
    metadata = {
        "general.type": "adapter",
        "general.architecture": model.config.architecture,
        "general.name": f"{base_name(model)} LoRA",
        "adapter.type": "lora",
        "adapter.lora.alpha": np.float32(alpha),
    }
    if len(set(alphas)) > 1:
        metadata[ALPHAS] = np.array(alphas, np.float64)
    tensors: list[TensorSource] = []
    for base, update in updates.items():
        ratio = np.float32(update.alpha / np.float32(alpha))
        b = update.b if ratio == 1 else update.b * ratio
        for suffix, values in zip(SUFFIXES, (update.a, b), strict=True):
            if not np.isfinite(values).all():
                raise NotFiniteError(f"{base + suffix}: not all of its numbers are finite")
            tensors.append((base + suffix, F32, values.shape, values))
    gguf.write(path, {**metadata, **more}, tensors)
