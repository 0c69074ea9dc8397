"""The parts that decoders share: inputs, projections with adapters, attention, the feed-forward.

A batch is one row of tokens: sequences lie one after the other, and each token carries its position
and the range of tokens (or cache rows) it may attend to. No axis for the batch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyggml.dtypes import F32, I32
from pyggml.models.config import ModelConfig
from pyggml.models.weights import Weights
from pyggml.ops import (
    add,
    flash_attn_ext,
    get_rows,
    mul_mat,
    mul_mat_add,
    reshape,
    rms_norm_mul,
    rope_apply,
    rope_table,
    scale,
    set_rows,
    swiglu,
)
from pyggml.tensor import Tensor, zeros


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank update of one matrix: y += scale · B(A x), A (r, n_in), B (n_out, r)."""

    a: Tensor
    b: Tensor
    scale: float


# Full tensor name, such as "blk.0.attn_q.weight" -> the update that its product gets.
LoraPairs = Mapping[str, LoraPair]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a graph reads anew on every run; T tokens.

    tokens (T,) int32, positions (T,) int32, span (T, 2) int32: the first key a token sees and the
    one past the last, counted in tokens of this run or, with a cache, in cache rows.
    """

    tokens: Tensor
    positions: Tensor
    span: Tensor

    @classmethod
    def empty(cls, n_tokens: int) -> Inputs:
        """Leaves to fill through `.data`."""
        return cls(
            zeros((n_tokens,), I32, "tokens"),
            zeros((n_tokens,), I32, "positions"),
            zeros((n_tokens, 2), I32, "span"),
        )


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values of earlier tokens for every layer: (n_ctx, n_head_kv · n_embd_head) F32."""

    k: Sequence[Tensor]
    v: Sequence[Tensor]

    @classmethod
    def empty(cls, config: ModelConfig, n_ctx: int) -> Cache:
        shape = (n_ctx, config.n_head_kv * config.n_embd_head)
        layers = range(config.n_layer)
        return cls(
            [zeros(shape, F32, f"cache_k.{i}") for i in layers],
            [zeros(shape, F32, f"cache_v.{i}") for i in layers],
        )


@dataclass(slots=True)
class Net:
    """A decoder being built: what an architecture's `hidden` has at hand."""

    config: ModelConfig
    weights: Weights
    inputs: Inputs
    adapters: Sequence[LoraPairs] = ()
    cache: Cache | None = None
    _rope: Tensor | None = field(default=None, init=False)

    def embed(self) -> Tensor:
        """Token embeddings (T, n_embd)."""
        return get_rows(self.weights["token_embd.weight"], self.inputs.tokens).named("embeddings")

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x·Wᵀ with every adapter's update and the bias, if there are any (llama.cpp's order)."""
        full = f"{name}.weight"
        y = mul_mat(self.weights[full], x).named(name)
        for pairs in self.adapters:
            if full in pairs:
                p = pairs[full]
                y = mul_mat_add(y, p.b, scale(mul_mat(p.a, x), p.scale)).named(f"{name}+lora")
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else add(y, bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMS norm with weight `name`.weight, over the last axis."""
        return rms_norm_mul(x, self.weights[f"{name}.weight"], self.config.rms_eps).named(name)

    def rope(self, x: Tensor, mode: str) -> Tensor:
        """Rotary positions on x (T, heads, n_embd_head); all layers share one table."""
        if self._rope is None:
            c = self.config.rope
            self._rope = rope_table(
                self.inputs.positions,
                self.weights.get("rope_freqs.weight"),
                n_dims=c.n_dims,
                freq_base=c.freq_base,
                freq_scale=c.freq_scale,
                ext_factor=c.ext_factor,
                attn_factor=c.attn_factor,
                n_ctx_orig=c.n_ctx_orig,
            ).named("rope table")
        return rope_apply(x, self._rope, mode)

    def heads(self, x: Tensor) -> Tensor:
        """(T, heads · d) as (T, heads, d)."""
        return reshape(x, (x.shape[0], -1, self.config.n_embd_head))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax attention over this run's keys, or over the cache after they entered it."""
        if self.cache is not None:
            k = self._remember(self.cache.k[layer], k)
            v = self._remember(self.cache.v[layer], v)
        o = flash_attn_ext(q, k, v, self.inputs.span, self.config.n_embd_head**-0.5)
        return reshape(o.named(f"blk.{layer}.attention"), (q.shape[0], -1))

    def _remember(self, cache: Tensor, rows: Tensor) -> Tensor:
        flat = reshape(rows, (rows.shape[0], -1))
        written = set_rows(cache, flat, self.inputs.positions)
        return reshape(written, (cache.shape[0], *rows.shape[1:]))

    def feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        """down(silu(gate x) · up x)."""
        gate, up = self.linear(f"{prefix}.ffn_gate", x), self.linear(f"{prefix}.ffn_up", x)
        return self.linear(f"{prefix}.ffn_down", swiglu(gate, up))
