"""A model of random weights as a GGUF file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import ConfigError, ModelError
from pyggml.fresh.initial import WITHOUT, initial
from pyggml.fresh.rwkv import HEAD_SIZE
from pyggml.fresh.sizes import is_there
from pyggml.graph.dtypes import F32, DType
from pyggml.models import tensors_of
from pyggml.models.weights import FRESH, Tensors
from pyggml.quants import quantize
from pyggml.requantize.mix import is_packed

_FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}  # enum llama_ftype


@dataclass(frozen=True, slots=True)
class Fresh:
    """A model to be written.

    metadata     hyperparameters by GGUF's keys, the architecture among them
    n_vocab      rows of its embedding
    vocabulary   the fields tokenizer.* of so many tokens
    tied         whether the embedding is the output matrix, where the architecture lets it be
    """

    metadata: Mapping[str, object]
    n_vocab: int
    vocabulary: Mapping[str, Any]
    tied: bool = True

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def tensors(self) -> Tensors:
        """What the file will hold. ModelError for keys that are missing or out of bounds, and for
        an architecture that is made of another's weights."""
        if self.architecture in WITHOUT:
            raise ModelError(
                f"{self.architecture} is not begun from scratch: it is made of a trained Qwen 2, "
                "whose attention is exchanged"
            )
        every = tensors_of(self.metadata, self.n_vocab)
        return {n: s for n, s in every.items() if is_there(self.architecture, n, s, self.tied)}


def write(path: str | os.PathLike[str], fresh: Fresh, dtype: DType = F32, seed: int = 0) -> None:
    """Write the model, its vectors and small tensors as F32, its matrices as dtype.

    Raises ConfigError for a type of less than 16 bits, ModelError as `Fresh.tensors`, and GGUFError
    as `gguf.write`.
    """
    if dtype.name not in _FILE_TYPES:
        raise ConfigError(f"a fresh model is of {', '.join(_FILE_TYPES)}, not of {dtype.name}")
    n_layer = int(str(fresh.metadata[f"{fresh.architecture}.block_count"]))
    head_size = int(str(fresh.metadata.get(f"{fresh.architecture}.wkv.head_size", HEAD_SIZE)))
    sources = []
    for name, spec in fresh.tensors().items():
        kept_as = dtype if is_packed(name, spec.shape) else F32
        draw = partial(initial, name, spec.shape, fresh.architecture, n_layer, seed, head_size)
        sources.append((name, kept_as, spec.shape, partial(_packed, draw, kept_as)))
    about = {"general.type": "model", "general.file_type": _FILE_TYPES[dtype.name], FRESH: seed}
    gguf.write(path, {**fresh.metadata, **about, **fresh.vocabulary}, sources)


def _packed(draw: partial[np.ndarray], dtype: DType) -> np.ndarray:
    values = draw()
    return values if dtype is F32 else quantize(values, dtype.name).view(dtype.numpy)
