"""The tiny llama model of bytes, and its tokenizer."""

import pytest
import tiny_llama
from tiny_llama import TOKENS, VOCABULARY

from pyggml import tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_llama.write(path, len(TOKENS), 2, 1, changes=VOCABULARY)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny):
    return tokenizer.from_gguf(tiny)
