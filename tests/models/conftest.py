"""Golden models, and tiny ones that a test can spoil."""

from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from pyggml import gguf
from pyggml.dtypes import F32

GOLDEN = Path(__file__).parents[1] / "golden/models"
FULL = Path(__file__).parents[2] / "../shared/fixtures"


@pytest.fixture(scope="session")
def golden_file():
    """Name -> path: in ../shared/fixtures if that is there, else in the committed part of it."""

    def find(name):
        for folder in (FULL, GOLDEN):
            if (folder / name).exists():
                return folder / name
        pytest.skip(f"{name} is one of the golden models of ../shared that no clone carries")

    return find


@pytest.fixture(scope="session")
def golden(golden_file):
    """Architecture -> its golden arrays; `rows` are those of the logits that are there."""

    def load(architecture):
        with np.load(golden_file(f"{architecture}-golden.npz")) as arrays:
            return {"rows": np.arange(48)} | dict(arrays)

    return load


SIZES = {"n_embd": 16, "n_ff": 24, "n_head": 4, "n_kv": 2, "n_vocab": 11, "n_layer": 2}


def metadata(architecture, sizes):
    keys = {
        "context_length": 64,
        "embedding_length": sizes["n_embd"],
        "block_count": sizes["n_layer"],
        "feed_forward_length": sizes["n_ff"],
        "attention.head_count": sizes["n_head"],
        "attention.head_count_kv": sizes["n_kv"],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    own = {f"{architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": architecture} | own


def shapes(architecture, sizes):
    """Every tensor of a tiny model with an output matrix of its own."""
    e, f, d = sizes["n_embd"], sizes["n_ff"], sizes["n_embd"] // sizes["n_head"]
    kv = sizes["n_kv"] * d
    found = {
        "token_embd.weight": (sizes["n_vocab"], e),
        "output_norm.weight": (e,),
        "output.weight": (sizes["n_vocab"], e),
    }
    block = {"attn_norm": (e,), "ffn_norm": (e,), "attn_q": (e, e), "attn_k": (kv, e)}
    block |= {"attn_v": (kv, e), "attn_output": (e, e)}
    block |= {"ffn_gate": (f, e), "ffn_up": (f, e), "ffn_down": (e, f)}
    if architecture == "qwen3":
        block |= {"attn_q_norm": (d,), "attn_k_norm": (d,)}
    for i in range(sizes["n_layer"]):
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in block.items()}
    return found


@pytest.fixture
def tiny(tmp_path):
    """Write a tiny random model with some keys and tensors changed; None leaves one out."""

    def write(architecture="llama", keys=None, tensors=None, **sizes):
        values = metadata(architecture, SIZES | sizes) | (keys or {})
        wanted = shapes(architecture, SIZES | sizes) | (tensors or {})
        sources = []
        for name, shape in wanted.items():
            if shape is not None:  # numbers depend on the name only
                rng = np.random.default_rng(crc32(name.encode()))
                array = rng.standard_normal(shape).astype(np.float32)
                sources.append((name, F32, shape, array))
        path = tmp_path / f"{architecture}.gguf"
        gguf.write(path, {k: v for k, v in values.items() if v is not None}, sources)
        return path

    return write
