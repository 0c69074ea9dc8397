"""Two tiny vocabularies, as metadata; make_llama_cpp_ids.py says what is in them. Real ones."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from pyggml.tokenizer import from_gguf, from_metadata

ARRAYS = {"token_type": np.int32, "scores": np.float32}
ROLES = {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 7}


def metadata_of(part):
    """Keys of tokenizer.ggml as the JSON file has them → as a GGUF file has them."""
    made = {k: np.array(v, ARRAYS[k]) if k in ARRAYS else v for k, v in part.items()}
    if "precompiled_charsmap" in made:
        raw = bytes.fromhex(part["precompiled_charsmap"])
        made["precompiled_charsmap"] = np.frombuffer(raw, np.uint8)
    return {f"tokenizer.ggml.{k}": v for k, v in made.items()}


@pytest.fixture(scope="session")
def golden():
    return json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())


@pytest.fixture(scope="session")
def tiny(golden):
    """Makes metadata: tiny("bpe", "spm" or a name of golden["kinds"], **changes of tokenizer.ggml
    keys); None removes one."""

    def make(kind, **changes):
        if kind in golden["kinds"]:
            made = metadata_of(golden["kinds"][kind]["ggml"])
            made |= {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
            return {k: v for k, v in made.items() if v is not None}
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
def kind(tiny):
    """Makes the tokenizer of tiny(name); once for all tests."""
    return functools.cache(lambda name: from_metadata(tiny(name)))


@pytest.fixture(scope="session")
def real(shared):
    """Makes the tokenizer of a real vocabulary by its name; once for all tests."""
    return functools.cache(lambda name: from_gguf(shared / f"vocab/ggml-vocab-{name}.gguf"))
