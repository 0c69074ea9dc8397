"""What a peer is, and what PyTorch makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import gguf
import numpy as np

Arrays = dict[str, np.ndarray]

N_VOCAB, N_TOKENS = 64, 24
SIZES = {
    "vocab_size": N_VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KEYS = {
    "vocab_size": N_VOCAB,
    "embedding_length": 32,
    "feed_forward_length": 48,
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "context_length": 64,
}
LORA_RANK, LORA_SCALE = 2, 3.0


def drawn(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Matrices keep the size of what they multiply; weights of norms are near 1, others near 0."""
    x = rng.standard_normal(shape)
    if len(shape) > 1 and "norm" not in name:
        return 1.2 * x / shape[-1] ** 0.5 if shape[0] != N_VOCAB else 0.5 * x
    return 1 + 0.2 * x if name.endswith("weight") else 0.2 * x


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One small model of a transformers class.

    name      of the golden files; the architecture's, with a word more where there are several
    model     transformers' class; `config` are arguments of its config class, besides SIZES
    keys      of the GGUF file without the architecture's name, besides KEYS; None leaves one out
    convert   name in transformers -> array, to the same or to GGUF names: what the converter does
              besides renaming. It may reorder, split and stack matrices, but not compute.
    draw      name, shape and generator -> the numbers of a tensor
    extra     tensors of the file that no parameter becomes, by GGUF name
    fixed     endings of GGUF names of matrices that no adapter can update
    buffers   endings of names in transformers of buffers that the file holds as well
    not_in_llama_cpp  why llama.cpp cannot load it, if it cannot
    """

    name: str
    architecture: str
    model: str
    config: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Arrays], Arrays] = dict
    draw: Callable[[str, tuple[int, ...], np.random.Generator], np.ndarray] = drawn
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    fixed: tuple[str, ...] = ("norm.weight",)
    buffers: tuple[str, ...] = ()
    not_in_llama_cpp: str = ""

    def metadata(self) -> dict[str, Any]:
        """Keys of the file; it has no vocabulary."""
        keys = {k: v for k, v in {**KEYS, **self.keys}.items() if v is not None}
        own = {f"{self.architecture}.{k}": v for k, v in keys.items()}
        return {"general.architecture": self.architecture, "tokenizer.ggml.model": "no_vocab"} | own

    def converted(self, state: Arrays) -> Arrays:
        """GGUF name -> array."""
        arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == self.architecture)
        names = gguf.get_tensor_name_map(arch, self.metadata()[f"{self.architecture}.block_count"])
        suffixes = (".weight", ".bias")
        return {
            names.get_name(name, try_suffixes=suffixes) or name: array
            for name, array in self.convert(state).items()
        }

    def linear(self, arrays: Arrays) -> list[str]:
        """The matrices of blocks, which adapters update."""
        blocks = (n for n, a in arrays.items() if n.startswith("blk.") and a.ndim > 1)
        return [n for n in blocks if not n.endswith(self.fixed)]


def torch_model(peer: Peer) -> Any:
    """The model in float32 with random weights, exact in float16; the same ones every time."""
    import torch
    import transformers

    kind = getattr(transformers, peer.model)
    config = kind.config_class(**{**SIZES, "tie_word_embeddings": False, **peer.config})
    config._attn_implementation = config._experts_implementation = "eager"
    model = kind(config).eval().float()
    for name, p in named(peer, model).items():
        rng = np.random.default_rng(crc32(name.encode()))
        values = peer.draw(name, tuple(p.shape), rng).astype(np.float16)
        p.data = torch.from_numpy(values.astype(np.float32))
    return model


def named(peer: Peer, model: Any) -> dict[str, Any]:
    """The tensors of a model that its file holds."""
    buffers = {n: b for n, b in model.named_buffers() if n.endswith(peer.buffers)}
    return dict(model.named_parameters()) | buffers


def golden(peer: Peer) -> tuple[Arrays, Arrays]:
    """The tensors of the file, and arrays by name: tokens, logits, and those of an adapter.

    An adapter is named as in its file, lora/NAME.lora_a and so on, its gradients grad/NAME.lora_a.
    """
    import torch

    model = torch_model(peer)
    parameters = named(peer, model)
    arrays = peer.converted({n: p.detach().numpy().copy() for n, p in parameters.items()})
    arrays |= peer.extra
    tokens = np.random.default_rng(7).integers(0, N_VOCAB, N_TOKENS).astype(np.int32)
    ids = torch.from_numpy(tokens)[None].long()
    with torch.no_grad():
        found = {"tokens": tokens, "logits": model(input_ids=ids).logits[0].numpy()}

    pairs = dict(adapter(peer, arrays))
    places = origins(peer, parameters)
    with torch.no_grad():
        for name, (a, b) in pairs.items():
            update = torch.from_numpy((LORA_SCALE * (b @ a)).ravel())
            for p, at, to in places(name):
                p.view(-1)[at] += update[to]
    logits = model(input_ids=ids).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    loss.backward()
    found |= {"lora_logits": logits.detach().numpy(), "lora_loss": np.float32(loss.item())}
    for name, (a, b) in pairs.items():
        g = np.zeros(arrays[name].size, np.float32)
        for p, at, to in places(name):
            g[to] = p.grad.view(-1)[at]
        g = g.reshape(arrays[name].shape)
        found |= {f"lora/{name}.lora_a": a, f"lora/{name}.lora_b": b}
        found[f"grad/{name}.lora_a"] = LORA_SCALE * (b.swapaxes(-1, -2) @ g)
        found[f"grad/{name}.lora_b"] = LORA_SCALE * (g @ a.swapaxes(-1, -2))
    return arrays, found


def adapter(peer: Peer, arrays: Arrays) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Base name -> A (..., rank, n_in) and B (..., n_out, rank)."""
    for name in peer.linear(arrays):
        *outer, n_out, n_in = arrays[name].shape
        rng = np.random.default_rng(crc32(name.encode()))
        a = rng.standard_normal((*outer, LORA_RANK, n_in)) / n_in**0.5
        yield (
            name,
            (
                a.astype(np.float32),
                rng.normal(0, 0.2, (*outer, n_out, LORA_RANK)).astype(np.float32),
            ),
        )


def origins(peer: Peer, parameters: Mapping[str, Any]) -> Callable[[str], list]:
    """GGUF name -> (parameter, its places, the tensor's places): found by converting numbered
    places instead of weights, so that no conversion is written a second time backwards."""
    sizes = [p.numel() for p in parameters.values()]
    starts = np.cumsum([0, *sizes])
    numbered = {
        n: start + np.arange(p.numel()).reshape(p.shape)
        for (n, p), start in zip(parameters.items(), starts[:-1], strict=True)
    }
    converted = peer.converted(numbered)
    tensors = list(parameters.values())

    def places(name: str) -> list:
        flat = np.asarray(converted[name], np.int64).ravel()
        owner = np.searchsorted(starts, flat, side="right") - 1
        return [
            (tensors[i], flat[owner == i] - starts[i], np.flatnonzero(owner == i))
            for i in np.unique(owner)
        ]

    return places
