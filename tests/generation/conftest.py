"""The tiny llama model of bytes, and its tokenizer."""

import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

from pyggml import tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_llama(path, len(TOKENS), n_layer=2, seed=1, keys=VOCABULARY)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny):
    return tokenizer.from_gguf(tiny)
