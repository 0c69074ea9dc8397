"""Models that the lab is tried on, two texts, and the metric that most tests ask for."""

from pathlib import Path

import numpy as np
import pytest

import pyggml

MODELS = Path(__file__).parents[1] / "golden/models"


@pytest.fixture(scope="session")
def opened():
    """opened(name, **more): a golden model of the checkout, or of ../shared, by name and type."""

    def load(name, **more):
        folders = MODELS, Path(__file__).parents[2] / "../shared/fixtures"
        path = next((f / f"{name}.gguf" for f in folders if (f / f"{name}.gguf").exists()), None)
        if path is None:
            pytest.skip(f"{name} is one of the golden models of ../shared that no clone carries")
        return pyggml.load(path, **more)

    return load


@pytest.fixture(scope="session")
def llama(opened):
    """Grouped queries, rotary pairs (2i, 2i + 1), Q8_0, as a user opens it: products round."""
    return opened("llama-Q8_0")


@pytest.fixture(scope="session")
def qwen3(opened):
    """Norms of queries and keys, F16, with an adapter of every matrix."""
    return opened("qwen3-F16", adapter=MODELS / "qwen3-lora.gguf")


@pytest.fixture(scope="session")
def clean():
    return np.arange(1, 11)


@pytest.fixture(scope="session")
def corrupt(clean):
    return np.where(np.isin(np.arange(10), [3, 5]), [0, 0, 0, 99, 0, 77, 0, 0, 0, 0], clean)


@pytest.fixture(scope="session")
def difference():
    """A metric: the logit of token 7 less that of 5, behind the last token."""
    return lambda t: t["logits"][-1, 7] - t["logits"][-1, 5]
