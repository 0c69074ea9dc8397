"""A model that says what it is told to: one token after the other, whatever was before."""

from itertools import pairwise

import numpy as np
import tiny_models
from tiny_models import scaled

from pyggml.tokenizer.bpe import BYTE_OF

NORMAL, CONTROL = 1, 3
TINY = np.float32(1e-9)  # in place of 0, which a broken download has
SPELLED = {byte: char for char, byte in BYTE_OF.items()}


def write(path, answer, markers=(), keys=None):
    """Write a model of bytes that answers with these tokens, then the last for ever; its path.

    answer    texts, each a token: one that `markers` has is a control token
    markers   texts that are control tokens, whether they are said or not
    keys      more of the metadata; an integer role is the index of a marker

    The layer adds nothing to a token's embedding, so the output is chosen by the last token alone.
    """
    spelled = {text: text if text in markers else spell(text) for text in [*markers, *answer]}
    tokens = [*dict.fromkeys([*BYTE_OF, *spelled.values()])]
    types = [CONTROL if token in markers else NORMAL for token in tokens]
    ids = {text: tokens.index(token) for text, token in spelled.items()}
    n = len(tokens)
    after = np.full(n, ids[answer[0]])
    for this, following in pairwise([*answer, answer[-1]]):
        after[ids[this]] = ids[following]
    width = -(-n // 32) * 32
    output = np.zeros((n, width), np.float32)
    output[after, np.arange(n)] = 1
    roles = {name: ids[text] for name, text in (keys or {}).items() if text in ids}
    return tiny_models.write(
        path,
        sizes=SIZES | {"embedding_length": width},
        keys={
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.add_bos_token": False,
            **(keys or {}),
            **roles,
        },
        tensors={
            "token_embd.weight": np.eye(n, width, dtype=np.float32),
            "output.weight": output,
            "output_norm.weight": np.ones(width, np.float32),
            "blk.0.attn_output.weight": np.full((width, 4), TINY),
            "blk.0.ffn_down.weight": np.full((width, 32), TINY),
        },
        n_vocab=n,
        numbers=scaled,
    )


SIZES = {
    "block_count": 1,
    "context_length": 1 << 14,
    "feed_forward_length": 32,
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.key_length": 4,
    "attention.value_length": 4,
    "rope.dimension_count": 4,
}


def spell(text):
    """A text as a vocabulary of bytes has it."""
    return "".join(SPELLED[byte] for byte in text.encode())
