"""gemma3n: the text of Gemma 3n, with AltUp, LAuReL and per-layer embeddings. Layers from the 20th
on share the keys of earlier ones, the gates of the first 10 are sparse: numbers of llama.cpp, which
does not read those of the file."""

from dataclasses import dataclass, replace

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.models.altup import AltUp, AltUpMerge, AltUpStreams
from pyggml.models.architecture import Architecture, Decoder, Part, Reader
from pyggml.models.basics import read_basics, read_windows
from pyggml.models.block import Chain, residual
from pyggml.models.net import Net
from pyggml.models.norm import Norm
from pyggml.models.per_layer import PerLayerInput, per_layer_inputs
from pyggml.models.rope import read_local_rope
from pyggml.models.shared_keys import attention_of, read_sources, unread_keys
from pyggml.models.weights import Tensors, matrix, merge_tensors
from pyggml.ops import add, geglu, mean, relu, scale, sqr, sqrt, sub, sum_rows

N_STREAMS, N_PER_LAYER, LAUREL_RANK = 4, 256, 64
N_OWN_KEYS, N_SPARSE, SOFTCAP = 20, 10, 30.0
DEVIATIONS = 1.6448533535003662  # above which lies a twentieth of a normal distribution


def _sparse_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """geglu of how far gates are above so many standard deviations over the mean of their row."""
    centred = sub(gate, mean(gate))
    deviation = sqrt(scale(sum_rows(sqr(centred)), 1 / (gate.shape[-1] - 1)))
    return geglu(relu(sub(centred, scale(deviation, DEVIATIONS))), up)


@dataclass(frozen=True, slots=True)
class _Laurel(Part):
    """y = norm(x): (x + after(attention(y)) + y + laurel_norm(laurel_r laurel_l y)) / √2."""

    n_embd: int
    norm: Norm
    attention: Part
    after: Norm
    laurel_norm: Norm

    def tensors(self, at: str) -> Tensors:
        parts = (self.norm, self.attention, self.after, self.laurel_norm)
        low = matrix(f"{at}laurel_l", LAUREL_RANK, self.n_embd, bias=False)
        high = matrix(f"{at}laurel_r", self.n_embd, LAUREL_RANK, bias=False)
        return merge_tensors([low, high, *(part.tensors(at) for part in parts)])

    def __call__(self, net: Net, at: str, x: Tensor) -> Tensor:
        y = self.norm(net, at, x)
        laurel = net.linear(f"{at}laurel_r", net.linear(f"{at}laurel_l", y))
        beside = add(self.laurel_norm(net, at, laurel), y)
        attention = self.after(net, at, self.attention(net, at, y))
        attention = net.tap(f"{at}{self.branch}", attention)
        return scale(add(add(attention, x), beside), 0.5**0.5)


def _decoder(r: Reader) -> Decoder:
    b = read_basics(r, rope="neox")
    c, rope, windowed = b.config, replace(b.rotary, factors=()), r.pattern(b.config.n_layer, 5)
    windows = read_windows(r, b, 5, rope=read_local_rope(r, b.rotary, b.heads[0].size))
    sources = read_sources(r, b, windowed, min(N_OWN_KEYS, c.n_layer))
    for key, n in (("embedding_length_per_layer_input", N_PER_LAYER), ("altup.num_inputs", 4)):
        r.count(key, n, least=n, most=n)
    r.count("altup.active_idx", 0, least=0, most=0)
    r.number("final_logit_softcapping", SOFTCAP, SOFTCAP, SOFTCAP)

    def block(i: int) -> Part:
        here = {"scale": 1.0, "rope": rope} | b.head_norms(i) | b.value_norm(i) | windows[i]
        attention = attention_of(b, i, sources[i], **here)
        unit = _sparse_geglu if i < N_SPARSE else geglu
        laurel = _Laurel(
            *(c.n_embd, b.norm("attn_norm"), attention),
            *(b.norm("post_attention_norm"), b.norm("laurel_post_norm")),
        )
        after = residual(b.norm("ffn_norm"), b.gated_mlp(i, unit), b.norm("post_ffw_norm"))
        own = PerLayerInput(layer=i, n_embd=c.n_embd, n=N_PER_LAYER, norm=b.norm("post_norm"))
        body = Chain((laurel, after))
        norm = b.norm("altup_router_norm")
        return AltUp(body=body, n_embd=c.n_embd, n=N_STREAMS, norm=norm, own=own)

    return b.decoder(
        block,
        prelude=Chain((per_layer_inputs(b, N_PER_LAYER), AltUpStreams(c.n_embd, N_STREAMS))),
        norm=Chain((AltUpMerge(c.n_embd, N_STREAMS), b.norm("output_norm"))),
        embedding_scale=c.n_embd**0.5,
        logit_softcap=SOFTCAP,
        unread=unread_keys(sources),
    )


GEMMA3N = Architecture(
    "gemma3n",
    _decoder,
    {
        "block_count": 3,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": np.array([True, True, False]),
    },
)
