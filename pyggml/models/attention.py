"""Grouped-query attention, the mixer of most decoders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pyggml.graph.tensor import Tensor
from pyggml.models.config import Heads
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.open_attention import open_attention
from pyggml.models.part import Part
from pyggml.models.rope import Rope, Temperature
from pyggml.models.weights import Tensors, TensorSpec, matrix, merge_tensors
from pyggml.ops import clamp, flash_attn_ext, mul, reshape, sigmoid, split


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Part):
    """attn_output(softmax(scale · q·k) v) over the keys in each token's span and window.

    fused_qkv        q, k and v come from one matrix, attn_qkv
    q_norm, k_norm   norms before rope, over each head or, by their size, over all heads at once
    norms_last       these norms come after rope
    v_norm           norm of each head of v
    may_lack_v       a file without attn_v has what attn_k gives as values too, before k's norm
    out_norm         norm of what attn_output multiplies
    rope             None for a layer without rotary positions
    clamp            q, k and v are clamped to ±clamp; 0 for none
    scale            factor of the scores; 0 for 1/√(length of a head)
    softcap          scores become cap · tanh(scores / cap); 0 for none
    max_bias         of ALiBi, as in ggml: a bias that lowers scores with distance; 0 for none
    window           number of keys in the sliding window; 0 for all keys
    symmetric        half of the window's keys are before the token and half behind it
    chunk            number of positions in a chunk, whose keys alone are seen; 0 for all keys
    temperature      what multiplies queries, or None
    sinks            the softmax of each head has one more score, from attn_sinks
    """

    n_embd: int
    heads: Heads
    rope: Rope | None
    fused_qkv: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norms_last: bool = False
    v_norm: Norm | None = None
    may_lack_v: bool = False
    out_norm: Norm | None = None
    clamp: float = 0.0
    scale: float = 0.0
    softcap: float = 0.0
    max_bias: float = 0.0
    window: int = 0
    symmetric: bool = False
    chunk: int = 0
    temperature: Temperature | None = None
    sinks: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers in a token's query, key and value, over all heads."""
        h = self.heads
        return {"q": h.n * h.size, "k": h.n_kv * h.size, "v": h.n_kv * h.value_size}

    @property
    def n_out(self) -> int:
        """Numbers of what all heads give."""
        return self.heads.n * self.heads.value_size

    def tensors(self, at: str) -> Tensors:
        sizes = {"qkv": sum(self.sizes.values())} if self.fused_qkv else self.sizes
        parts = [matrix(f"{at}attn_{part}", n, self.n_embd) for part, n in sizes.items()]
        if self.may_lack_v:
            parts[-1] = {name: replace(spec, optional=True) for name, spec in parts[-1].items()}
        norms = (self.q_norm, self.k_norm, self.v_norm, self.out_norm)
        parts += [norm.tensors(at) for norm in norms if norm]
        parts += [self.rope.tensors()] if self.rope else []
        parts += [{f"{at}attn_sinks.weight": TensorSpec((self.heads.n,))}] if self.sinks else []
        return merge_tensors([*parts, matrix(f"{at}attn_output", self.n_embd, self.n_out)])

    def rows(self, at: str) -> Mapping[str, tuple[int, int]]:
        h = self.heads
        return {f"{at}cache_k": (h.n_kv, h.size), f"{at}cache_v": (h.n_kv, h.value_size)}

    def shift(self, net: Net, at: str) -> tuple[Tensor, ...]:
        """A key is cached with its position's rotation: turned further, it is that of another. A
        weight of norms_last is turned with it, as in llama.cpp."""
        k = self._heads(net.cache_rows(f"{at}cache_k"))
        v = self._heads(net.cache_rows(f"{at}cache_v"), self.heads.value_size)
        k = self.rope.further(net, k) if self.rope else k
        return net.remember(f"{at}cache_k", k), net.remember(f"{at}cache_v", v)

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        o = self.attend(net, at, *self.project(net, at, x))
        o = self.out_norm(net, at, o) if self.out_norm else o
        return net.linear(f"{at}attn_output", o)

    def attend(self, net: Net, at: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(scale · q·k) v, (T, n_out), of q (T, n, size), k and v (T, n_kv, …)."""
        q = self.temperature(net, q) if self.temperature else q
        q, k = self.rotate(net, at, q, self.q_norm), self.rotate(net, at, k, self.k_norm)
        heads = zip("qkv", (q, k, v), strict=True)
        q, k, v = (net.tap(f"{at}{name}", t, t.shape[1]) for name, t in heads)
        k, v = net.remember(f"{at}cache_k", k), net.remember(f"{at}cache_v", v)
        return self.look(net, at, q, net.leave(f"{at}k", k), net.leave(f"{at}v", v))

    def rotate(self, net: Net, at: str, x: Tensor, norm: Norm | None) -> Tensor:
        """Heads (T, heads, size) of q or k, rotated; then normalised if norms come last."""
        x = self.rope(net, x) if self.rope else x
        return self.normalise(net, at, norm, x) if self.norms_last else x

    def look(self, net: Net, at: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What q (T, n, size) finds, (T, n_out), in all keys and values (…, n_kv, …)."""
        factor = self.scale or self.heads.size**-0.5
        span = net.span(self.window, self.chunk, self.symmetric)
        both_ways = self.max_bias and not net.inputs.causal
        how: dict[str, Any] = {
            "mask": net.distances() if both_ways else None,
            "logit_softcap": self.softcap,
            "max_bias": self.max_bias,
            "sinks": net.weights[f"{at}attn_sinks.weight"] if self.sinks else None,
        }
        if net.asks("attn_pattern", f"{at}attn_pattern"):
            o = open_attention(net, f"{at}attn_pattern", q, k, v, span, factor, **how)
        else:
            longest = net.cache.n_ctx if net.cache else 0
            rounds = not self.has_key_bias(net, at)
            o = flash_attn_ext(q, k, v, span, factor, longest=longest, may_round=rounds, **how)
        heads = reshape(net.large(o.named(f"{at}attention")), (q.shape[0], -1))
        return net.tap_heads(at, heads, self.heads.n)

    def project(self, net: Net, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, n, size), k (T, n_kv, size) and v of x; q and k normalised, before rope."""
        if self.fused_qkv:
            parts = split(net.large(net.linear(f"{at}attn_qkv", x)), tuple(self.sizes.values()))
        else:
            names = "qkk" if self.lacks_v(net, at) else "qkv"
            projections = {
                n: net.large(net.linear(f"{at}attn_{n}", x)) for n in dict.fromkeys(names)
            }
            parts = tuple(projections[n] for n in names)
        q, k, v = (clamp(p, -self.clamp, self.clamp) if self.clamp else p for p in parts)
        return self.normalise_heads(net, at, q, k, v)

    def has_key_bias(self, net: Net, at: str) -> bool:
        """Whether something is added to keys after their product."""
        return any(f"{at}attn_{part}.bias" in net.weights for part in ("k", "qkv"))

    def lacks_v(self, net: Net, at: str) -> bool:
        """Whether a file that may lack attn_v does."""
        return self.may_lack_v and f"{at}attn_v.weight" not in net.weights

    def normalise_heads(
        self, net: Net, at: str, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (T, heads · size) in some shape, as (T, heads, size); normalised, but q
        and k not if their norms come last."""
        first = (None, None) if self.norms_last else (self.q_norm, self.k_norm)
        q, k = (self.normalise(net, at, n, x) for n, x in zip(first, (q, k), strict=True))
        v = self._heads(v, self.heads.value_size)
        return q, k, self.v_norm(net, at, v) if self.v_norm else v

    def normalise(self, net: Net, at: str, norm: Norm | None, x: Tensor) -> Tensor:
        """x (T, heads · size) as (T, heads, size), after a norm of each head or all, or none."""
        if norm is None:
            return self._heads(x)
        if norm.size == self.heads.size:
            return norm(net, at, self._heads(x))
        return self._heads(norm(net, at, x))

    def _heads(self, x: Tensor, size: int = 0) -> Tensor:
        """(T, heads · size) as (T, heads, size); 0 for the size of queries and keys."""
        return reshape(x, (x.shape[0], -1, size or self.heads.size))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedOutput(Attention):
    """attn_output(gate(attn_gate x) · attention): a gate for each head, or for each number of it.

    gate       sigmoid, softplus
    of_heads   attn_gate has a row for each head
    """

    gate: Callable[[Tensor], Tensor] = sigmoid
    of_heads: bool = True

    def tensors(self, at: str) -> Tensors:
        n = self.heads.n if self.of_heads else self.n_out
        # The rows of heads are few, so adapters update them only on request.
        gate = matrix(f"{at}attn_gate", n, self.n_embd, bias=False, usual=not self.of_heads)
        return merge_tensors([Attention.tensors(self, at), gate])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        q, k, v = self.project(net, at, x)
        gate = self.gate(net.linear(f"{at}attn_gate", x))
        o = self.attend(net, at, q, k, v)
        shape = (x.shape[0], self.heads.n, -1)
        gated = mul(reshape(o, shape), reshape(gate, shape))
        return net.linear(f"{at}attn_output", reshape(gated, o.shape))
