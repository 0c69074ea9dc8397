"""Multi-head latent attention (arXiv:2405.04434): keys and values made of few numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Any

import numpy as np

from pyggml.graph.tensor import Tensor, leaf
from pyggml.models.basics import Basics
from pyggml.models.config import Reader
from pyggml.models.net import Net
from pyggml.models.norm import RmsNorm
from pyggml.models.open_attention import open_attention
from pyggml.models.part import Part
from pyggml.models.rope import Rope, Temperature
from pyggml.models.weights import Tensors, latent_matrix, matrix, merge_tensors
from pyggml.ops import concat, flash_attn_ext, mul, narrow, repeat, reshape, sigmoid, split

EXAMPLE: dict[str, object] = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 8,
    "attention.key_length": 12,
    "attention.value_length": 8,
    "attention.key_length_mla": 10,
    "attention.value_length_mla": 6,
    "attention.q_lora_rank": 12,
    "rope.dimension_count": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Part):
    """attn_output(softmax(scale · q·k) v), k and v of all heads made of a token's latent vector c.

    attn_kv_a_mqa gives c, of `rank` numbers, and the last `n_shared` of the keys of all heads.
    These, of keys and of queries, are rotated.

    absorbed      attn_k_b multiplies q, attn_v_b what attention gives, instead of c: all heads have
                  one key, c and the shared numbers, whose c is the value too. A cache keeps no more
    q_rank        q comes through so many numbers; 0 if it comes from one matrix
    rope          None for a layer without rotary positions
    gated         sigmoid(attn_gate x) multiplies what each head gives. llama.cpp then passes over
                  updates of attn_output
    temperature   the factor of q that grows with the position; None for none
    """

    n_embd: int
    n_head: int
    size: int
    value_size: int
    rank: int
    n_shared: int
    q_rank: int
    eps: float
    rope: Rope | None
    scale: float
    absorbed: bool
    gated: bool = False
    temperature: Temperature | None = None

    def tensors(self, at: str) -> Tensors:
        n_q, own = self.n_head * self.size, self.size - self.n_shared
        if self.q_rank:
            parts = [
                latent_matrix(f"{at}attn_q_a", self.q_rank, self.n_embd),
                self._q_norm.tensors(at),
                latent_matrix(f"{at}attn_q_b", n_q, self.q_rank),
            ]
        else:
            parts = [latent_matrix(f"{at}attn_q", n_q, self.n_embd)]
        parts += [
            latent_matrix(f"{at}attn_kv_a_mqa", self.rank + self.n_shared, self.n_embd),
            self._kv_norm.tensors(at),
        ]
        if self.absorbed:
            parts += [
                latent_matrix(f"{at}attn_k_b", self.n_head, self.rank, own),
                latent_matrix(f"{at}attn_v_b", self.n_head, self.value_size, self.rank),
            ]
        else:
            parts += [
                latent_matrix(f"{at}attn_kv_b", self.n_head * (own + self.value_size), self.rank)
            ]
        parts += [self.rope.tensors()] if self.rope else []
        if self.gated:
            parts += [latent_matrix(f"{at}attn_gate", self.n_head, self.n_embd)]
        shape = f"{at}attn_output", self.n_embd, self.n_head * self.value_size
        output = latent_matrix(*shape) if self.gated else matrix(*shape, bias=False)
        return merge_tensors([*parts, output])

    @property
    def _q_norm(self) -> RmsNorm:
        return RmsNorm("attn_q_a_norm", self.q_rank, self.eps)

    @property
    def _kv_norm(self) -> RmsNorm:
        return RmsNorm("attn_kv_a_norm", self.rank, self.eps)

    def rows(self, at: str) -> Mapping[str, tuple[int, int]]:
        if self.absorbed:
            return {f"{at}cache_k": (1, self.rank + self.n_shared)}
        sizes = {"k": self.size, "v": self.value_size}
        return {f"{at}cache_{part}": (self.n_head, size) for part, size in sizes.items()}

    def shift(self, net: Net, at: str) -> tuple[Tensor, ...]:
        rows = {
            name: reshape(net.cache_rows(name), (-1, *heads))
            for name, heads in self.rows(at).items()
        }
        name = f"{at}cache_k"
        if self.rope:
            rows[name] = self.rope.further(net, rows[name], rows[name].shape[2] - self.n_shared)
        return tuple(net.remember(name, x) for name, x in rows.items())

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        q = self._queries(net, at, x)
        c, shared = split(net.linear(f"{at}attn_kv_a_mqa", x), (self.rank, self.n_shared))
        c, shared = self._kv_norm(net, at, c), reshape(shared, (-1, 1, self.n_shared))
        shared = self.rope(net, shared) if self.rope else shared
        attend = self._attend_absorbed if self.absorbed else self._attend
        o = net.large(attend(net, at, q, c, shared).named(f"{at}attention"))
        if self.gated:
            gate = sigmoid(net.linear(f"{at}attn_gate", x))
            o = mul(o, reshape(gate, (x.shape[0], self.n_head, 1)))
        o = net.tap_heads(at, reshape(o, (x.shape[0], -1)), self.n_head)
        return net.linear(f"{at}attn_output", o)

    def _queries(self, net: Net, at: str, x: Tensor) -> Tensor:
        """q (T, n_head, size), the last numbers of each rotated."""
        if self.q_rank:
            latent = self._q_norm(net, at, net.linear(f"{at}attn_q_a", x))
            q = net.linear(f"{at}attn_q_b", latent)
        else:
            q = net.linear(f"{at}attn_q", x)
        q = reshape(net.large(q), (-1, self.n_head, self.size))
        q = self.rope(net, q, self.size - self.n_shared) if self.rope else q
        return self.temperature(net, q) if self.temperature else q

    def _attend(self, net: Net, at: str, q: Tensor, c: Tensor, shared: Tensor) -> Tensor:
        """(T, n_head, value_size), every head with keys and values of its own."""
        own = self.size - self.n_shared
        both = reshape(
            net.large(net.linear(f"{at}attn_kv_b", c)), (-1, self.n_head, own + self.value_size)
        )
        k, v = split(both, (own, self.value_size))
        k = concat(k, repeat(shared, (shared.shape[0], self.n_head, self.n_shared)))
        heads = zip("qkv", (q, k, v), strict=True)
        q, k, v = (net.tap(f"{at}{name}", t, t.shape[1]) for name, t in heads)
        k, v = net.remember(f"{at}cache_k", k), net.remember(f"{at}cache_v", v)
        return self._softmax(net, at, q, k, v)

    def _attend_absorbed(self, net: Net, at: str, q: Tensor, c: Tensor, shared: Tensor) -> Tensor:
        """The same by the heads' common key. As the value it is longer than c: what attention makes
        of its end is cut off, which costs less than c once more in the cache."""
        heads = self._heads(net, q.shape[0])
        own, rotated = split(q, (self.size - self.n_shared, self.n_shared))
        q = net.large(concat(net.by_expert(f"{at}attn_k_b", own, heads), rotated))
        k = concat(reshape(c, (-1, 1, self.rank)), shared)
        q, k = net.tap(f"{at}q", q, self.n_head), net.tap(f"{at}k", k, 1)
        k = net.remember(f"{at}cache_k", k)
        o = net.large(narrow(self._softmax(net, at, q, k, k), 2, 0, self.rank))
        return net.by_expert(f"{at}attn_v_b", o, heads)

    def _softmax(self, net: Net, at: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if net.asks("attn_pattern", pattern := f"{at}attn_pattern"):
            return open_attention(net, pattern, q, k, v, net.span(), self.scale)
        longest = net.cache.n_ctx if net.cache else 0
        return flash_attn_ext(q, k, v, net.span(), self.scale, longest=longest)

    def _heads(self, net: Net, n_tokens: int) -> Tensor:
        """The number of each head, for every token: the matrix that multiplies it."""

        def numbers() -> Tensor:
            row = np.arange(self.n_head, dtype=np.int32)
            return leaf(np.tile(row, (n_tokens, 1)), "heads")

        return net.once(("heads", self.n_head, n_tokens), numbers)


def read_latent(r: Reader, b: Basics, *, q_rank: int, **more: Any) -> LatentAttention:
    """The latent attention of all layers. Files have keys of the heads as they are computed, or
    older ones of whole heads; more: fields that differ."""
    rope = b.rope
    heads = next((h for h in b.heads if h.n_kv), b.heads[0])
    rank = r.count("attention.kv_lora_rank", most=1 << 12)
    size = r.count("attention.key_length_mla", 0, least=0, most=1 << 12)
    value_size = r.count("attention.value_length_mla", 0, least=0, most=1 << 12)
    absorbed = bool(size and value_size)
    n_shared = rope.n_dims if rope else r.count("rope.dimension_count")
    if absorbed:
        implied = {"head_count_kv": (heads.n_kv, 1), "key_length": (heads.size, rank + n_shared)}
    else:
        size, value_size = heads.size, heads.value_size
        implied = {"head_count_kv": (heads.n_kv, heads.n)}
    r.faults += [
        f"{r.architecture}.attention.{key} is {there}, wanted {n} for latent attention"
        for key, (there, n) in implied.items()
        if there != n
    ]
    if n_shared >= size:
        r.faults.append(f"{n_shared} numbers of a key are rotated, wanted fewer than its {size}")
    usual: dict[str, Any] = {"scale": sqrt(1 / size), "rope": rope}
    return LatentAttention(
        n_embd=b.config.n_embd,
        n_head=heads.n,
        size=size,
        value_size=value_size,
        rank=rank,
        n_shared=n_shared,
        q_rank=q_rank,
        eps=b.norm("").eps,
        absorbed=absorbed,
        **usual | more,
    )


def read_absorbed(r: Reader, b: Basics, **more: Any) -> LatentAttention:
    """The same, of an architecture whose files have no older form."""
    latent = read_latent(r, b, **more)
    if not latent.absorbed:
        r.faults.append(
            f"{r.architecture}.attention.key_length_mla is missing, wanted a file that has "
            "attn_k_b and attn_v_b: convert the checkpoint anew"
        )
    return latent


def scale_of(rope: Rope, size: int, log_multiplier: float = 0.0) -> float:
    """The factor of scores, larger in a context that is lengthened, as in llama.cpp."""
    longer = -0.1 * log(rope.freq_scale)
    factor = rope.attn_factor * (1 + longer) * (1 + log_multiplier * longer)
    return factor * factor / sqrt(size)
