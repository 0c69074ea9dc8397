"""Write a GGUF of Qwen3's shape with random weights: a model of a real size to time.

usage: make_model.py OUT.gguf [--size 0.6B|1.7B|8B|70B|30B-A3B] [--type Q8_0|Q4_K_M|F16|…]
                     [--layers N] [--vocab FILE.gguf] [--zeros]

The vocabulary has the real one's 151,936 tokens, but no text to them unless another file has it,
such as ggml-vocab-qwen2.gguf among llama.cpp's sources. --type names a file type of
`pyggml quantize`, whose mix of weight types it has, or a weight type that all matrices have, such
as Q4_K. A matrix repeats 256 rows that were packed once, so experts and layers are alike. With
--zeros all weights are 0, in a file with holes, which takes no place on most disks.
"""

import argparse
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.graph.dtypes import DTYPES, F32, DType
from pyggml.models.weights import FRESH
from pyggml.quants import QUANTS, quantize
from pyggml.requantize import FILE_TYPES, ModelFacts, mix
from pyggml.requantize.mix import is_packed

from sizes import HEAD, N_VOCAB, SIZES, Size

Shapes = dict[str, tuple[int, ...]]


def shapes(size: Size, n_layer: int) -> Shapes:
    """The shape of every tensor, outermost axis first."""
    n, ff = size.n_embd, size.n_ff
    ends: Shapes = {"token_embd.weight": (N_VOCAB, n), "output_norm.weight": (n,)}
    if not size.tied:
        ends["output.weight"] = (N_VOCAB, n)
    block: Shapes = {
        "attn_norm": (n,),
        "attn_q": (size.n_head * HEAD, n),
        "attn_k": (size.n_head_kv * HEAD, n),
        "attn_v": (size.n_head_kv * HEAD, n),
        "attn_q_norm": (HEAD,),
        "attn_k_norm": (HEAD,),
        "attn_output": (n, size.n_head * HEAD),
        "ffn_norm": (n,),
    }
    ffn: Shapes = {"ffn_gate": (ff, n), "ffn_up": (ff, n), "ffn_down": (n, ff)}
    if size.n_expert:
        ffn = {f"{name}_exps": (size.n_expert, *shape) for name, shape in ffn.items()}
        ffn["ffn_gate_inp"] = (size.n_expert, n)
    layers = range(n_layer)
    return ends | {f"blk.{i}.{k}.weight": v for i in layers for k, v in (block | ffn).items()}


def metadata(size: Size, n_layer: int) -> dict[str, Any]:
    about: dict[str, Any] = {
        "vocab_size": N_VOCAB,
        "block_count": n_layer,
        "context_length": 40960,
        "embedding_length": size.n_embd,
        "feed_forward_length": size.n_ff,
        "attention.head_count": size.n_head,
        "attention.head_count_kv": size.n_head_kv,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.freq_base": 1e6,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    if size.n_expert:
        about["expert_feed_forward_length"] = size.n_ff
        about |= {"expert_count": size.n_expert, "expert_used_count": size.n_used}
    named = {f"{size.architecture}.{key}": value for key, value in about.items()}
    return {"general.architecture": size.architecture} | named


def vocabulary(path: Path | None) -> dict[str, Any]:
    """The fields of a file's tokenizer; llama.cpp wants to be told if there is none."""
    if path is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    with gguf.open(path) as file:
        return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}


def types(kind: str, of: Shapes, size: Size, n_layer: int) -> dict[str, DType]:
    """The type of every tensor: by a file type's mix, or of all matrices the same."""
    if kind in FILE_TYPES:
        n_heads = {"n_head": size.n_head, "n_head_kv": size.n_head_kv}
        facts = ModelFacts(
            architecture=size.architecture, n_layer=n_layer, n_expert=size.n_expert, **n_heads
        )
        return mix(kind, of.items(), facts)
    return {name: DTYPES[kind] if is_packed(name, shape) else F32 for name, shape in of.items()}


def values(shape: tuple[int, ...], dtype: DType, rng: np.random.Generator) -> np.ndarray:
    """Random weights, packed: near 1 in vectors, of standard deviation 0.02 in matrices."""
    if len(shape) == 1:
        return (1 + 0.02 * rng.standard_normal(shape)).astype(np.float32)
    n_rows = np.prod(shape[:-1], dtype=int)
    packed = packed_rows(shape[-1], dtype.name)
    rows = np.tile(packed, (-(-n_rows // 256), 1))[:n_rows]
    return rows.view(dtype.numpy).reshape(*shape[:-1], -1)


@cache
def packed_rows(n: int, kind: str) -> np.ndarray:
    """256 rows of n random weights, as bytes."""
    weights = 0.02 * np.random.default_rng(n).standard_normal((256, n), np.float32)
    return quantize(weights, kind).reshape(256, -1)


def write(
    out: Path,
    size: Size,
    kind: str,
    n_layer: int | None = None,
    vocab: Path | None = None,
    zeros: bool = False,
) -> None:
    """Write a model of this size. kind: see --type. n_layer: fewer than it has; vocab, zeros: see
    above"""
    n_layer = n_layer or size.n_layer
    of, rng = shapes(size, n_layer), np.random.default_rng(0)
    about = metadata(size, n_layer) | vocabulary(vocab)
    if zeros:
        kinds = types(kind, of, size, n_layer).items()
        gguf.reserve(out, about | {FRESH: 1}, [(name, dtype, of[name]) for name, dtype in kinds])
        return
    tensors = [
        (name, dtype, of[name], partial(values, of[name], dtype, rng))
        for name, dtype in types(kind, of, size, n_layer).items()
    ]
    gguf.write(out, about, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="0.6B")
    parser.add_argument("--type", choices=[*FILE_TYPES, *QUANTS], default="Q8_0", metavar="TYPE")
    parser.add_argument("--vocab", type=Path, help="a GGUF with the tokens' text")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--zeros", action="store_true", help="no weights: a file with holes")
    o = parser.parse_args()
    write(o.out, SIZES[o.size], o.type, o.layers, o.vocab, o.zeros)


if __name__ == "__main__":
    main()
