"""Metadata and weights of small models of every architecture, for warm-up and tests."""

from collections.abc import Mapping

import numpy as np

from pyggml.graph.tensor import Shape
from pyggml.models.architecture import Architecture
from pyggml.models.build import compose
from pyggml.models.config import full_key
from pyggml.models.weights import Tensors

_COMMON: Mapping[str, object] = {
    "context_length": 64,
    "embedding_length": 256,  # the largest block of any weight type
    "block_count": 2,  # enough for both types of a mixed file type
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-6,
}


def small_metadata(
    architecture: Architecture, sizes: Mapping[str, object] | None = None
) -> dict[str, object]:
    """GGUF keys of a small model; `sizes` replaces some (named without the architecture)."""
    keys = dict(_COMMON) | dict(architecture.example) | dict(sizes or {})
    own = {full_key(architecture.name, key): value for key, value in keys.items()}
    return {"general.architecture": architecture.name} | own


def tensors_of(metadata: Mapping[str, object], n_vocab: int) -> Tensors:
    """Every tensor, required or optional, of a model file with this metadata."""
    return compose(metadata.get, {"token_embd.weight": (n_vocab, 0)}, "metadata").tensors()


def draw(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Normal random float32 for a tensor of a small model. States decay as in trained models:
    ssm_a, a rate of growth, is negative, and what RWKV 6 has for decays is small."""
    array = rng.standard_normal(shape, np.float32)
    if "time_mix_decay" in name:
        return array / 10
    return -np.abs(array) if name.endswith("ssm_a") else array
