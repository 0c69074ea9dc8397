"""Hyperparameters, read from GGUF metadata and checked before any kernel sees them."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile, StringArray

# Far above any model, far below what would overflow a shape.
_LIMITS = {
    "context_length": 1 << 24,
    "embedding_length": 1 << 16,
    "block_count": 1024,
    "feed_forward_length": 1 << 20,
    "attention.head_count": 1 << 12,
    "attention.head_count_kv": 1 << 12,
    "attention.key_length": 1 << 12,
    "attention.value_length": 1 << 12,
    "rope.dimension_count": 1 << 12,
    "rope.scaling.original_context_length": 1 << 24,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions; the names are ggml's `rope_ext` arguments."""

    n_dims: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float
    n_ctx_orig: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What the shape of a decoder is made of; lengths are counts of elements."""

    architecture: str
    n_vocab: int
    n_ctx: int  # longest context the model was trained for, in tokens
    n_embd: int
    n_layer: int
    n_ff: int
    n_head: int
    n_head_kv: int
    n_embd_head: int
    rms_eps: float
    rope: RopeConfig


class _Reader:
    """Reads `{architecture}.{key}` with bounds, and collects every fault."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self.faults: list[str] = []

    def _value(self, key: str) -> object:
        return self.file.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to the key's limit."""
        value, most = self._value(key), _LIMITS[key]
        if value is None and default is not None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        found = "missing" if value is None else short(value)
        self.faults.append(f"{self.architecture}.{key} is {found}, wanted 1 to {most}")
        return 1

    def number(self, key: str, default: float | None, low: float, high: float) -> float:
        """A number with low <= number <= high."""
        value = self._value(key)
        if value is None and default is not None:
            return default
        if isinstance(value, int | float) and low <= value <= high:
            return float(value)
        found = "missing" if value is None else short(value)
        self.faults.append(f"{self.architecture}.{key} is {found}, wanted {low:g} to {high:g}")
        return low

    def word(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value = self._value(key)
        if value is None:
            return default
        if value in known:
            return str(value)
        found, wanted = short(value), ", ".join(known)
        self.faults.append(f"{self.architecture}.{key} is {found}, known are {wanted}")
        return default


def short(value: object) -> str:
    """A hostile value in a few characters."""
    if isinstance(value, np.ndarray | StringArray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_config(file: GGUFFile, architecture: str) -> ModelConfig:
    """The hyperparameters of a decoder with rotary positions and RMS norms.

    Raises ModelError with every fault: missing keys, values out of range, sizes that do not fit
    together.
    """
    r = _Reader(file, architecture)
    n_embd = r.count("embedding_length")
    n_head = r.count("attention.head_count")
    n_embd_head = r.count("attention.key_length", max(n_embd // n_head, 1))
    config = ModelConfig(
        architecture=architecture,
        n_vocab=_vocabulary_size(file),
        n_ctx=r.count("context_length"),
        n_embd=n_embd,
        n_layer=r.count("block_count"),
        n_ff=r.count("feed_forward_length"),
        n_head=n_head,
        n_head_kv=r.count("attention.head_count_kv", n_head),
        n_embd_head=n_embd_head,
        rms_eps=r.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0),
        rope=_read_rope(r, n_embd_head),
    )
    value_length = r.count("attention.value_length", n_embd_head)
    if value_length != n_embd_head:
        r.faults.append(f"value_length {value_length} and key_length {n_embd_head} differ")
    if config.n_head % config.n_head_kv:
        r.faults.append(f"{config.n_head} heads cannot share {config.n_head_kv} key heads evenly")
    if config.rope.n_dims % 2 or config.rope.n_dims > n_embd_head:
        r.faults.append(
            f"rope.dimension_count is {config.rope.n_dims}, wanted even and at most {n_embd_head}"
        )
    if r.faults:
        raise ModelError(f"{file.path}: " + "; ".join(dict.fromkeys(r.faults)))
    return config


def _vocabulary_size(file: GGUFFile) -> int:
    """Rows of the token embedding, which is what tokens index."""
    info = file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        raise ModelError(f"{file.path}: has no matrix token_embd.weight, so it is no model")
    return info.shape[0]


def _read_rope(r: _Reader, n_embd_head: int) -> RopeConfig:
    """Scaling as llama.cpp's context sets it up: YaRN's own magnitude factor is cancelled."""
    kinds = ("none", "linear", "yarn", "longrope")
    kind = r.word("rope.scaling.type", "linear", kinds)
    legacy = r.number("rope.scale_linear", 0.0, 0.0, 1e6)
    factor = r.number("rope.scaling.factor", legacy, 0.0, 1e6)
    freq_scale = 1.0 if kind == "none" or factor == 0 else 1.0 / factor
    attn_factor = r.number("rope.scaling.attn_factor", 1.0, 1e-3, 1e3)
    yarn = kind == "yarn"
    if yarn and freq_scale > 1:  # no magnitude is added below a factor of 1, yet ggml divides by it
        attn_factor /= 1.0 + 0.1 * log(1.0 / freq_scale)
    return RopeConfig(
        n_dims=r.count("rope.dimension_count", n_embd_head),
        freq_base=r.number("rope.freq_base", 10000.0, 1.0, 1e12),
        freq_scale=freq_scale,
        ext_factor=1.0 if yarn else 0.0,
        attn_factor=attn_factor,
        n_ctx_orig=r.count("rope.scaling.original_context_length", r.count("context_length")),
    )
