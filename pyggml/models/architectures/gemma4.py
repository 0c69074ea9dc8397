"""gemma4: the text of Gemma 4. Layers with a window have heads and a rotation of their own; values
are normalised; the last layers may share the keys of earlier ones. Experts lie beside a dense part,
and their router has a norm of its own. Small models have per-layer embeddings."""

from dataclasses import dataclass

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import Basics, read_basics, read_windows
from pyggml.models.block import Chain, OutputScale, Sum, residual
from pyggml.models.config import read_config
from pyggml.models.experts import MIXTURE, Experts, has_experts, read_experts
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.per_layer import PerLayerInput, per_layer_inputs
from pyggml.models.rope import read_local_rope
from pyggml.models.shared_keys import attention_of, read_sources, unread_keys
from pyggml.models.weights import Tensors, TensorSpec, merge_tensors
from pyggml.ops import geglu, rms_norm_mul, scale


@dataclass(frozen=True, slots=True, kw_only=True)
class _NormedExperts(Experts):
    """Experts of norm(x), chosen by rms_norm(x) · ffn_gate_inp.scale / √n_embd. What an expert
    gives may have a factor, ffn_down_exps.scale."""

    norm: Norm

    def tensors(self, at: str) -> Tensors:
        scales = {
            f"{at}ffn_gate_inp.scale": TensorSpec((self.n_embd,)),
            f"{at}ffn_down_exps.scale": TensorSpec((self.n_expert,), optional=True),
        }
        return merge_tensors([self.norm.tensors(at), Experts.tensors(self, at), scales])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        routed = rms_norm_mul(x, net.weights[f"{at}ffn_gate_inp.scale"], self.norm.eps)
        return self.mix(net, at, self.norm(net, at, x), scale(routed, self.n_embd**-0.5))


def _decoder(r: Reader) -> Decoder:
    windowed = r.pattern(read_config(r).n_layer, 6)
    b = read_basics(r, rope="neox", windowed=windowed)
    c, local = b.config, b.heads[windowed.index(True) if any(windowed) else 0]
    windows = read_windows(r, b, 6, rope=read_local_rope(r, b.rotary, local.size))
    n = r.count("embedding_length_per_layer_input", least=0, most=1 << 16)
    n_shared = r.count("attention.shared_kv_layers", 0, least=0, most=c.n_layer)
    sources = read_sources(r, b, windowed, c.n_layer - n_shared)
    feed_forward = _read_feed_forward(r, b)

    def block(i: int) -> Part:
        norms = b.head_norms(i) | b.value_norm(i)
        here = {"scale": 1.0, "may_lack_v": True} | norms | windows[i]
        attention = attention_of(b, i, sources[i], **here)
        own = PerLayerInput(layer=i, n_embd=c.n_embd, n=n, norm=b.norm("post_norm"))
        parts = [
            residual(b.norm("attn_norm"), attention, b.norm("post_attention_norm")),
            residual(feed_forward[i], b.norm("post_ffw_norm")),
            *([residual(own)] if n else []),
        ]
        return Chain((*parts, OutputScale()))

    return b.decoder(
        block,
        prelude=per_layer_inputs(b, n) if n else None,
        embedding_scale=c.n_embd**0.5,
        logit_softcap=r.number("final_logit_softcapping", 30.0, 0.0, 1e6),
        unread=unread_keys(sources),
    )


def _read_feed_forward(r: Reader, b: Basics) -> tuple[Part, ...]:
    """The feed-forward part of every layer: dense, with experts beside it where there are any."""
    dense = [(b.norm("ffn_norm"), b.gated_mlp(i, geglu)) for i in range(b.config.n_layer)]
    if not has_experts(r):
        return tuple(map(Chain, dense))
    experts = read_experts(r, b, geglu, kind=_NormedExperts, norm=b.norm("pre_ffw_norm_2"))
    after, after_experts = b.norm("post_ffw_norm_1"), b.norm("post_ffw_norm_2")
    pairs = zip(dense, experts, strict=True)
    return tuple(Sum((Chain((*one, after)), Chain((e, after_experts)))) for one, e in pairs)


GEMMA4 = Architecture(
    "gemma4",
    _decoder,
    {
        "block_count": 5,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([True, True, False, True, False]),
        "attention.shared_kv_layers": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "rope.dimension_count_swa": 32,
        "embedding_length_per_layer_input": 32,
        **MIXTURE,
        "final_logit_softcapping": 30.0,
    },
)
