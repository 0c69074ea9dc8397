"""Attention that reads the keys and values of an earlier layer (Gemma 3n's shared KV layers)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.graph.tensor import Tensor
from pyggml.models.attention import Attention
from pyggml.models.basics import Basics
from pyggml.models.config import Reader
from pyggml.models.net import Net
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeys(Attention):
    """Attention without keys and values of its own. Where q, k and v come from one matrix, those of
    k and v are passed over, as in llama.cpp.

    source   prefix of the layer whose keys and values it reads
    """

    source: str

    def tensors(self, at: str) -> Tensors:
        name, n = ("qkv", sum(self.sizes.values())) if self.fused_qkv else ("q", self.sizes["q"])
        parts = [matrix(f"{at}attn_{name}", n, self.n_embd)]
        parts += [self.q_norm.tensors(at)] if self.q_norm else []
        parts += [self.rope.tensors()] if self.rope else []
        return merge_tensors([*parts, matrix(f"{at}attn_output", self.n_embd, self.n_out)])

    def rows(self, at: str) -> Mapping[str, tuple[int, int]]:
        return {}

    def shift(self, net: Net, at: str) -> tuple[Tensor, ...]:
        return ()

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        q = net.large(net.linear(f"{at}attn_{'qkv' if self.fused_qkv else 'q'}", x))
        q = narrow(q, 1, 0, self.sizes["q"]) if self.fused_qkv else q
        q = self.rotate(net, at, self.normalise(net, at, self.q_norm, q), None)
        k, v = (net.earlier(f"{self.source}{part}") for part in "kv")
        o = self.look(net, at, net.tap(f"{at}q", q, q.shape[1]), k, v)
        return net.linear(f"{at}attn_output", o)


def attention_of(b: Basics, layer: int, source: str, **more: Any) -> Attention:
    """Attention of one layer, with the keys of another if `source` is that one's prefix."""
    if source:
        return b.attention(layer, SharedKeys, source=source, **more)
    return b.attention(layer, **more)


def read_sources(r: Reader, b: Basics, windowed: Sequence[bool], n_own: int) -> tuple[str, ...]:
    """For each layer, the prefix of the one whose keys it reads; "" for the first n_own.

    As in llama.cpp, layers with a window read those of layer n_own - 2, others those of n_own - 1.
    """
    sources = [n_own - (2 if w else 1) if i >= n_own else i for i, w in enumerate(windowed)]
    for i, source in enumerate(sources):
        of = max(source, 0)
        alike = windowed[i] == windowed[of] and b.heads[i].size == b.heads[of].size
        if source < 0 or not alike or b.heads[i].n_kv != b.heads[of].n_kv:
            r.faults.append(f"layer {i} cannot read the keys of layer {source}: they are not alike")
    return tuple(f"blk.{of}." if of != i else "" for i, of in enumerate(sources))


def unread_keys(sources: Sequence[str]) -> tuple[str, ...]:
    """Names of what files may still hold of layers without keys of their own."""
    names = "attn_k.weight", "attn_v.weight", "attn_k_norm.weight"
    return tuple(f"blk.{i}.{name}" for i, s in enumerate(sources) if s for name in names)
