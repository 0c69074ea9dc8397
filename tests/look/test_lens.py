"""Questions answered by activations: by hand, and as PyTorch answers them."""

from pathlib import Path

import numpy as np
import pytest
from separate_cpu import SeparateCPU

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.look import lens

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = (Path(__file__).parents[2] / "../shared/fixtures", GOLDEN / "models")
IDS = np.arange(1, 13)
OTHER = np.where(np.isin(np.arange(12), [3, 5]), [0, 0, 0, 99, 0, 77] * 2, IDS)


def opened(name, compute="f32"):
    found = [folder / f"{name}-F16.gguf" for folder in FIXTURES]
    path = next((p for p in found if p.exists()), None)
    if path is None:
        pytest.skip(f"{name} is one of the golden models of ../shared that no clone carries")
    return pyggml.load(path, compute=compute)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def golden(request):
    """A model, and what transformers' model of the same weights gives (torch 2.13, float32)."""
    with np.load(GOLDEN / f"lens/{request.param}.npz") as arrays:
        return opened(request.param), dict(arrays)


@pytest.fixture(scope="module")
def llama():
    return opened("llama")


def test_attention_maps_losses_and_patched_logits_are_those_of_pytorch(golden):
    """gemma3 has windows of 16 in all layers but one, norms of q and k, and another scale."""
    model, wanted = golden
    close = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(lens.attention_maps(model, IDS), wanted["attention"], **close)
    np.testing.assert_allclose(lens.token_losses(model, IDS), wanted["losses"], **close)
    patched = lens.patch(model, IDS, OTHER, "blk.0.out", tokens=(3, 5))
    np.testing.assert_allclose(patched[-1], wanted["patched"], **close)


def test_a_table_of_tokens_has_losses_and_ranks_by_hand(llama):
    ids = np.tile(IDS, 8)[:90]  # more than the rows that are computed at a time
    mask = np.arange(90) % 3 > 0
    found = lens.token_table(llama, ids, mask)
    z = llama.logits(ids).astype(np.float64)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    own = p[np.arange(89), ids[1:]]
    np.testing.assert_allclose(found.losses[1:], -np.log(own), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(found.ranks[1:], (p[:-1] > own[:, None]).sum(axis=1))
    assert np.isnan(found.losses[0]) and found.ranks[0] == -1
    np.testing.assert_array_equal(found.counted, mask & (np.arange(90) > 0))
    assert found.loss == pytest.approx(-np.log(own)[mask[1:]].mean(), abs=1e-12)
    np.testing.assert_array_equal(lens.token_losses(llama, ids), found.losses[1:])
    assert np.isnan(lens.token_table(llama, [5]).loss)
    with pytest.raises(DataError, match=r"a mask of shape \(3,\), wanted \(12,\)"):
        lens.token_table(llama, IDS, np.ones(3, bool))


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite", "qwen3moe", "olmo2", "phi3"])
def test_attention_maps_times_values_are_what_attention_gives(name):
    model = opened(name)
    ids = np.arange(1, 31)
    (weights,) = lens.attention_maps(model, ids, blocks=[0])
    with model.trace("blk.0.v", "blk.0.attention") as t:
        model.logits(ids)
    v = np.repeat(t["blk.0.v"], weights.shape[0] // t["blk.0.v"].shape[1], axis=1)
    heads = np.einsum("hts,shd->thd", weights, v).reshape(len(ids), -1)
    np.testing.assert_allclose(heads, t["blk.0.attention"], rtol=0, atol=2e-5)


def test_the_lens_of_the_last_block_is_the_model(llama):
    found = lens.logit_lens(llama, IDS)
    assert found.shape == (2, 12, 512)
    np.testing.assert_array_equal(found[-1], llama.logits(IDS))
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_the_lens_computes_on_the_model_s_device(llama):
    device = SeparateCPU()
    elsewhere = pyggml.load(llama.file.path, compute="f32", backends=[device])
    for look in (lens.logit_lens, lambda *a: list(lens.logit_attribution(*a, token=7).values())):
        before = device.launches
        np.testing.assert_allclose(look(elsewhere, IDS), look(llama, IDS), rtol=0, atol=1e-5)
        assert device.launches >= before + 2, "of the model, then of the lens"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "granite", "mamba", "lfm2"])
def test_shares_of_a_logit_sum_to_it(name):
    model = opened(name)
    with model.trace("output") as t:
        model.logits(IDS)
    shares = lens.logit_attribution(model, IDS, token=7, at=-2)
    assert sum(shares.values()) == pytest.approx(t["output"][-2, 7], abs=1e-5)
    if name not in ("gpt2", "gemma2"):  # a bias of the last norm, and a cap
        assert shares["bias"] == pytest.approx(0, abs=1e-4)
    assert f"blk.{model.config.n_layer - 1}.attn_out" in shares


def test_a_share_is_what_the_logit_loses_without_the_branch(llama):
    """While the norm's factor is kept, which a small change of the branch nearly does."""
    shares, h = lens.logit_attribution(llama, IDS, token=7), 1e-3
    with llama.trace("output", "blk.1.out") as before:
        llama.logits(IDS)
    with llama.trace("output", "blk.1.out", scale={"blk.1.ffn_out": 1 - h}) as after:
        llama.logits(IDS)
    rms = [np.sqrt(np.mean(t["blk.1.out"][-1] ** 2)) for t in (before, after)]
    lost = before["output"][-1, 7] - after["output"][-1, 7] * rms[1] / rms[0]
    assert lost / h == pytest.approx(shares["blk.1.ffn_out"], rel=0.02, abs=2e-3)


def test_gradient_x_activation_is_the_loss_s_first_order(llama):
    found = lens.gradient_x_activation(llama, IDS, "blk.0.ffn_out", "blk.1.q")
    assert found["blk.0.ffn_out"].shape == found["blk.1.q"].shape == (11,)
    h, losses = 1e-2, []
    for factor in (1 - h, 1 + h):
        with llama.trace(scale={"blk.0.ffn_out": factor}):
            losses.append(lens.token_losses(llama, IDS).mean())
    slope = (losses[0] - losses[1]) / (2 * h)
    assert found["blk.0.ffn_out"].sum() == pytest.approx(slope, rel=1e-3)


def difference(t):
    return t["logits"][-1, 7] - t["logits"][-1, 5]


def difference_of(logits):
    return float(logits[-1, 7] - logits[-1, 5])


def test_gradient_x_activation_of_a_metric_is_its_first_order(llama):
    found = lens.gradient_x_activation(llama, IDS, "blk.0.ffn_out", metric=difference)
    h, ends = 1e-2, []
    for factor in (1 - h, 1 + h):
        with llama.trace(scale={"blk.0.ffn_out": factor}):
            ends.append(difference_of(llama.logits(IDS)))
    assert found["blk.0.ffn_out"].shape == (12,)
    slope = (ends[1] - ends[0]) / (2 * h)
    assert found["blk.0.ffn_out"].sum() == pytest.approx(slope, abs=2e-4)


def test_integrated_gradients_sum_to_the_difference_from_the_baseline(llama):
    """From 0, and from what another text has; the last stream by itself is all of the metric."""
    with llama.trace("token_embd") as t:
        other = difference_of(llama.logits(OTHER))
    here = difference_of(llama.logits(IDS))
    with llama.trace(replace={"blk.1.out": 0.0}):
        at_zero = difference_of(llama.logits(IDS))
    from_other = {"token_embd": t["token_embd"]}
    found = lens.integrated_gradients(llama, IDS, difference, "token_embd", baseline=from_other)
    assert found["token_embd"].sum() == pytest.approx(here - other, abs=0.01)
    np.testing.assert_array_equal(found["token_embd"] != 0, IDS != OTHER)
    found = lens.integrated_gradients(llama, IDS, difference, "blk.1.f*_out", n_steps=64)
    with llama.trace(replace={"blk.1.ffn_out": 0.0}):
        without = difference_of(llama.logits(IDS))
    assert found["blk.1.ffn_out"].sum() == pytest.approx(here - without, abs=1e-3)
    assert at_zero == 0
    said = "shares of token_embd sum to .*, and the metric is .* from that of the baseline: more st"
    with pytest.warns(RuntimeWarning, match=said):
        lens.integrated_gradients(llama, IDS, difference, "token_embd", n_steps=2)
    with pytest.raises(ConfigError, match="n_steps is 0, wanted 1 or more"):
        lens.integrated_gradients(llama, IDS, difference, "token_embd", n_steps=0)


def test_attribution_patching_is_patching_to_first_order(llama):
    """A hundredth of the way to the other text, the metric has changed by a hundredth of it."""
    found = lens.attribution_patching(llama, IDS, OTHER, difference, "blk.0.*_out", "blk.0.v")
    assert list(found) == ["blk.0.v", "blk.0.attn_out", "blk.0.ffn_out"]
    with llama.trace(*found) as ours:
        llama.logits(IDS)
    with llama.trace(*found) as theirs:
        llama.logits(OTHER)
    here = difference_of(llama.logits(IDS))
    for name, share in found.items():
        step = 0.01 * (theirs[name] - ours[name])
        with llama.trace(add={name: step}, tokens=[3]):
            change = difference_of(llama.logits(IDS)) - here
        assert 100 * change == pytest.approx(share[3], rel=0.05, abs=2e-3)
    with pytest.raises(DataError, match="texts of 12 and 5 tokens"):
        lens.attribution_patching(llama, IDS, IDS[:5], difference, "blk.0.out")


def test_a_steering_vector_is_a_difference_of_means(llama):
    """Of texts, long or short alike, without the first position unless it is wanted."""
    for given, positions in (((), slice(1, None)), ((slice(None),), slice(None))):
        vector = lens.steering_vector(llama, "blk.0.out", [IDS, IDS[:5]], [OTHER], *given)
        means = []
        for texts in ([IDS, IDS[:5]], [OTHER]):
            with llama.trace("blk.0.out") as t:
                for ids in texts:
                    llama.logits(ids)
            means.append(
                np.mean([run[positions].mean(axis=0) for run in t.runs("blk.0.out")], axis=0)
            )
        np.testing.assert_allclose(vector, means[0] - means[1], rtol=0, atol=1e-5)
    assert lens.steering_vector(llama, "blk.0.q", [IDS], [OTHER]).shape == (4, 64)


QUESTIONS = {
    "attention maps": lambda m: lens.attention_maps(m, IDS),
    "logit lens": lambda m: lens.logit_lens(m, IDS),
    "losses": lambda m: lens.token_losses(m, IDS),
    "attribution": lambda m: [*lens.logit_attribution(m, IDS, token=7).values()],
    "gradient": lambda m: lens.gradient_x_activation(m, IDS, "blk.1.ffn_out")["blk.1.ffn_out"],
    "patch": lambda m: lens.patch(m, IDS, OTHER, "blk.0.attn_out", tokens=[3]),
    "steering vector": lambda m: lens.steering_vector(m, "blk.1.out", [IDS], [OTHER]),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_a_question_inside_a_trace_is_put_to_the_changed_model(llama, question):
    """A change of 0 is none; the trace reads the run, and is as it was afterwards."""
    plain = question(llama)
    with llama.trace("blk.0.out", add={"blk.0.out": 0.0}) as t:
        np.testing.assert_array_equal(question(llama), plain)
        assert len(t.runs("blk.0.out")) >= 1
        with llama.trace(add={"blk.0.out": np.linspace(-1, 1, 256)}):
            assert np.abs(np.array(question(llama)) - plain).max() > 1e-3
        assert llama.traces == (t,)


def test_a_change_of_the_last_norm_is_seen_by_the_logit_lens(llama):
    with llama.trace(add={"logits": 2.0}, tokens=[3]):
        found = lens.logit_lens(llama, IDS)
    at = np.where(np.arange(12) == 3, 2.0, 0.0)[:, None]
    np.testing.assert_allclose(found - at, lens.logit_lens(llama, IDS), rtol=0, atol=1e-5)


def test_a_patch_of_no_tokens_changes_nothing(llama):
    patched = lens.patch(llama, IDS, OTHER, "blk.0.out", tokens=[])
    np.testing.assert_array_equal(patched, llama.logits(IDS))


SEVERAL = [
    lens.attention_maps,
    lens.logit_lens,
    lens.token_losses,
    lambda m, ids: lens.gradient_x_activation(m, ids, "blk.0.out", metric=difference),
    lambda m, ids: lens.integrated_gradients(m, ids, difference, "blk.1.out", n_steps=3),
]


@pytest.mark.parametrize("question", SEVERAL)
@pytest.mark.filterwarnings("ignore:the shares of")
def test_several_texts_are_asked_in_one_pass(llama, question):
    texts = [IDS, IDS[:7], OTHER]
    for found, ids in zip(question(llama, texts), texts, strict=True):
        assert_alike(found, question(llama, ids))


def test_several_texts_are_patched_in_one_pass(llama):
    texts, sources = [IDS, IDS[:7]], [OTHER, OTHER[:7]]
    asked = (
        lambda ids, source: lens.patch(llama, ids, source, "blk.0.out", tokens=[3, -1]),
        lambda ids, source: lens.attribution_patching(llama, ids, source, difference, "blk.0.out"),
    )
    for question in asked:
        for i, found in enumerate(question(texts, sources)):
            assert_alike(found, question(texts[i], sources[i]))
    with pytest.raises(DataError, match="2 texts and 1 sources, wanted one of each"):
        lens.patch(llama, texts, OTHER, "blk.0.out", tokens=[3])


def assert_alike(found, wanted):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        found, wanted = ([*each.values()] for each in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def test_integrated_gradients_bind_one_program_for_all_steps(llama, monkeypatch):
    bound, bind = [], pyggml.model.bind
    monkeypatch.setattr("pyggml.model.bind", lambda *args: bound.append(1) or bind(*args))
    start = {"blk.0.out": 0.9, "blk.1.out": 0.9}
    lens.integrated_gradients(llama, IDS, difference, *start, baseline=start, n_steps=40)
    assert len(bound) == 1


def test_what_does_not_fit_is_refused(llama):
    with pytest.raises(DataError, match="texts of 12 and 5 tokens, wanted two of one length"):
        lens.patch(llama, IDS, IDS[:5], "blk.0.out", tokens=[0])
    with pytest.raises(ConfigError, match="block 0 has no attention"):
        lens.attention_maps(opened("mamba"), IDS)
    with pytest.raises(DataError, match="there is no position 12 in a text of 12 tokens"):
        lens.logit_attribution(llama, IDS, 3, at=12)
    with pytest.raises(DataError, match="token: ids from 512 to 512, wanted 0 to 511"):
        lens.logit_attribution(llama, IDS, 512)
    with pytest.raises(ConfigError, match="baseline has blk.0.outt, .*: did you mean 'blk.0.out'"):
        lens.integrated_gradients(
            llama, IDS, difference, "blk.0.out", baseline={"blk.0.outt": 1.0}, n_steps=2
        )
