"""Frequency factors: one set for all contexts, or one for short and one for long ones."""

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import ModelError
from pyggml.generation import Session
from pyggml.graph.dtypes import F32

FACTORS = {"short": np.array([1.0, 3.0], np.float32), "long": np.array([2.0, 0.5], np.float32)}
TOKENS = np.arange(12) % 11


@pytest.fixture
def phi3(tiny, tmp_path):
    """Write a phi3 with frequency factors by tensor name; contexts above 8 are long ones."""

    def write(factors):
        plain = tiny("phi3", keys={"phi3.rope.scaling.original_context_length": 8})
        with gguf.open(plain) as file:
            tensors = [(n, i.dtype, i.shape, file.data(n)) for n, i in file.tensors.items()]
            tensors += [(f"{name}.weight", F32, a.shape, a) for name, a in factors.items()]
            path = tmp_path / f"{'-'.join(factors)}.gguf"
            gguf.write(path, file.metadata, tensors)
        return pyggml.load(path, compute="f32")

    return write


def test_a_long_context_has_factors_of_its_own(phi3):
    """As many rows are compared: how a product is summed may depend on their number, as in AMX."""
    both = phi3({f"rope_factors_{kind}": a for kind, a in FACTORS.items()})
    short, long = (phi3({"rope_freqs": a}) for a in FACTORS.values())
    np.testing.assert_array_equal(both.logits(TOKENS[:8]), short.logits(TOKENS[:8]))
    np.testing.assert_array_equal(both.logits(TOKENS), long.logits(TOKENS))
    assert np.abs(long.logits(TOKENS) - short.logits(TOKENS)).max() > 0.1


def test_the_cache_says_how_long_a_context_is(phi3):
    both = phi3({f"rope_factors_{kind}": a for kind, a in FACTORS.items()})
    short, long = (phi3({"rope_freqs": a}).logits(TOKENS[:4]) for a in FACTORS.values())
    for n_ctx, wanted in ((8, short), (9, long)):
        found = Session(both, n_ctx).feed(TOKENS[:4])
        np.testing.assert_allclose(found, wanted[-1], rtol=1e-4, atol=1e-5)


def test_half_a_set_of_factors(phi3):
    with pytest.raises(ModelError, match="rope_factors_short.weight is missing"):
        phi3({"rope_factors_long": FACTORS["long"]})
