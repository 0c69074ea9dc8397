"""Tiny random models of every architecture, as files and in memory: where tests get theirs.

A number depends on the tensor's name and the seed only, not on what else is in the model.
"""

from functools import partial
from zlib import crc32

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from pyggml import gguf
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import zeros
from pyggml.models import ARCHITECTURES, ENCODERS, Parts, compose, draw, small_metadata, tensors_of

SIZES = {  # beside those of `small_metadata`, where an architecture's example has no other
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
NO_VOCABULARY = {"tokenizer.ggml.model": "no_vocab"}  # which llama.cpp wants to be told
TOKENS = [*sorted(ByteLevel.alphabet()), "th", "<|endoftext|>"]
END = len(TOKENS) - 1
NO_END = {str(END): -100}  # as a request's logit_bias: the answer ends at its limit only
VOCABULARY = {  # bytes, a pair of them, and an end of text
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": np.array([1] * END + [3], np.int32),
    "tokenizer.ggml.merges": ["t h"],
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.add_bos_token": False,
}


def normal(name, shape, seed=0):
    """Normal numbers, matrices too: activations are large."""
    return draw(name, shape, np.random.default_rng([crc32(name.encode()), seed]))


def scaled(name, shape, seed=0):
    """Numbers as large as in trained models: neither norms nor matrices change the size of x."""
    x = normal(name, shape, seed)
    return 1 + x / 10 if "norm" in name else x * np.float32(1.5 * shape[-1] ** -0.5)


def write(
    path, architecture="llama", sizes=None, keys=None, tensors=None, n_vocab=11, numbers=normal
):
    """Write a model; returns its path.

    sizes      keys of the architecture, without its name
    keys       metadata by its whole name, which changes no shape; None removes a key
    tensors    name → shape or array, besides what the architecture requires; None leaves one out
    numbers    (name, shape) → float32
    """
    declared = {**ARCHITECTURES, **ENCODERS}[architecture]
    usual = {k: v for k, v in SIZES.items() if k not in declared.example}
    metadata = small_metadata(declared, usual | (sizes or {}))
    wanted = _shapes(metadata, n_vocab) | (tensors or {})
    sources = []
    for name, found in wanted.items():
        if found is not None:
            array = found if isinstance(found, np.ndarray) else numbers(name, found)
            sources.append((name, F32, array.shape, array))
    metadata |= keys or {}
    gguf.write(path, {k: v for k, v in metadata.items() if v is not None}, sources)
    return path


def _shapes(metadata, n_vocab):
    """Every tensor of a model with an output matrix of its own and no other optional one."""
    tensors = tensors_of(metadata, n_vocab).items()
    return {name: s.shape for name, s in tensors if not s.optional or name == "output.weight"}


def write_llama(path, n_vocab, n_layer, seed, tied=False, keys=None, numbers=scaled):
    """Write a llama whose training goes as that of a real one; returns its path."""
    return write(
        path,
        sizes={"embedding_length": 32, "feed_forward_length": 64, "block_count": n_layer},
        keys={"general.name": "tiny"} | (keys or {}),
        tensors={"output.weight": None} if tied else {},
        n_vocab=n_vocab,
        numbers=partial(numbers, seed=seed),
    )


def spoil(name, shape, seed):
    """As `scaled`, but a number of the last block's norm is none."""
    array = scaled(name, shape, seed)
    if name == "blk.1.ffn_norm.weight":
        array[0] = np.nan
    return array


def zero_parts(architecture, n_vocab, sizes=None):
    """A model of zeros in memory, with every tensor that the architecture may have."""
    metadata = small_metadata(ARCHITECTURES[architecture], sizes)
    specs = tensors_of(metadata, n_vocab)
    decoder = compose(metadata.get, {n: s.shape for n, s in specs.items()}, architecture)
    return Parts(decoder, {n: zeros(s.shape, F32, n) for n, s in specs.items()})
