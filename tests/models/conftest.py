"""Golden models, and tiny ones that a test can spoil."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models

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


@pytest.fixture
def tiny(tmp_path):
    """tiny(architecture, keys, tensors, sizes): a model's path, as of `tiny_models.write`."""

    def write(architecture="llama", keys=None, tensors=None, sizes=None):
        path = tmp_path / f"{architecture}.gguf"
        return tiny_models.write(path, architecture, sizes, keys, tensors)

    return write
