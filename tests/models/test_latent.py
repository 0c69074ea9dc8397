"""Latent attention: absorbed it is what it is with whole heads, and a cache holds a latent vector
once; which files are read how, and which are refused."""

import numpy as np
import pytest
from tiny_models import normal

import pyggml
from pyggml import At
from pyggml.errors import ModelError
from pyggml.generation import Session
from pyggml.lora import loss_and_grads
from pyggml.models import ARCHITECTURES, compose, small_metadata
from pyggml.models.latent import LatentAttention

from measures import nmse

IDS = np.arange(24) * 7 % 11
N_HEAD, RANK, SHARED, SIZE, VALUE = 4, 8, 4, 10, 6  # of the example of deepseek2
OWN = SIZE - SHARED
WHOLE = {
    "attention.key_length": SIZE,
    "attention.value_length": VALUE,
    "attention.key_length_mla": 0,
    "attention.value_length_mla": 0,
    "attention.head_count_kv": N_HEAD,
}


def joined_kv_b(at):
    """attn_kv_b of a layer: each head's attn_k_b, upright, over its attn_v_b."""
    k = normal(f"{at}attn_k_b.weight", (N_HEAD, RANK, OWN)).swapaxes(1, 2)
    v = normal(f"{at}attn_v_b.weight", (N_HEAD, VALUE, RANK))
    return np.concatenate([k, v], axis=1).reshape(-1, RANK)


def test_absorbed_and_whole_heads_are_one(tiny):
    absorbed = pyggml.load(tiny("deepseek2"), compute="f32").logits(IDS)
    tensors = {f"blk.{i}.attn_kv_b.weight": joined_kv_b(f"blk.{i}.") for i in (0, 1)}
    whole = pyggml.load(tiny("deepseek2", sizes=WHOLE, tensors=tensors), compute="f32")
    assert nmse(whole.logits(IDS), absorbed) < 1e-9


def test_a_cache_holds_a_latent_vector_once(tiny):
    """llama.cpp's rows too; with whole heads, keys and values of each."""
    for sizes, width in (({}, RANK + SHARED), (WHOLE, N_HEAD * (SIZE + VALUE))):
        rows = pyggml.load(tiny("deepseek2", sizes=sizes)).parts.decoder.rows()
        assert sum(heads * n for heads, n in rows.values()) == 2 * width


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_cache_of_every_type(kind, tiny):
    sizes = {"attention.kv_lora_rank": 56, "attention.key_length": 64}
    sizes |= {"rope.dimension_count": 8, "attention.key_length_mla": 14}
    model = pyggml.load(tiny("deepseek2", sizes=sizes), compute="f32")
    session = Session(model, 24, kind)
    session.feed(IDS[:15])
    assert nmse(session.feed(IDS[15:]), model.logits(IDS)[-1]) < {"f16": 1e-4, "q8_0": 1e-2}[kind]


def decoder_of(architecture="deepseek2", n_vocab=11, **sizes):
    metadata = small_metadata(
        ARCHITECTURES[architecture], {k.replace("__", "."): v for k, v in sizes.items()}
    )
    return compose(metadata.get, {"token_embd.weight": (n_vocab, 256)}, "test")


def attention_of(decoder):
    found = [p for p in _parts(decoder.blocks[0]) if isinstance(p, LatentAttention)]
    assert len(found) == 1
    return found[0]


def _parts(part):
    return [part, *(p for inner in getattr(part, "inner", ()) for p in _parts(inner))]


@pytest.mark.parametrize(
    ("n_layer", "n_vocab", "q_rank"), [(26, 11, 0), (27, 11, 0), (48, 128256, 0), (48, 11, 12)]
)
def test_lite_models_are_known_by_their_sizes(n_layer, n_vocab, q_rank):
    """As in llama.cpp, which does not read the rank of their queries."""
    assert attention_of(decoder_of(n_vocab=n_vocab, block_count=n_layer)).q_rank == q_rank


REFUSED = [
    ({"attention.head_count_kv": 4}, "deepseek2.attention.head_count_kv is 4, wanted 1"),
    ({"attention.key_length": 13}, "deepseek2.attention.key_length is 13, wanted 12"),
    ({"attention.key_length_mla": 4}, "4 numbers of a key are rotated, wanted fewer than its 4"),
    ({"attention.q_lora_rank": None}, "deepseek2.attention.q_lora_rank is missing"),
    ({**WHOLE, "attention.head_count_kv": 2}, "head_count_kv is 2, wanted 4"),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED)
def test_lengths_that_do_not_fit_are_refused(sizes, message):
    metadata = small_metadata(ARCHITECTURES["deepseek2"], sizes)
    metadata = {name: value for name, value in metadata.items() if value is not None}
    with pytest.raises(ModelError, match=message):
        compose(metadata.get, {"token_embd.weight": (11, 256)}, "test")


def test_an_old_file_of_kimi_is_refused_by_name(tiny):
    sizes = {"attention.key_length_mla": 0, "attention.value_length_mla": 0}
    with pytest.raises(ModelError, match="attn_k_b and attn_v_b: convert the checkpoint anew"):
        decoder_of("kimi-linear", **{k.replace(".", "__"): v for k, v in sizes.items()})


@pytest.mark.parametrize("sizes", [{}, WHOLE], ids=["absorbed", "whole heads"])
def test_its_pattern_is_read_and_changed(sizes, tiny):
    """Of both forms, by queries and keys as they are computed; in a run, generation and a loss."""
    model = pyggml.load(tiny("deepseek2", sizes=sizes), compute="f32")
    name, n = "blk.1.attn_pattern", len(IDS)
    with model.trace(name, "blk.1.q", "blk.1.k", "blk.1.attention") as t:
        looked_at = model.logits(IDS)
    assert nmse(looked_at, model.logits(IDS)) < 1e-9
    q, k = t["blk.1.q"].astype(np.float64), t["blk.1.k"].astype(np.float64)
    k = np.repeat(k, N_HEAD // k.shape[1], axis=1)
    s = np.einsum("thd,shd->ths", q, k) * SIZE**-0.5
    s = np.where(np.tri(n, dtype=bool)[:, None], s, -np.inf)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(t[name], e / e.sum(axis=-1, keepdims=True), rtol=0, atol=1e-5)
    with model.trace(scale={"blk.1.attention": At(0, heads=[2])}):
        wanted, loss = model.logits(IDS), loss_and_grads(model, IDS, parameters={})[0]
    assert nmse(wanted, looked_at) > 1e-4
    with model.trace(name, scale={name: At(0, heads=[2])}) as t:
        assert nmse(model.logits(IDS), wanted) < 1e-9
        session = Session(model, 32)
        session.feed(IDS[:15])
        assert nmse(session.feed(IDS[15:]), wanted[-1]) < 1e-4
        assert loss_and_grads(model, IDS, parameters={})[0] == pytest.approx(loss, abs=1e-5)
    assert t.grad(name).shape == (n - 1, N_HEAD, n - 1) and t.grad(name).any()
