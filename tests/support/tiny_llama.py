"""A tiny random llama model as a GGUF file; the fixtures of tests/lora and tests/cli write it."""

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from pyggml import gguf
from pyggml.dtypes import F32

N_EMBD, N_FF, N_KV = 32, 64, 16
TOKENS = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>"]
VOCABULARY = {  # bytes, a pair of them, and an end of text
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([1] * (len(TOKENS) - 1) + [3], np.int32),
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    "tokenizer.ggml.add_bos_token": False,
}


def write(path, n_vocab, n_layer, seed, tied=False, attention="qkvo", changes=None):
    """Write the model; returns its path.

    attention   the order of a block's four matrices in the file, and so of the random numbers
    changes     metadata besides the usual; None removes a key
    """
    rng = np.random.default_rng(seed)
    tensors = []
    for name, shape in _shapes(n_vocab, n_layer, tied, attention).items():
        data = rng.normal(float(len(shape) == 1), 0.3 if len(shape) > 1 else 0.1, shape)
        tensors.append((f"{name}.weight", F32, shape, data.astype(np.float32)))
    metadata = _metadata(n_layer) | (changes or {})
    gguf.write(path, {k: v for k, v in metadata.items() if v is not None}, tensors)
    return path


def _metadata(n_layer):
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": 64,
        "llama.embedding_length": N_EMBD,
        "llama.block_count": n_layer,
        "llama.feed_forward_length": N_FF,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }


def _shapes(n_vocab, n_layer, tied, attention):
    of = {"q": ("attn_q", N_EMBD), "k": ("attn_k", N_KV), "v": ("attn_v", N_KV)}
    of["o"] = "attn_output", N_EMBD
    shapes = {"token_embd": (n_vocab, N_EMBD), "output_norm": (N_EMBD,)}
    shapes |= {} if tied else {"output": (n_vocab, N_EMBD)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{norm}": (N_EMBD,) for norm in ("attn_norm", "ffn_norm")}
        for name, n_out in (of[letter] for letter in attention):
            shapes[f"blk.{i}.{name}"] = n_out, N_EMBD
        shapes |= {f"blk.{i}.ffn_{m}": (N_FF, N_EMBD) for m in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down"] = N_EMBD, N_FF
    return shapes
