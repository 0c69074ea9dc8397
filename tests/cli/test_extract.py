"""`pyggml extract`: the adapter of two models' difference, and what it leaves out."""

import numpy as np
import pytest

import pyggml as library
from pyggml import gguf
from pyggml.lora import LoraConfig, attach, merge, train_tensors

TOKENS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def merged(tiny, tmp_path_factory):
    """The tiny model with an update of rank 3 in its weights, and the adapter."""
    adapter = attach(library.load(tiny), LoraConfig(rank=3, alpha=3.0))
    p = adapter.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.2, p.size)
    path = tmp_path_factory.mktemp("merged") / "merged.gguf"
    merge(adapter.model, path)
    return path


def logits(*model):
    return library.load(*model, compute="f32").logits(TOKENS)


def test_an_update_of_the_rank_comes_back(pyggml, tiny, merged, tmp_path):
    out = tmp_path / "a.gguf"
    ended = pyggml("extract", "-m", tiny, "--from", merged, "-o", out, "--rank", 3)
    assert ended.code == 0 and "not held" not in ended.out, ended.err
    np.testing.assert_allclose(logits(tiny, [out]), logits(merged), atol=1e-4)
    assert np.abs(logits(tiny) - logits(merged)).max() > 0.1
    assert {p.rank for p in library.load(tiny, [out]).adapters[0].values()} == {3}


def test_a_lower_rank_leaves_the_smallest_values_out(pyggml, tiny, merged, tmp_path):
    out = tmp_path / "a.gguf"
    ended = pyggml("extract", "-m", tiny, "--from", merged, "-o", out, "--rank", 2)
    assert "2 leaves " in ended.out
    name = "blk.0.ffn_up.weight"
    pair = library.load(tiny, [out]).adapters[0][name]
    delta = (
        library.load(merged).parts.weights[name].data - library.load(tiny).parts.weights[name].data
    )
    rest = delta - pair.scale * pair.b.data @ pair.a.data
    values = np.linalg.svd(delta, compute_uv=False)
    assert np.linalg.norm(rest) == pytest.approx(values[2], rel=1e-3)


def test_an_error_chooses_the_rank(pyggml, tiny, merged, tmp_path):
    ended = pyggml("extract", "-m", tiny, "--from", merged, "-o", tmp_path / "a", "--error", 1e-4)
    assert ended.code == 0 and "3 leaves " in ended.out, ended.err


def test_what_was_learned_of_texts_goes_with_it(pyggml, tiny, merged, tmp_path):
    learned = {"pyggml.labels": '{"a": 3}', "pyggml.pooling": "last"}
    learned |= {"tokenizer.chat_template": "{{ messages[0].content }}"}
    with gguf.open(merged) as file:
        tensors = [(n, t.dtype, t.shape, np.array(file.data(n))) for n, t in file.tensors.items()]
        gguf.write(tmp_path / "m.gguf", {**file.metadata, **learned}, tensors)
    out = tmp_path / "a.gguf"
    ended = pyggml("extract", "-m", tiny, "--from", tmp_path / "m.gguf", "-o", out)
    assert ended.code == 0, ended.err
    with gguf.open(out) as file:
        assert {key: file.get(key) for key in learned} == learned
    pyggml("extract", "-m", tmp_path / "m.gguf", "--from", tiny, "-o", out)
    with gguf.open(out) as file:
        assert not learned.keys() & file.metadata.keys(), "the base has them"


def test_what_no_adapter_holds_is_told(pyggml, tiny, tmp_path):
    trained = train_tensors(library.load(tiny), ["norms", "blk.0.ffn_up"])
    for t in trained.parameters.tensors.values():
        t.data[:] += 0.1
    trained.save(tmp_path / "m.gguf")
    ended = pyggml("extract", "-m", tiny, "--from", tmp_path / "m.gguf", "-o", tmp_path / "a.gguf")
    assert ended.code == 0 and "blk.0.attn_norm.weight" in ended.out, ended.err
    assert [*library.load(tiny, [tmp_path / "a.gguf"]).adapters[0]] == ["blk.0.ffn_up.weight"]


def test_models_that_are_not_alike_are_refused(pyggml, tiny, shared, tmp_path):
    same = pyggml("extract", "-m", tiny, "--from", tiny, "-o", tmp_path / "a.gguf")
    assert same.code == 2 and "differ in no matrix" in same.err
    other = shared / "fixtures/gpt2-F16.gguf"
    ended = pyggml("extract", "-m", tiny, "--from", other, "-o", tmp_path / "a.gguf")
    assert ended.code == 2 and "is gpt2, wanted llama" in ended.err
    assert not (tmp_path / "a.gguf").exists()
