"""Two tiny vocabularies, as metadata; make_llama_cpp_ids.py says what is in them. Real ones."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from pyggml.tokenizer import from_gguf

ROLES = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 7}


@pytest.fixture(scope="session")
def golden():
    return json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())


@pytest.fixture(scope="session")
def tiny(golden):
    """Makes metadata: tiny("bpe" or "spm", **changes of tokenizer.ggml keys); None removes one."""

    def make(kind, **changes):
        part = golden[kind]
        ggml = {"model": {"bpe": "gpt2", "spm": "llama"}[kind], **ROLES, "tokens": part["tokens"]}
        ggml["token_type"] = np.array(part["types"], np.int32)
        if kind == "bpe":
            ggml |= {"merges": part["merges"], "pre": "qwen2"}
        else:
            ggml["scores"] = np.array(part["scores"], np.float32)
        ggml |= changes
        return {f"tokenizer.ggml.{k}": v for k, v in ggml.items() if v is not None}

    return make


@pytest.fixture(scope="session")
def real(shared):
    """Makes the tokenizer of a real vocabulary by its name; once for all tests."""
    return functools.cache(lambda name: from_gguf(shared / f"vocab/ggml-vocab-{name}.gguf"))
