"""Models begun from scratch: sizes, first numbers and vocabularies; each trains from there."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pyggml
from pyggml.errors import ConfigError, ModelError
from pyggml.fresh import Fresh, count, hyperparameters, vocabulary_fields, write
from pyggml.fresh.initial import WITHOUT, initial
from pyggml.fresh.sizes import is_there
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.models import ARCHITECTURES, tensors_of
from pyggml.tokenizer import from_metadata

TEXT = "In Köln lebt ein Kater, der heißt Jakob. Jakob lebt in Köln am Rhein, am Rhein. " * 20
N_VOCAB = 290


@pytest.fixture(scope="module")
def fields():
    return vocabulary_fields([TEXT], N_VOCAB)


# Of their examples' key heads, not each number of heads is a multiple.
FEW_KEY_HEADS = ["deci", "granitehybrid", "jamba", "lfm2", "nemotron_h"]


@pytest.mark.parametrize("names, n_params", [(ARCHITECTURES, 4e6), (FEW_KEY_HEADS, 30e6)])
def test_every_architecture_has_a_size(names, n_params):
    sized = {
        name: count(hyperparameters(name, int(n_params), 2048, 256), 2048) / n_params
        for name in names
    }
    off = {name: share for name, share in sized.items() if not 0.5 < share < 1.5}
    assert not off
    assert 0.9 < sized.get("llama", 1) < 1.1


@pytest.mark.quick
def test_keys_stand_and_the_rest_follows(monkeypatch):
    keys = {"llama.embedding_length": 96, "llama.attention.head_count_kv": 1}
    metadata = hyperparameters("llama", 1_000_000, N_VOCAB, 64, keys=keys)
    assert metadata["llama.embedding_length"] == 96
    assert metadata["llama.attention.head_count_kv"] == 1
    assert metadata["llama.context_length"] == 64
    keys = {"llama.attention.head_count": 5}
    assert (
        hyperparameters("llama", 10**6, N_VOCAB, 64, keys=keys)["llama.embedding_length"] % 5 == 0
    )
    monkeypatch.setattr("pyggml.fresh.sizes._MOST_WIDTH", 1024)  # all depths of wide ones take long
    for n_params in (1000, 10**12):
        with pytest.raises(ConfigError, match="too few or too many"):
            hyperparameters("llama", n_params, 32000, 64)
    with pytest.raises(ConfigError, match="too few or too many"):  # its heads ask for a wider one
        hyperparameters("rwkv7", 100_000, N_VOCAB, 64)
    with pytest.raises(ConfigError, match="architecture 'lama': did you mean 'llama'"):
        hyperparameters("lama", 10**6, N_VOCAB, 64)
    with pytest.raises(ConfigError, match="architecture 'no': known are llama, "):
        hyperparameters("no", 10**6, N_VOCAB, 64)


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt2", "gemma3", "mamba", "mamba2", "qwen3moe", "rwkv7", "deepseek2", "qwen35"],
)
def test_a_fresh_model_predicts_next_to_nothing(name, fields, tmp_path):
    """Its loss is that of equal chances, and so is its gradient's direction: down."""
    n_vocab = len(fields["tokenizer.ggml.tokens"])
    metadata = hyperparameters(name, 200_000, n_vocab, 64)
    fresh = Fresh(metadata, n_vocab, fields)
    write(tmp_path / "m.gguf", fresh, seed=1)
    model = pyggml.load(tmp_path / "m.gguf", compute="f32")
    ids = model.tokenizer.encode(TEXT)[:32]
    logits = model.logits(ids).astype(np.float64)
    loss = np.log(np.exp(logits[:-1]).sum(1)) - logits[np.arange(31), ids[1:]]
    assert abs(loss.mean() - math.log(n_vocab)) < 0.2
    assert sum(math.prod(w.shape) for w in model.parts.weights.values()) == count(metadata, n_vocab)
    again = tmp_path / "again.gguf"
    write(again, fresh, seed=1)
    assert again.read_bytes() == (tmp_path / "m.gguf").read_bytes()
    write(again, fresh, seed=2)
    assert again.read_bytes() != (tmp_path / "m.gguf").read_bytes()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_halves_are_the_same_numbers_rounded(dtype, fields, tmp_path):
    n_vocab = len(fields["tokenizer.ggml.tokens"])
    fresh = Fresh(hyperparameters("llama", 100_000, n_vocab, 64), n_vocab, fields, tied=False)
    write(tmp_path / "f.gguf", fresh)
    write(tmp_path / "h.gguf", fresh, dtype)
    with pyggml.gguf.open(tmp_path / "f.gguf") as f, pyggml.gguf.open(tmp_path / "h.gguf") as h:
        assert h.tensors["output.weight"].dtype is dtype
        assert h.tensors["blk.0.attn_norm.weight"].dtype is F32
        values = pyggml.quants.dequantize(h.data("output.weight"), dtype.name)
        np.testing.assert_allclose(values, f.data("output.weight"), rtol=2**-8, atol=1e-7)


def test_first_numbers():
    n = 64
    assert (initial("blk.0.attn_norm.weight", (n,), "llama", 2) == 1).all()
    assert (initial("blk.0.attn_q.bias", (n,), "qwen2", 2) == 0).all()
    assert abs(initial("blk.0.attn_q.weight", (n, n), "llama", 2).std() - 0.02) < 1e-3
    assert abs(initial("blk.0.attn_q.weight", (n, n), "deepseek2", 2).std() - 0.006) < 3e-4
    assert abs(initial("blk.3.ffn_down.weight", (n, n), "gpt2", 8).std() - 0.02 / 4) < 3e-4
    assert (
        initial("rope_freqs.weight", (8,), "gemma4", 2).tolist()
        == [1.0] * 2 + [np.float32(1e30)] * 6
    )
    decay = initial("blk.0.ssm_a", (n, 16), "mamba", 2)
    assert (decay == -np.arange(1, 17)).all()
    step = np.log1p(np.exp(initial("blk.0.ssm_dt.bias", (n,), "mamba", 2).astype(np.float64)))
    assert step.min() > 0.00099 and step.max() < 0.101


def test_first_numbers_of_rwkv():
    """Decays and interpolations fall along the channels, by a law of the layer."""
    n = 128
    ends = [initial(f"blk.{i}.time_mix_w0.weight", (n,), "rwkv7", 3)[[0, -1]] for i in (0, 2)]
    np.testing.assert_allclose(ends, [[-8, 3]] * 2, rtol=1e-6)
    middle = [initial(f"blk.{i}.time_mix_w0.weight", (n,), "rwkv7", 3)[n // 2] for i in (0, 2)]
    assert middle[0] > middle[1], "later layers forget more slowly"
    r, w, *_ = initial("blk.1.time_mix_lerp_fused.weight", (6, 1, 1, n), "rwkv7", 2).reshape(6, n)
    assert r[0] == w[0] == 1 and (np.diff(w) < 0).all() and (r < w)[1:].all()
    six = initial("blk.1.time_mix_decay.weight", (n,), "rwkv6", 2)
    assert six[0] == -6 and six[-1] == -1
    assert (initial("blk.1.time_mix_output.weight", (n, n), "rwkv6", 2) == 0).all()
    key = initial("blk.1.time_mix_key.weight", (n, n), "rwkv7", 2)
    np.testing.assert_allclose(key @ key.T, 0.01 * np.eye(n), atol=1e-6)


def test_a_baichuan_has_the_layers_by_which_llama_cpp_rotates():
    metadata = hyperparameters("baichuan", 4 * 10**6, N_VOCAB, 64)
    assert metadata["baichuan.block_count"] == 32


def test_a_hybrid_has_a_layer_of_each_kind_as_llama_cpp_wants():
    for keys in ({}, {"lfm2.block_count": 5}):
        metadata = hyperparameters("lfm2", 900_000, N_VOCAB, 64, keys=keys)
        kinds = metadata["lfm2.attention.head_count_kv"]
        assert len(kinds) == metadata["lfm2.block_count"] == keys.get("lfm2.block_count", 2)
        assert set(map(bool, kinds)) == {True, False}
        assert 0.5 < count(metadata, N_VOCAB) / 900_000 < 1.5
    metadata = hyperparameters("gptneox", 400_000, N_VOCAB, 64)
    assert is_there(
        "gptneox", "blk.0.attn_qkv.bias", tensors_of(metadata, N_VOCAB)["blk.0.attn_qkv.bias"], True
    )


def test_what_has_no_first_numbers_is_refused(fields):
    for name in WITHOUT:
        with pytest.raises(ModelError, match=f"{name} is not begun from scratch"):
            Fresh({"general.architecture": name}, N_VOCAB, fields).tensors()


@given(st.text(max_size=40), st.sampled_from(["bpe", "characters", "bytes"]))
def test_every_text_comes_back(text, kind):
    tokenizer = from_metadata(VOCABULARIES[kind])
    assert tokenizer.decode(tokenizer.encode(text)) == text


VOCABULARIES = {kind: vocabulary_fields([TEXT], N_VOCAB, kind) for kind in ("bpe", "bytes")}
VOCABULARIES["characters"] = vocabulary_fields([TEXT], 10**4, "characters")


def test_a_vocabulary_is_of_its_kind():
    bpe, characters, plain = (VOCABULARIES[k] for k in ("bpe", "characters", "bytes"))
    assert len(bpe["tokenizer.ggml.tokens"]) == N_VOCAB
    assert len(plain["tokenizer.ggml.tokens"]) == 257 and not plain["tokenizer.ggml.merges"]
    assert len(characters["tokenizer.ggml.tokens"]) == 257 + len("öß")
    assert len(from_metadata(characters).encode(TEXT)) == len(TEXT)
    assert len(from_metadata(bpe).encode(TEXT)) < len(TEXT) / 2
    with_special = vocabulary_fields([TEXT], N_VOCAB, special=["<|im_end|>"])
    assert with_special["tokenizer.ggml.tokens"][-2:] == ["<|endoftext|>", "<|im_end|>"]
    with pytest.raises(ConfigError, match="256 tokens are too few: bytes and special tokens are"):
        vocabulary_fields([TEXT], 256)
    for special, said in (
        ("<|endoftext|>", "'<.endoftext.>' is given twice"),
        (" ", "is ' ', wanted text that is not blank"),
        ("\udcff", r"is '\\udcff', wanted text"),
        ("a", "'a' is one of the text's tokens too"),
    ):
        with pytest.raises(ConfigError, match=said):
            vocabulary_fields([TEXT], 300, special=[special])
