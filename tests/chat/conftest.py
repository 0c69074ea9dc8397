"""Conversations, templates of real models, and a vocabulary with names of turns."""

import functools
import json

import numpy as np
import pytest

from pyggml.chat import ChatTemplate
from pyggml.tokenizer import from_metadata

from chats import DAY, GOLDEN

NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


@pytest.fixture(scope="session")
def conversations():
    return json.loads((GOLDEN / "conversations.json").read_text("utf-8"))


@pytest.fixture(scope="session")
def template(shared):
    """Makes the template of a real model by its name."""

    @functools.cache
    def make(name):
        source = (shared / f"templates/{name}.jinja").read_text("utf-8")
        return ChatTemplate(source, name, {"bos_token": "<s>", "eos_token": "</s>"}, DAY)

    return make


@pytest.fixture(scope="session")
def vocabulary():
    """Makes a tokenizer of bytes and NAMES, <think> and </think> user-defined."""
    from pyggml.tokenizer.bpe import BYTE_OF

    @functools.cache
    def make(add_bos=False, merges=(), pre="qwen2", template=None):
        merged = [merge.replace(" ", "", 1) for merge in merges]
        tokens = [*NAMES, *BYTE_OF, *merged]
        types = [3] * 4 + [4] * 2 + [1] * (len(tokens) - 6)
        return from_metadata(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": pre,
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.token_type": np.array(types, np.int32),
                "tokenizer.ggml.merges": list(merges),
                "tokenizer.ggml.bos_token_id": 0,
                "tokenizer.ggml.eos_token_id": 1,
                "tokenizer.ggml.add_bos_token": add_bos,
                **({"tokenizer.chat_template": template} if template else {}),
            }
        )

    return make
