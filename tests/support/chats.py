"""Messages, where the texts that transformers makes of some are kept, and a vocabulary for them."""

import datetime
import functools
from pathlib import Path

import numpy as np

from pyggml.tokenizer import from_metadata
from pyggml.tokenizer.bpe import BYTE_OF

GOLDEN = Path(__file__).parents[1] / "golden" / "chat"
DAY = datetime.date(2025, 1, 31)
NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


class Bytes:
    """What data asks of a tokenizer; a token for each byte."""

    bos_id, eos_id, eot_id, add_bos, add_eos = None, 256, None, False, False
    chat_templates = ()

    def encode(self, text, add_special=True, parse_special=False):
        return list(text.encode())


@functools.cache
def vocabulary(add_bos=False, merges=(), template=None, tool_use=None):
    """A tokenizer of bytes and NAMES, of which <think> and </think> are user-defined."""
    merged = [merge.replace(" ", "", 1) for merge in merges]
    tokens = [*NAMES, *BYTE_OF, *merged]
    types = [3] * 4 + [4] * 2 + [1] * (len(tokens) - 6)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": add_bos,
    }
    templates = {"tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": tool_use}
    return from_metadata(metadata | {name: text for name, text in templates.items() if text})
