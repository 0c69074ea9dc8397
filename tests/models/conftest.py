"""Golden models, and tiny ones that a test can spoil."""

from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from pyggml import gguf
from pyggml.dtypes import F32
from pyggml.models import ARCHITECTURES, draw, small_metadata, tensors_of

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
        "embedding_length": sizes["n_embd"],
        "block_count": sizes["n_layer"],
        "feed_forward_length": sizes["n_ff"],
        "attention.head_count": sizes["n_head"],
        "attention.head_count_kv": sizes["n_kv"],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    own = ARCHITECTURES[architecture].example
    return small_metadata(
        ARCHITECTURES[architecture], {k: v for k, v in keys.items() if k not in own}
    )


def shapes(metadata, n_vocab):
    """Every tensor of a tiny model with an output matrix of its own and no biases of matrices."""
    tensors = tensors_of(metadata, n_vocab).items()
    return {name: s.shape for name, s in tensors if not s.optional or name == "output.weight"}


@pytest.fixture
def tiny(tmp_path):
    """Write a tiny random model with some keys and tensors changed; None leaves one out."""

    def write(architecture="llama", keys=None, tensors=None, **sizes):
        sizes = SIZES | sizes
        usual = metadata(architecture, sizes)
        values, wanted = usual | (keys or {}), shapes(usual, sizes["n_vocab"]) | (tensors or {})
        sources = []
        for name, shape in wanted.items():
            if shape is not None:  # numbers depend on the name only
                rng = np.random.default_rng(crc32(name.encode()))
                sources.append((name, F32, shape, draw(name, shape, rng)))
        path = tmp_path / f"{architecture}.gguf"
        gguf.write(path, {k: v for k, v in values.items() if v is not None}, sources)
        return path

    return write
