"""Adapters combined: the updates of PEFT's add_weighted_adapter, at the rank that is asked for."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.errors import AdapterError, ConfigError
from pyggml.lora import Combination, LoraConfig, attach, combine
from pyggml.lora.adapter.combine import combine_updates
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


def singular(x):
    return np.linalg.svd(x, compute_uv=False)


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
    left_out = combine(stacked, tmp_path / "c.gguf", Combination(rank=rank))
    model, name = base.with_adapter_files(tmp_path / "c.gguf"), "blk.0.attn_q.weight"
    whole, found = update(stacked, name), update(model, name)
    values = singular(whole)
    assert np.linalg.matrix_rank(found, tol=1e-4) == model.adapters[0][name].rank == min(rank, 8)
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
    how = Combination(method="ties", rank=256, density=density)
    combine(stacked, tmp_path / "c.gguf", how)
    model = base.with_adapter_files(tmp_path / "c.gguf")
    for name, weights in (("blk.0.attn_q.weight", WEIGHTS), ("blk.1.ffn_up.weight", WEIGHTS[:1])):
        wanted = ties(updates_of(base, files, name), weights, density)
        np.testing.assert_allclose(update(model, name), wanted, atol=1e-5)


@pytest.mark.interop
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("cat", {}),
        ("svd", {"rank": 4}),
        ("ties_svd", {"method": "ties", "rank": 6}),
        ("ties_svd", {"method": "ties", "rank": 6, "majority": "frequency"}),
        ("magnitude_prune_svd", {"method": "prune", "rank": 6, "density": 0.3}),
        ("dare_linear_svd", {"method": "dare", "rank": 9}),
        ("dare_ties_svd", {"method": "dare-ties", "rank": 9, "density": 0.3}),
    ],
)
def test_updates_are_those_of_peft(monkeypatch, kind, how):
    peft = pytest.importorskip("peft", reason="peft (pip install peft)")
    torch = pytest.importorskip("torch")

    torch.manual_seed(0)
    ranks = {"x": 3, "y": 5, "z": 4}
    config = [
        peft.LoraConfig(r=n, lora_alpha=5, target_modules=["0", "1"][: 1 + (n > 3)])
        for n in ranks.values()
    ]
    linears = torch.nn.Sequential(torch.nn.Linear(48, 72), torch.nn.Linear(72, 24))
    model = peft.get_peft_model(linears, config[0], "x")
    model.add_adapter("y", config[1])
    model.add_adapter("z", config[2])
    weights, how = {"x": 0.7, "y": 0.4, "z": -0.9}, Combination(**how)
    draws = np.random.default_rng(0)  # PEFT's draws are ours
    monkeypatch.setattr(
        torch, "bernoulli", lambda p: (torch.tensor(draws.random(p.shape, np.float32)) < p).float()
    )
    for layer in model.base_model.model:
        for name in layer.lora_B:
            torch.nn.init.normal_(layer.lora_B[name].weight)
    settings = {"svd_rank": how.rank, "density": how.density, "majority_sign_method": how.majority}
    settings = settings if how.rank else {}
    model.add_weighted_adapter([*weights], [*weights.values()], "all", kind, **settings)
    rng = np.random.default_rng(0)
    for layer in model.base_model.model:
        names, halves = [name for name in weights if name in layer.lora_A], []
        for name in names:
            b, a = (t[name].weight.detach().numpy() for t in (layer.lora_B, layer.lora_A))
            halves.append((b * np.float32(layer.scaling[name]), a))
        wanted = layer.get_delta_weight("all").detach().numpy()
        found = combine_updates(halves, [weights[n] for n in names], how, rng)
        b, a = found.halves(how.rank or found.default)
        np.testing.assert_allclose(b @ a, wanted, atol=1e-5 * np.abs(wanted).max())


def test_dare_keeps_some_numbers_and_their_sum(base, stacked, files, tmp_path):
    name, found = "blk.1.ffn_up.weight", []
    for seed in (0, 0, 1):
        how = Combination(method="dare", rank=256, density=0.25, seed=seed)
        combine(stacked, tmp_path / "c.gguf", how)
        found.append(update(base.with_adapter_files(tmp_path / "c.gguf"), name))
    assert np.array_equal(found[0], found[1]) and not np.allclose(found[0], found[2])
    (whole,) = updates_of(base, files, name)
    kept = np.abs(found[0]) > 1e-5 * np.abs(whole).max()
    assert kept.mean() == pytest.approx(0.25, abs=0.02)
    np.testing.assert_allclose(found[0][kept], WEIGHTS[0] / 0.25 * whole[kept], atol=1e-4)


@pytest.mark.parametrize("error", [0.3, 0.7])
def test_the_rank_is_the_lowest_whose_error_is_small_enough(base, stacked, tmp_path, error):
    left_out = combine(stacked, tmp_path / "c.gguf", Combination(error=error))
    model = base.with_adapter_files(tmp_path / "c.gguf")
    for name, pair in model.adapters[0].items():
        values = singular(update(stacked, name))
        values /= np.linalg.norm(values)
        assert left_out[name] == pytest.approx(np.linalg.norm(values[pair.rank :]), abs=1e-5)
        assert left_out[name] <= error + 1e-5
        assert np.linalg.norm(values[pair.rank - 1 :]) > error, "one less is too few"


def test_without_a_rank_it_is_the_largest_of_theirs(base, stacked, tmp_path):
    left_out = combine(stacked, tmp_path / "c.gguf", Combination(method="ties"))
    ranks = {n: p.rank for n, p in base.with_adapter_files(tmp_path / "c.gguf").adapters[0].items()}
    assert ranks["blk.0.attn_q.weight"] == 5 and ranks["blk.0.ffn_up.weight"] == 3
    assert 0 < left_out["blk.0.attn_q.weight"] < 1


def test_dora_becomes_the_nearest_plain_update(base, tmp_path):
    adapter = attach(base, LoraConfig(rank=2, modules=("attn_q",), dora=True))
    p = adapter.parameters.data
    p[:] += np.random.default_rng(0).normal(0, 0.05, p.size)
    left_out = combine(adapter.model, tmp_path / "c.gguf", Combination(error=0.0))
    found = base.with_adapter_files(tmp_path / "c.gguf")
    for name in found.adapters[0]:
        np.testing.assert_allclose(update(found, name), update(adapter.model, name), atol=1e-5)
    assert max(left_out.values()) < 1e-5
    assert combine(adapter.model, tmp_path / "c.gguf", Combination(rank=1))[name] > 0.1


def test_what_cannot_be_combined_is_refused(base, stacked, files, tmp_path):
    out = tmp_path / "c.gguf"
    with pytest.raises(AdapterError, match="no adapter: there is nothing to combine"):
        combine(base, out)
    with pytest.raises(ConfigError) as caught:
        Combination(method="mean", rank=0, error=1.0, density=0)
    for words in ("method is 'mean', wanted one of", "rank is 0,", "density is 0, wanted above 0",
                  "error is 1.0, wanted 0 to below 1", "given beside a rank"):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="lora has the weight 0"):
        combine(base.with_adapter_files((files[0], 0.0)), out)
    dora = attach(base, LoraConfig(rank=2, dora=True)).model
    with pytest.raises(ConfigError, match="rank is None, wanted one, or an error: DoRA's updates"):
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
    for how in ({}, {"rank": 4}, {"error": 1e-6}, {"method": "prune", "density": 1.0, "rank": 4}):
        combine(both, tmp_path / "c.gguf", Combination(**how))
        found = model.with_adapter_files(tmp_path / "c.gguf").logits(np.arange(9))
        np.testing.assert_allclose(found, both.logits(np.arange(9)), atol=1e-3)
