"""The model of a GGUF file as TransformerLens computes it: its HookedTransformer, filled with the
same weights in float32. Of architectures llama and qwen3; from TransformerLens 4 on there is none.

TransformerLens asks the hub for nothing here: the configuration is made by hand.
"""

import numpy as np
import pytest

from pyggml.lab.linear import attention_branch
from pyggml.quants import dequantize


def hooked(model):
    """A HookedTransformer without any processing of weights; heads keep keys and values apart."""
    reason = "TransformerLens (pip install 'transformer_lens<4' torch)"
    lens = pytest.importorskip("transformer_lens", reason=reason)
    torch = pytest.importorskip("torch", reason=reason)
    if not hasattr(lens, "HookedTransformerConfig"):
        pytest.skip(reason)  # version 4 has no model of this kind any more
    c, part = model.config, attention_branch(model, 0)[1]
    h, rope = part.heads, part.rope
    config = lens.HookedTransformerConfig(
        n_layers=c.n_layer,
        d_model=c.n_embd,
        n_ctx=c.n_ctx,
        d_head=h.size,
        n_heads=h.n,
        n_key_value_heads=h.n_kv,
        d_mlp=model.parts.weights["blk.0.ffn_up.weight"].shape[0],
        d_vocab=c.n_vocab,
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        final_rms=True,
        eps=part.q_norm.eps if part.q_norm else 1e-6,
        positional_embedding_type="rotary",
        rotary_dim=rope.n_dims,
        rotary_base=rope.freq_base,
        rotary_adjacent_pairs=rope.mode == "normal",
        use_qk_norm=part.q_norm is not None,
        use_attn_result=True,
        use_split_qkv_input=True,
        use_hook_mlp_in=True,
        dtype=torch.float32,
        device="cpu",
    )
    twin = lens.HookedTransformer(config)
    arrays = dict(_weights(model, h))
    state = {name: torch.tensor(np.ascontiguousarray(a)) for name, a in arrays.items()}
    missing = twin.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    biases_and_masks = (".b_Q", ".b_O", ".b_in", ".b_out", "b_U", "._b_K", "._b_V")
    constants = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
    assert all(k.endswith((*biases_and_masks, *constants)) for k in missing.missing_keys)
    for name, parameter in twin.named_parameters():
        if name in missing.missing_keys:
            parameter.data.zero_()
    if "rope_freqs.weight" in model.file.tensors:
        _divide_frequencies(twin, model.file.data("rope_freqs.weight"), torch)
    return twin


def _divide_frequencies(twin, factors, torch):
    """The tables of rotary angles with a file's divisors, of pairs (2i, 2i + 1)."""
    c = twin.cfg
    assert c.rotary_adjacent_pairs
    turns = c.rotary_base ** -(np.arange(0, c.rotary_dim, 2) / c.rotary_dim) / factors
    angles = torch.tensor(np.repeat(np.arange(c.n_ctx)[:, None] * turns, 2, axis=1))
    for block in twin.blocks:
        block.attn.rotary_sin, block.attn.rotary_cos = angles.sin().float(), angles.cos().float()


def _weights(model, h):
    """Name in TransformerLens → array."""

    def array(name):
        info = model.file.tensors[name]
        return np.array(dequantize(model.file.data(name), info.dtype.name), np.float32)

    yield "embed.W_E", array("token_embd.weight")
    yield "unembed.W_U", array(f"{model.parts.output_name}.weight").T
    yield "ln_final.w", array("output_norm.weight")
    for i in range(model.config.n_layer):
        at, to = f"blk.{i}.", f"blocks.{i}."
        yield f"{to}ln1.w", array(f"{at}attn_norm.weight")
        yield f"{to}ln2.w", array(f"{at}ffn_norm.weight")
        shared = "_" * (h.n_kv != h.n)
        for name, n, there in (
            ("q", h.n, "W_Q"),
            ("k", h.n_kv, f"{shared}W_K"),
            ("v", h.n_kv, f"{shared}W_V"),
        ):
            w = array(f"{at}attn_{name}.weight").reshape(n, h.size, -1)
            yield f"{to}attn.{there}", w.swapaxes(1, 2)
            if name != "v" and f"{at}attn_{name}_norm.weight" in model.file.tensors:
                yield f"{to}attn.{name}_norm.w", array(f"{at}attn_{name}_norm.weight")
        yield f"{to}attn.W_O", array(f"{at}attn_output.weight").T.reshape(h.n, h.size, -1)
        for name, there in (("gate", "W_gate"), ("up", "W_in"), ("down", "W_out")):
            yield f"{to}mlp.{there}", array(f"{at}ffn_{name}.weight").T
