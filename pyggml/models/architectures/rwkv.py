"""rwkv6, rwkv7 (RWKV), rwkv6qwen2 and arwkv7: Qwen 2 whose attention is RWKV's time mix."""

from collections.abc import Callable
from functools import partial

from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.block import Chain, Scaled, residual
from pyggml.models.config import ModelConfig, layer_norm_eps, read_config, rms_eps
from pyggml.models.feed_forward import GatedFeedForward
from pyggml.models.norm import LayerNorm, RmsNorm
from pyggml.models.rwkv6 import DataDependentTimeMix, GatedChannelMix
from pyggml.models.rwkv7 import ChannelMix, TimeMix, read_head_size, read_ranks
from pyggml.ops import swiglu


def _rwkv6(r: Reader) -> Decoder:
    c, norm = read_config(r), partial(LayerNorm, eps=layer_norm_eps(r))
    r.count("token_shift_count", 2, least=2, most=2)  # one for each kind of mix
    every = r.count("rescale_every_n_layers", 0, least=0, most=1 << 12)
    n_ff = r.count("feed_forward_length")

    def block(i: int) -> Part:
        time = _time_mix_6(r, c, i, linear=False)
        both = _mixes(norm, c, time, GatedChannelMix(c.n_embd, n_ff))
        return Scaled(both, 0.5) if every and (i + 1) % every == 0 else both

    return _with_layer_norms(c, norm, block)


def _rwkv7(r: Reader) -> Decoder:
    c, norm = read_config(r), partial(LayerNorm, eps=layer_norm_eps(r))
    r.count("token_shift_count", 2, least=2, most=2)
    size, ranks = read_head_size(r, c.n_embd), read_ranks(r, gated=True)
    n_ff = r.count("feed_forward_length")

    def block(i: int) -> Part:
        time = TimeMix(n_embd=c.n_embd, size=size, ranks=ranks, first=i == 0)
        return _mixes(norm, c, time, ChannelMix(c.n_embd, n_ff))

    return _with_layer_norms(c, norm, block)


def _rwkv6qwen2(r: Reader) -> Decoder:
    c = read_config(r)
    return _qwen2(r, c, lambda i: _time_mix_6(r, c, i, linear=True))


def _arwkv7(r: Reader) -> Decoder:
    c = read_config(r)
    size, ranks = read_head_size(r, c.n_embd), read_ranks(r, gated=False)

    def time(i: int) -> Part:
        normed = not r.has_tensors or f"blk.{i}.time_mix_ln.weight" in r.shapes
        return TimeMix(n_embd=c.n_embd, size=size, ranks=ranks, first=i == 0, normed=normed)

    return _qwen2(r, c, time)


def _time_mix_6(r: Reader, c: ModelConfig, layer: int, linear: bool) -> Part:
    size = read_head_size(r, c.n_embd)
    n_heads = c.n_embd // size
    n_kv = r.count("attention.head_count_kv", 0, least=0) if linear else 0
    if n_kv and n_heads % n_kv:
        r.faults.append(f"{n_heads} heads cannot share {n_kv} key heads evenly")
    return DataDependentTimeMix(
        n_embd=c.n_embd,
        size=size,
        n_kv=n_kv or n_heads,
        extra=r.count("time_mix_extra_dim", most=1 << 12),
        decay_rank=r.count("time_decay_extra_dim", most=1 << 12),
        fused=f"blk.{layer}.time_mix_lerp_w.weight" not in r.shapes,
        linear=linear,
    )


def _mixes(norm: partial[LayerNorm], c: ModelConfig, time: Part, channel: Part) -> Part:
    first, second = (norm(name, c.n_embd) for name in ("attn_norm", "attn_norm_2"))
    return Chain((residual(first, time), residual(second, channel)))


def _with_layer_norms(
    c: ModelConfig, norm: partial[LayerNorm], block: Callable[[int], Part]
) -> Decoder:
    return Decoder(
        config=c,
        blocks=tuple(block(i) for i in range(c.n_layer)),
        prelude=norm("token_embd_norm", c.n_embd),
        norm=norm("output_norm", c.n_embd),
        tied=False,
    )


def _qwen2(r: Reader, c: ModelConfig, time: Callable[[int], Part]) -> Decoder:
    """Qwen 2 with a time mix instead of attention."""
    r.count("token_shift_count", least=1, most=1)
    norm, n_ff = partial(RmsNorm, size=c.n_embd, eps=rms_eps(r)), r.count("feed_forward_length")
    feed_forward = residual(norm("ffn_norm"), GatedFeedForward(c.n_embd, n_ff, swiglu))
    blocks = (Chain((residual(norm("attn_norm"), time(i)), feed_forward)) for i in range(c.n_layer))
    has = ("weight", "bias") if "output_norm.bias" in r.shapes else ("weight",)
    return Decoder(config=c, blocks=tuple(blocks), norm=norm("output_norm", has=has), tied=False)


_RANKS: dict[str, object] = {
    "wkv.head_size": 8,
    "attention.decay_lora_rank": 4,
    "attention.iclr_lora_rank": 4,
    "attention.value_residual_mix_lora_rank": 4,
    "attention.gate_lora_rank": 4,
}
_DIMS: dict[str, object] = {"wkv.head_size": 8, "time_mix_extra_dim": 4, "time_decay_extra_dim": 4}
_NO_HEADS: dict[str, object] = {"attention.head_count": 0, "attention.head_count_kv": 0}
_GROUPED: dict[str, object] = {"attention.head_count_kv": 1, "token_shift_count": 1}
RWKV6 = Architecture("rwkv6", _rwkv6, _DIMS | _NO_HEADS | {"rescale_every_n_layers": 1})
RWKV7 = Architecture("rwkv7", _rwkv7, _RANKS)
RWKV6QWEN2 = Architecture("rwkv6qwen2", _rwkv6qwen2, _DIMS | _GROUPED)
ARWKV7 = Architecture("arwkv7", _arwkv7, _RANKS | {"token_shift_count": 1})
