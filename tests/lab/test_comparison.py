"""What a change changed, each number as NumPy has it of whole matrices and of both runs."""

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

import pyggml
from pyggml import At, lab
from pyggml.errors import ConfigError
from pyggml.graph.arrays import read
from pyggml.lab.linear import exact
from pyggml.lora import LoraConfig, attach
from pyggml.requantize import requantize


@pytest.fixture(scope="module")
def files(opened, tmp_path_factory):
    """A model, and the same with matrices of fewer bits."""
    path = tmp_path_factory.mktemp("types") / "q4.gguf"
    base = opened("llama-Q8_0")
    requantize(base.file.path, path, "Q4_0", allow_requantize=True)
    return base, pyggml.load(path)


def dense(pair):
    return pair.scale * read(pair.b).astype(np.float64) @ read(pair.a)


@pytest.mark.quick
def test_an_adapters_sizes_are_those_of_whole_matrices(qwen3):
    """Of two adapters their sum."""
    (pairs,) = qwen3.adapters
    for model, factor in ((qwen3, 1), (qwen3.with_adapters(pairs, pairs), 2)):
        sizes = lab.update_sizes(model)
        assert [s.name for s in sizes] == [n for n in model.parts.weights if n in pairs]
        for s in sizes[::5]:
            delta, w = factor * dense(pairs[s.name]), read(model.parts.weights[s.name])
            assert s.norm == pytest.approx(np.linalg.norm(delta), rel=1e-6)
            assert s.ratio == pytest.approx(s.norm / np.linalg.norm(w.astype(np.float64)), rel=1e-6)
            values = np.linalg.svd(delta, compute_uv=False)
            n = pairs[s.name].rank
            np.testing.assert_allclose(s.values[:n], values[:n], rtol=1e-6)
            assert s.values[n:] == pytest.approx(0, abs=1e-6)
            p = values[:n] / values[:n].sum()
            assert s.effective_rank == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-4)


def test_a_fresh_adapter_changes_nothing_and_a_table_has_its_size(opened):
    model = opened("llama-Q8_0")
    fresh = attach(model, LoraConfig(rank=2, alpha=4.0, modules=("token_embd", "attn_q")))
    sizes = {s.name: s for s in lab.update_sizes(fresh.model)}
    assert {s.norm for s in sizes.values()} == {s.effective_rank for s in sizes.values()} == {0.0}
    fresh.parameters.data[:] = np.random.default_rng(0).normal(0, 1, fresh.parameters.data.size)
    (size,) = [s for s in lab.update_sizes(fresh.model) if s.name == "token_embd.weight"]
    pair = fresh.pairs["token_embd.weight"]
    delta = pair.scale * read(pair.a).astype(np.float64) @ read(pair.b).T
    assert size.norm == pytest.approx(np.linalg.norm(delta), rel=1e-6)


def test_errors_of_weights_are_those_of_the_gguf_package(files, monkeypatch):
    """Read in parts as whole."""
    base, other = files
    monkeypatch.setattr("pyggml.lab.comparison._NUMBERS", 1000)
    found = {e.name: e for e in lab.weight_errors(base, other)}
    tensors = [GGUFReader(m.file.path).tensors for m in files]
    whole = [{t.name: (dequantize(t.data, t.tensor_type), t) for t in some} for some in tensors]
    assert found.keys() == whole[0].keys()
    for name, e in found.items():
        (a, ta), (b, tb) = (by_name[name] for by_name in whole)
        d = b.astype(np.float64) - a
        wanted = np.linalg.norm(d) / np.linalg.norm(a.astype(np.float64))
        assert e.error == pytest.approx(wanted, rel=1e-6)
        assert e.largest == pytest.approx(np.abs(d).max(), rel=1e-6)
        assert e.types == (ta.tensor_type.name, tb.tensor_type.name)
    assert found["blk.0.attn_q.weight"].error > 0.03 and found["output_norm.weight"].error == 0


def test_runs_and_heads_differ_by_what_both_activations_say(files, clean):
    found, heads = lab.compare_runs(*files, clean), lab.compare_heads(*files, clean)
    runs, logits = [], []
    for model in map(exact, files):
        with model.trace("blk.*.out", "*.attn_head.*", "*.attn_pattern") as t:
            logits.append(model.logits(clean).astype(np.float64))
        runs.append(t)
    assert found.names == ("blk.0.out", "blk.1.out")
    x, y = (t["blk.1.out"].astype(np.float64)[3] for t in runs)
    assert found.errors[1, 3] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-6)
    p, q = (np.exp(z[4] - z[4].max()) / np.exp(z[4] - z[4].max()).sum() for z in logits)
    assert found.kl[4] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-5, abs=1e-9)
    assert (found.agree == (logits[0].argmax(1) == logits[1].argmax(1))).all()
    z, z2 = (t["blk.1.attn_head.2"].astype(np.float64) for t in runs)
    wanted = np.linalg.norm(z2 - z) / np.linalg.norm(z)
    assert heads.results[1, 2] == pytest.approx(wanted, rel=1e-6)
    a, b = (t["blk.1.attn_pattern"][:, 2].astype(np.float64) for t in runs)
    assert heads.patterns[1, 2] == pytest.approx(np.abs(a - b).sum() / 2 / len(clean), rel=1e-6)
    assert "the same choice after" in str(found) and "blk.1.out" in str(found)


def test_a_model_is_itself_and_an_adapter_changes_later_layers_alone(opened, clean):
    model = opened("qwen3-F16")
    same = lab.compare_runs(model, model, clean)
    assert same.agree.all() and not same.errors.any() and np.abs(same.kl).max() < 1e-12
    changed = model.with_adapters(lab.without_heads(model, {1: [0]}))
    run = lab.compare_runs(model, changed, clean)
    assert not run.errors[0].any() and (run.errors[1] > 0).all() and run.kl.max() > 0


def test_a_question_is_put_to_both(files, clean):
    base, other = files
    ask = lab.direct_attribution

    def heads(model):
        return ask(model, clean, 7, 5).heads

    found = lab.compare_answers(base, other, heads, most=3)
    x, y = heads(base).ravel(), heads(other).ravel()
    assert found.error == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-9)
    assert found.correlation == pytest.approx(np.corrcoef(x, y)[0, 1], rel=1e-9)
    top = [{*np.argsort(-np.abs(each))[:3]} for each in (x, y)]
    assert found.shared == len(top[0] & top[1]) / 3
    number = lab.compare_answers(base, base, lambda m: float(m.logits(clean)[-1, 7]))
    assert number.error == 0 and np.isnan(number.correlation) and number.shared == 1
    with base.trace(scale={"blk.*.attention": At(0, heads=[1])}):
        without = lab.compare_answers(base, other, heads)
    assert not without.base[:, 1].any() and without.other[:, 1].any(), "traces count"


def test_blocks_without_heads_have_none(opened, clean):
    model = opened("lfm2-Q4_K_M")
    heads = lab.compare_heads(model, model, clean)
    assert np.isnan(heads.results[0]).all() and (heads.results[~np.isnan(heads.results)] == 0).all()


def test_what_cannot_be_compared_is_refused(files, opened, clean):
    base, other = files
    for ask, said in (
        (lambda: lab.update_sizes(base), "the model has no adapter, wanted one"),
        (lambda: lab.weight_errors(base, opened("qwen3-F16")), "in one of the models alone|shapes"),
        (lambda: lab.compare_runs(base, other, clean, "blk.9.out"), "no activation is named"),
        (lambda: lab.compare_answers(base, other, lambda m: np.ones(1 + (m is base))), "shapes"),
        (lambda: lab.compare_heads(*[opened("mamba-Q4_K_M")] * 2, clean), "no attention heads"),
    ):
        with pytest.raises(ConfigError, match=said):
            ask()
