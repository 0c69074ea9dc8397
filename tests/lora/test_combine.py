"""Adapters combined: the updates of PEFT's add_weighted_adapter, at the rank that is asked for."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.errors import AdapterError, ConfigError
from pyggml.lora import LoraConfig, attach, combine
from pyggml.lora.adapter.combine import _combine_updates
from pyggml.lora.adapter.merge import merged_weight

GOLDEN = Path(__file__).parents[1] / "golden/models"
WEIGHTS = (0.7, -0.4)


@pytest.fixture(scope="module")
def base():
    return pyggml.load(GOLDEN / "qwen3-F16.gguf", compute="f32")


@pytest.fixture(scope="module")
def files(base, tmp_path_factory):
    """Two adapters, of other ranks and scales, that share some matrices."""
    folder, paths = tmp_path_factory.mktemp("adapters"), []
    for i, (rank, modules) in enumerate([(3, ("attn_q", "ffn_up")), (5, ("attn_q", "ffn_down"))]):
        adapter = attach(base, LoraConfig(rank=rank, alpha=2.0 + i, modules=modules))
        p = adapter.parameters.data
        p[:] = np.random.default_rng(i).normal(0, 0.1, p.size)
        paths.append(folder / f"{i}.gguf")
        adapter.save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def stacked(base, files):
    """The model with both adapters, times their weights."""
    return base.with_adapter_files(*zip(files, WEIGHTS, strict=True))


def update(model, name):
    """What the adapters of a model add to a weight."""
    return merged_weight(model, name) - merged_weight(model.with_adapters(), name)


def updates_of(base, files, name):
    each = (base.with_adapter_files(file) for file in files)
    return [update(model, name) for model in each if name in model.adapters[0]]


def test_a_sum_is_what_both_do_together(base, stacked, tmp_path):
    left_out = combine(stacked, tmp_path / "c.gguf")
    model = base.with_adapter_files(tmp_path / "c.gguf")
    tokens = np.arange(20)
    np.testing.assert_allclose(model.logits(tokens), stacked.logits(tokens), atol=1e-5)
    assert np.abs(model.logits(tokens) - base.logits(tokens)).max() > 0.01
    assert {p.rank for p in model.adapters[0].values()} == {3, 5, 8}
    assert set(left_out.values()) == {0.0}


@pytest.mark.parametrize("rank", [1, 4, 8, 20])
def test_a_lower_rank_is_the_nearest_update(base, stacked, tmp_path, rank):
    left_out = combine(stacked, tmp_path / "c.gguf", rank=rank)
    model, name = base.with_adapter_files(tmp_path / "c.gguf"), "blk.0.attn_q.weight"
    whole, values = update(stacked, name), np.linalg.svd(update(stacked, name))[1]
    found = update(model, name)
    assert np.linalg.matrix_rank(found, tol=1e-4) == min(rank, 8)
    lost = np.linalg.norm(values[rank:]) / np.linalg.norm(values)
    assert np.linalg.norm(found - whole) / np.linalg.norm(whole) == pytest.approx(lost, abs=1e-5)
    assert left_out[name] == pytest.approx(lost, abs=1e-5)


def ties(updates, weights, density):
    """PEFT's `ties` (peft.utils.merge_utils), in NumPy."""
    stack = np.stack(updates).reshape(len(updates), -1)
    for x in stack:
        order = np.argsort(-np.abs(x))
        x[order[int(density * x.size) :]] = 0
    sign = np.where(stack.sum(0) >= 0, 1, -1)
    agree = np.sign(stack) == sign
    total = (stack * np.array(weights)[:, None] * agree).sum(0) / np.maximum(agree.sum(0), 1)
    return total.reshape(updates[0].shape)


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_averages_what_agrees(base, stacked, files, tmp_path, density):
    combine(stacked, tmp_path / "c.gguf", "ties", rank=256, density=density)
    model = base.with_adapter_files(tmp_path / "c.gguf")
    for name, weights in (("blk.0.attn_q.weight", WEIGHTS), ("blk.1.ffn_up.weight", WEIGHTS[:1])):
        wanted = ties(updates_of(base, files, name), weights, density)
        np.testing.assert_allclose(update(model, name), wanted, atol=1e-5)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("kind", "method", "rank", "density"),
    [("cat", "sum", None, 1), ("svd", "sum", 4, 1), ("ties_svd", "ties", 6, 0.5)],
)
def test_updates_are_those_of_peft(kind, method, rank, density):
    peft = pytest.importorskip("peft", reason="peft (pip install peft)")
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    config = {n: peft.LoraConfig(r=n, lora_alpha=5, target_modules=["0"]) for n in (3, 5)}
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(48, 72)), config[3], "x")
    model.add_adapter("y", config[5])
    layer = model.base_model.model[0]
    for name in "xy":
        torch.nn.init.normal_(layer.lora_B[name].weight)
    halves = [
        tuple(t[n].weight.detach().numpy() for t in (layer.lora_B, layer.lora_A)) for n in "xy"
    ]
    halves = [(b * np.float32(layer.scaling[n]), a) for n, (b, a) in zip("xy", halves, strict=True)]
    how = {} if rank is None else {"svd_rank": rank, "density": density}
    model.add_weighted_adapter(["x", "y"], [0.7, 0.4], "z", kind, **how)
    wanted = layer.get_delta_weight("z").detach().numpy()
    (b, a), _ = _combine_updates(
        halves, [0.7, 0.4], method, rank, density, np.random.default_rng(0)
    )
    np.testing.assert_allclose(b @ a, wanted, atol=1e-5 * np.abs(wanted).max())


def test_dare_keeps_some_numbers_and_their_sum(base, stacked, files, tmp_path):
    name, found = "blk.1.ffn_up.weight", []
    for seed in (0, 0, 1):
        combine(stacked, tmp_path / "c.gguf", "dare", rank=256, density=0.25, seed=seed)
        found.append(update(base.with_adapter_files(tmp_path / "c.gguf"), name))
    assert np.array_equal(found[0], found[1]) and not np.allclose(found[0], found[2])
    (whole,) = updates_of(base, files, name)
    kept = np.abs(found[0]) > 1e-5 * np.abs(whole).max()
    assert kept.mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(found[0][kept], WEIGHTS[0] / 0.25 * whole[kept], atol=1e-4)


def test_without_a_rank_it_is_the_largest_of_theirs(base, stacked, tmp_path):
    left_out = combine(stacked, tmp_path / "c.gguf", "ties")
    ranks = {n: p.rank for n, p in base.with_adapter_files(tmp_path / "c.gguf").adapters[0].items()}
    assert ranks["blk.0.attn_q.weight"] == 5 and ranks["blk.0.ffn_up.weight"] == 3
    assert 0 < left_out["blk.0.attn_q.weight"] < 1


def test_what_cannot_be_combined_is_refused(base, stacked, files, tmp_path):
    out = tmp_path / "c.gguf"
    with pytest.raises(AdapterError, match="no adapter: there is nothing to combine"):
        combine(base, out)
    with pytest.raises(ConfigError) as caught:
        combine(stacked, out, "mean", rank=0, density=0)
    for words in ("method is 'mean', wanted one of", "rank is 0,", "density is 0, wanted above 0"):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="lora has the weight 0"):
        combine(base.with_adapter_files((files[0], 0.0)), out)
    dora = attach(base, LoraConfig(rank=2, dora=True)).model
    with pytest.raises(AdapterError, match="DoRA's magnitudes: merge it instead"):
        combine(dora, out)
    assert not out.exists()


@pytest.mark.parametrize("name", ["qwen3moe", "llama"])
def test_experts_and_tables_are_combined(shared, tmp_path, name):
    model = pyggml.load(shared / f"fixtures/{name}-F16.gguf", compute="f32")
    modules = ("attn_q", "token_embd") if name == "llama" else ("all-linear",)
    paths = []
    for seed in range(2):
        adapter = attach(model, LoraConfig(rank=2, modules=modules))
        p = adapter.parameters.data
        p[:] = np.random.default_rng(seed).normal(0, 0.1, p.size)
        paths.append((tmp_path / f"{seed}.gguf", 0.5))
        adapter.save(paths[-1][0])
    both = model.with_adapter_files(*paths)
    for how in ({}, {"rank": 4}):
        combine(both, tmp_path / "c.gguf", **how)
        found = model.with_adapter_files(tmp_path / "c.gguf").logits(np.arange(9))
        np.testing.assert_allclose(found, both.logits(np.arange(9)), atol=1e-3)
