"""Write a Qwen3-shaped GGUF with random weights: a model of a real size to time.

usage: make_model.py OUT.gguf [--size 0.6B|1.7B|30B-A3B] [--type Q8_0|Q4_K_M|F16] [--layers N]

The vocabulary has the real one's 151,936 tokens but no text to them; it times training and
products, not the tokenizer. A mixture (30B-A3B) has the same weights in every expert of a layer,
and one weight type, such as Q4_K, in all its matrices.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from pyggml import gguf
from pyggml.graph.dtypes import DTYPES, F16, F32
from pyggml.quants import quantize
from pyggml.requantize import requantize

N_VOCAB, N_LAYER, N_HEAD, N_HEAD_KV, HEAD = 151936, 28, 16, 8, 128
WIDTHS = {"0.6B": (1024, 3072), "1.7B": (2048, 6144)}  # n_embd, n_ff


def shapes(n_embd: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, n_embd),
        "output_norm.weight": (n_embd,),
    }
    block = {
        "attn_norm": (n_embd,),
        "attn_q": (N_HEAD * HEAD, n_embd),
        "attn_k": (N_HEAD_KV * HEAD, n_embd),
        "attn_v": (N_HEAD_KV * HEAD, n_embd),
        "attn_q_norm": (HEAD,),
        "attn_k_norm": (HEAD,),
        "attn_output": (n_embd, N_HEAD * HEAD),
        "ffn_norm": (n_embd,),
        "ffn_gate": (n_ff, n_embd),
        "ffn_up": (n_ff, n_embd),
        "ffn_down": (n_embd, n_ff),
    }
    for i in range(N_LAYER):
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return tensors


def weights(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if len(shape) == 1:
        return (1 + 0.02 * rng.standard_normal(shape)).astype(np.float32)
    return (0.02 * rng.standard_normal(shape, dtype=np.float32)).astype(np.float16)


# -- a mixture of experts ------------------------------------------------------------------------

MIXTURE = "30B-A3B"
N_EXPERT, N_USED, EXPERT_FF = 128, 8, 768
MIXTURE_EMBD, MIXTURE_HEADS, MIXTURE_HEADS_KV = 2048, 32, 4


def mixture_shapes(n_layer: int) -> dict[str, tuple[int, ...]]:
    n_embd = MIXTURE_EMBD
    tensors: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (N_VOCAB, n_embd),
        "output.weight": (N_VOCAB, n_embd),
        "output_norm.weight": (n_embd,),
    }
    block = {
        "attn_norm": (n_embd,),
        "attn_q": (MIXTURE_HEADS * HEAD, n_embd),
        "attn_k": (MIXTURE_HEADS_KV * HEAD, n_embd),
        "attn_v": (MIXTURE_HEADS_KV * HEAD, n_embd),
        "attn_q_norm": (HEAD,),
        "attn_k_norm": (HEAD,),
        "attn_output": (n_embd, MIXTURE_HEADS * HEAD),
        "ffn_norm": (n_embd,),
        "ffn_gate_inp": (N_EXPERT, n_embd),
        "ffn_gate_exps": (N_EXPERT, EXPERT_FF, n_embd),
        "ffn_up_exps": (N_EXPERT, EXPERT_FF, n_embd),
        "ffn_down_exps": (N_EXPERT, n_embd, EXPERT_FF),
    }
    for i in range(n_layer):
        tensors |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return tensors


def random_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a weight type: 256 rows are packed, and repeated."""
    rows = np.prod(shape[:-1], dtype=int)
    some = quantize(0.02 * rng.standard_normal((256, shape[-1]), np.float32), kind)
    flat = np.tile(some.reshape(256, -1), (-(-rows // 256), 1))[:rows]
    return flat.reshape(*shape[:-1], -1)


def write_mixture(out: Path, kind: str, n_layer: int) -> None:
    about = {
        "vocab_size": N_VOCAB,
        "block_count": n_layer,
        "context_length": 40960,
        "embedding_length": MIXTURE_EMBD,
        "feed_forward_length": 6144,
        "expert_feed_forward_length": EXPERT_FF,
        "expert_count": N_EXPERT,
        "expert_used_count": N_USED,
        "attention.head_count": MIXTURE_HEADS,
        "attention.head_count_kv": MIXTURE_HEADS_KV,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    metadata = {"general.architecture": "qwen3moe", "tokenizer.ggml.model": "no_vocab"}
    metadata |= {f"qwen3moe.{key}": value for key, value in about.items()}
    rng, tensors = np.random.default_rng(0), []
    for name, shape in mixture_shapes(n_layer).items():
        if len(shape) == 1 or "gate_inp" in name:
            values = weights(shape, rng).astype(np.float32)
            tensors.append((name, F32, shape, values))
        else:
            tensors.append((name, DTYPES[kind], shape, partial(random_blocks, shape, kind, rng)))
    gguf.write(out, metadata, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=[*WIDTHS, MIXTURE], default="0.6B")
    parser.add_argument("--type", default="Q8_0")
    parser.add_argument("--layers", type=int, default=8, help="of a mixture, of 48")
    options = parser.parse_args()
    if options.size == MIXTURE:
        write_mixture(options.out, options.type, options.layers)
        return

    n_embd, n_ff = WIDTHS[options.size]
    metadata = {
        "general.architecture": "qwen3",
        "tokenizer.ggml.model": "no_vocab",  # llama.cpp wants to be told
        "qwen3.vocab_size": N_VOCAB,
        "qwen3.block_count": N_LAYER,
        "qwen3.context_length": 40960,
        "qwen3.embedding_length": n_embd,
        "qwen3.feed_forward_length": n_ff,
        "qwen3.attention.head_count": N_HEAD,
        "qwen3.attention.head_count_kv": N_HEAD_KV,
        "qwen3.attention.key_length": HEAD,
        "qwen3.attention.value_length": HEAD,
        "qwen3.rope.freq_base": 1e6,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    }
    rng = np.random.default_rng(0)
    tensors = [
        (name, F32 if len(shape) == 1 else F16, shape, partial(weights, shape, rng))
        for name, shape in shapes(n_embd, n_ff).items()
    ]
    half = options.out.with_suffix(".f16.gguf")
    gguf.write(half, metadata, tensors)
    if options.type == "F16":
        half.rename(options.out)
        return
    requantize(half, options.out, options.type)
    half.unlink()


if __name__ == "__main__":
    main()
