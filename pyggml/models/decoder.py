"""The pre-norm decoder that llama, Mistral, Qwen2 and Qwen3 are variants of.

x += attn_output(attention(q, k, v of norm(x)))
x += ffn_down(silu(ffn_gate norm(x)) · ffn_up norm(x))        per layer; then a last norm
"""

from __future__ import annotations

from pyggml.models.config import ModelConfig
from pyggml.models.net import Net
from pyggml.ops import add
from pyggml.tensor import Shape, Tensor

# The linear modules of a block, in the order in which a block uses them.
MODULES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def hidden(net: Net, rope_mode: str) -> Tensor:
    """Hidden states after the last norm, (T, n_embd)."""
    x = net.embed()
    for i in range(net.config.n_layer):
        prefix = f"blk.{i}"
        x = add(x, _attention(net, i, net.norm(f"{prefix}.attn_norm", x), rope_mode))
        x = add(x, net.feed_forward(prefix, net.norm(f"{prefix}.ffn_norm", x)))
        x.named(f"{prefix}.out")
    return net.norm("output_norm", x)


def _attention(net: Net, layer: int, x: Tensor, rope_mode: str) -> Tensor:
    prefix = f"blk.{layer}"
    q = net.heads(net.linear(f"{prefix}.attn_q", x))
    k = net.heads(net.linear(f"{prefix}.attn_k", x))
    v = net.heads(net.linear(f"{prefix}.attn_v", x))
    if f"{prefix}.attn_q_norm.weight" in net.weights:  # per head, before the rotation
        q, k = net.norm(f"{prefix}.attn_q_norm", q), net.norm(f"{prefix}.attn_k_norm", k)
    q, k = net.rope(q, rope_mode), net.rope(k, rope_mode)
    return net.linear(f"{prefix}.attn_output", net.attend(layer, q, k, v))


def shapes(c: ModelConfig, q_and_k_norms: bool = False) -> tuple[dict[str, Shape], set[str]]:
    """The tensors that a file must or may hold, and the names of those that it may."""
    n_q, n_kv = c.n_head * c.n_embd_head, c.n_head_kv * c.n_embd_head
    wanted: dict[str, Shape] = {
        "token_embd.weight": (c.n_vocab, c.n_embd),
        "output_norm.weight": (c.n_embd,),
        "output.weight": (c.n_vocab, c.n_embd),
        "output.bias": (c.n_vocab,),
        "rope_freqs.weight": (c.rope.n_dims // 2,),
    }
    optional = {"output.weight", "output.bias", "rope_freqs.weight"}
    attention = [(n_q, c.n_embd), (n_kv, c.n_embd), (n_kv, c.n_embd), (c.n_embd, n_q)]
    feed_forward = [(c.n_ff, c.n_embd), (c.n_ff, c.n_embd), (c.n_embd, c.n_ff)]
    matrices = dict(zip(MODULES, attention + feed_forward, strict=True))
    for i in range(c.n_layer):
        for norm in ("attn_norm", "ffn_norm"):
            wanted[f"blk.{i}.{norm}.weight"] = (c.n_embd,)
        for norm in ("attn_q_norm", "attn_k_norm") if q_and_k_norms else ():
            wanted[f"blk.{i}.{norm}.weight"] = (c.n_embd_head,)
        for module, shape in matrices.items():
            wanted[f"blk.{i}.{module}.weight"] = shape
            wanted[f"blk.{i}.{module}.bias"] = shape[:1]
            optional.add(f"blk.{i}.{module}.bias")
    return wanted, optional
