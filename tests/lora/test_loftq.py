"""LoftQ's start: an adapter that is the largest part of what quantising took."""

import numpy as np
import pytest

import pyggml
from pyggml import gguf
from pyggml.errors import AdapterError
from pyggml.graph.arrays import read
from pyggml.lora import LoraConfig, attach
from pyggml.lora.adapter.starts import unpack
from pyggml.requantize import requantize

from measures import nmse

TOKENS = np.arange(30) * 11 % 48
NAME = "blk.1.ffn_up.weight"


@pytest.fixture(scope="module")
def packed(tiny, tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "tiny-Q4_0.gguf"
    requantize(tiny, path, "Q4_0")
    return pyggml.load(path, compute="f32")


def test_the_start_is_the_principal_part_of_the_error(tiny, packed):
    with gguf.open(tiny) as original:
        adapter = attach(packed, LoraConfig(rank=3, alpha=5, init="loftq"), original=original)
        lost = original.data(NAME) - unpack(packed.parts.weights[NAME])
    u, s, v = np.linalg.svd(lost)
    pair = adapter.pairs[NAME]
    found = pair.scale * read(pair.b) @ read(pair.a)
    np.testing.assert_allclose(found, (u[:, :3] * s[:3]) @ v[:3], atol=1e-5 * s[0])


def test_at_full_rank_the_start_is_the_original(tiny, packed):
    wanted = pyggml.load(tiny, compute="f32").logits(TOKENS)
    config = LoraConfig(
        rank=16, alpha=16, rank_pattern={"ffn_*": 32, "attn_[qo]*": 32}, init="loftq"
    )
    with gguf.open(tiny) as original:
        healed = attach(packed, config, original=original).model.logits(TOKENS)
    # The embedding and the output matrix stay as they are packed.
    assert nmse(healed, wanted) < 0.6 * nmse(packed.logits(TOKENS), wanted)


def test_what_is_no_original_is_named(tiny, packed, shared):
    with pytest.raises(AdapterError, match="init is loftq: loftq and an original want each other"):
        attach(packed, LoraConfig(init="loftq"))
    other = gguf.open(shared / "fixtures/llama-F16.gguf")
    with pytest.raises(AdapterError, match="is not the original of this model: blk.0.attn_q"):
        attach(packed, LoraConfig(init="loftq"), original=other)
    with gguf.open(tiny) as original, pytest.raises(AdapterError, match="dora is on, wanted"):
        attach(packed, LoraConfig(init="loftq", dora=True), original=original)
