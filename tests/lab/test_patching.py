"""Patching, ablation and paths: each cell is what a trace makes of it."""

import numpy as np
import pytest

from pyggml import At, lab, lens
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.lab.effects import Effects
from pyggml.lab.linear import exact


def difference_of(logits):
    return float(logits[-1, 7] - logits[-1, 5])


@pytest.mark.quick
def test_a_patch_of_everything_is_the_clean_text(llama, clean, corrupt, difference):
    """A whole block's stream restores it, behind both texts' equal start it does nothing."""
    found = lab.activation_patching(llama, clean, corrupt, difference, by=["layer"])
    assert found.values.shape == (2,) and found.axes == {"layer": [0, 1]}
    np.testing.assert_allclose(found.values, found.target, rtol=0, atol=1e-6)
    np.testing.assert_allclose(found.shares, 1, rtol=0, atol=1e-4)
    model = exact(llama)
    assert found.base == pytest.approx(difference_of(model.logits(corrupt)), abs=1e-6)
    assert found.target == pytest.approx(difference_of(model.logits(clean)), abs=1e-6)
    by_token = lab.activation_patching(llama, clean, corrupt, difference, "mid")
    assert by_token.values.shape == (2, 10)
    np.testing.assert_allclose(by_token.changes[:, :3], 0, rtol=0, atol=1e-6)


def test_a_cell_is_what_lens_patches(qwen3, clean, corrupt, difference):
    """Of the stream at a token, and of a head, a shared value and a pattern in a trace; with an
    adapter."""
    model = exact(qwen3)
    found = lab.activation_patching(qwen3, clean, corrupt, difference, "attn_out", tokens=[3, -2])
    patched = lens.patch(model, corrupt, clean, "blk.1.attn_out", tokens=[-2])
    assert found.values[1, 1] == pytest.approx(difference_of(patched), abs=1e-6)
    for what, head, n in (("attention", 2, 4), ("v", 1, 2), ("attn_pattern", 3, 4)):
        found = lab.activation_patching(
            qwen3, clean, corrupt, difference, what, by=("layer", "head"), tokens=[5, 9]
        )
        assert found.values.shape == (2, n)
        name = f"blk.0.{what}"
        with model.trace(name) as t:
            model.logits(clean)
        with model.trace(replace={name: At(t[name], tokens=[5, 9], heads=[head])}):
            assert found.values[0, head] == pytest.approx(
                difference_of(model.logits(corrupt)), abs=1e-6
            )


def test_all_three_axes_and_a_choice_of_layers(llama, clean, corrupt, difference):
    told = []
    found = lab.activation_patching(
        llama,
        clean,
        corrupt,
        difference,
        "q",
        by=("layer", "token", "head"),
        layers=[1],
        heads=[0, 3],
        progress=lambda *at: told.append(at),
    )
    assert found.values.shape == (1, 10, 2) and told == [(i + 1, 20) for i in range(20)]
    assert found.values[0, 9, 0] != found.values[0, 9, 1]
    assert "layer 1, token 3" in found.draw() and "head 3" in found.draw()
    assert found._repr_html_() == found.draw()
    name, share = found.top(1)[0]
    assert abs(share) == np.abs(found.shares).max() and f"{share:+.4f}  {name}" in str(found)


def test_a_sweep_in_a_trace_is_of_the_changed_model(llama, clean, corrupt, difference):
    with llama.trace(scale={"blk.0.ffn_out": 0.5}):
        found = lab.activation_patching(llama, clean, corrupt, difference, by=("layer", "token"))
    model = exact(llama)
    with model.trace(scale={"blk.0.ffn_out": 0.5}):
        patched = lens.patch(model, corrupt, clean, "blk.0.out", tokens=[3])
        assert found.base == pytest.approx(difference_of(model.logits(corrupt)), abs=1e-6)
    assert found.values[0, 3] == pytest.approx(difference_of(patched), abs=1e-6)


def test_an_ablated_head_is_one_that_a_trace_takes_away(llama, clean, corrupt, difference):
    model = exact(llama)
    with model.trace("blk.1.attention") as t:
        for ids in (clean, corrupt):
            model.logits(ids)
    both = t.runs("blk.1.attention")
    mean, other = np.concatenate(both).mean(axis=0), both[1]
    cases = (
        ("zero", (), 0.0),
        ("mean", (clean, corrupt), mean),
        ("mean", (), both[0].mean(axis=0)),
        ("resample", [corrupt], other),
    )
    for kind, reference, source in cases:
        found = lab.head_ablation(llama, clean, difference, kind, reference)
        assert found.values.shape == (2, 4)
        with model.trace(replace={"blk.1.attention": At(source, heads=[2])}):
            expected = difference_of(model.logits(clean))
        assert found.values[1, 2] == pytest.approx(expected, abs=1e-6)
        assert found.changes[1, 2] == pytest.approx(expected - found.base, abs=1e-6)
    # On an Emerald Rapids one of eight is 1.03e-6 off: other batches, other sums of float32.
    several = lab.head_ablation(llama, clean, difference, "resample", [corrupt, clean])
    np.testing.assert_allclose(several.values, (found.values + found.base) / 2, rtol=0, atol=2e-6)
    assert "resample ablation of heads: change of the metric" in str(found)


def test_blocks_without_heads_stay_empty(opened, clean, difference):
    found = lab.head_ablation(opened("lfm2-Q4_K_M"), clean, difference)
    np.testing.assert_array_equal(np.isnan(found.values), [[True] * 4, [False] * 4] * 2)
    assert found.draw().count("<rect") < 3 * 8 + 9 and "nan" not in str(found)


@pytest.mark.parametrize("receiver", ["blk.1.v", "blk.1.ffn_norm", "output_norm"])
def test_a_path_is_two_traces(llama, clean, corrupt, difference, receiver):
    """A head of block 0 as in the corrupt text, the others held; what the receiver hears of it is
    put into a clean run. Held feed-forward parts pass nothing on."""
    model, held = (
        exact(llama),
        ["blk.0.attention", "blk.1.attention", "blk.0.ffn_out", "blk.1.ffn_out"],
    )
    runs = []
    for ids in (clean, corrupt):
        with model.trace(*held) as t:
            model.logits(ids)
        runs.append({name: t[name] for name in held})
    for through_ffn in (True, False):
        hold = dict(runs[0]) if not through_ffn else {n: runs[0][n] for n in held[:2]}
        hold.pop("blk.1.attention" if receiver == "blk.1.v" else "", None)
        hold.pop("blk.1.ffn_out" if receiver != "output_norm" else "", None)
        with (
            model.trace(receiver, replace=hold),
            model.trace(receiver, replace={held[0]: At(runs[1][held[0]], heads=[1])}) as t,
        ):
            model.logits(clean)
        heads = [1] if receiver == "blk.1.v" else None
        with model.trace(replace={receiver: At(t[receiver], heads=heads)}):
            expected = difference_of(model.logits(clean))
        found = lab.path_patching(
            llama, clean, corrupt, difference, receiver, heads, through_ffn=through_ffn
        )
        assert found.values.shape == (1 if receiver == "blk.1.v" else 2, 4)
        assert found.values[0, 1] == pytest.approx(expected, abs=1e-6)
        assert found.base == pytest.approx(difference_of(model.logits(clean)), abs=1e-6)
        assert found.changes[0, 1] != 0


def test_what_does_not_fit_is_refused(llama, opened, clean, corrupt, difference):
    def patch(*more, model=llama, clean=clean, metric=difference, **where):
        return lab.activation_patching(model, clean, corrupt, metric, *more, **where)

    with pytest.raises(DataError, match="clean has 5 tokens and corrupt 10, wanted as many"):
        patch(clean=clean[:5])
    with pytest.raises(ConfigError, match=r"no block of llama has outs: did you mean 'out'\?"):
        patch("outs")
    with pytest.raises(ConfigError, match="blk.0.out has no heads"):
        patch(by=["head"])
    with pytest.raises(ConfigError, match=r"by is \['layers'\], wanted some of layer, token, head"):
        patch(by=["layers"])
    with pytest.raises(ConfigError, match="there is no blk.2.out among 2 blocks"):
        patch(layers=[2])
    with pytest.raises(DataError, match="there is no head 4 among 4"):
        patch("attention", by=["head"], heads=[4])
    with pytest.raises(DataError, match="there is no token 10 among 10"):
        patch(tokens=[10])
    with pytest.raises(ShapeError, match=r"the metric has shape \(10, 512\), wanted one number"):
        patch(metric=lambda t: t["logits"])
    with pytest.raises(DataError, match="the metric is .* of both texts"):
        patch(clean=corrupt)
    with pytest.raises(ConfigError, match="kind is 'none', wanted zero, mean, resample"):
        lab.head_ablation(llama, clean, difference, "none")
    with pytest.raises(DataError, match="reference text 0 has 4 tokens, wanted 10 as the text"):
        lab.head_ablation(llama, clean, difference, "resample", [corrupt[:4]])
    with pytest.raises(DataError, match="reference is one text, wanted a list of texts"):
        lab.head_ablation(llama, clean, difference, "mean", corrupt)
    with pytest.raises(DataError, match="zero ablation takes no reference texts"):
        lab.head_ablation(llama, clean, difference, "zero", [corrupt])
    with pytest.raises(DataError, match="resample takes reference texts"):
        lab.head_ablation(llama, clean, difference, "resample")
    mamba = opened("mamba-Q4_K_M")
    with pytest.raises(ConfigError, match="mamba has no attention heads"):
        lab.head_ablation(mamba, clean, difference)
    with pytest.raises(ConfigError, match="mamba has no attention heads"):
        lab.path_patching(mamba, clean, corrupt, difference, "output_norm")
    assert patch(model=mamba, tokens=[3]).values.shape == (2, 1)
    with pytest.raises(ConfigError, match="no head precedes blk.0.q"):
        lab.path_patching(llama, clean, corrupt, difference, "blk.0.q")
    with pytest.raises(ConfigError, match="blk.0.out is nothing that reads the residual stream"):
        lab.path_patching(llama, clean, corrupt, difference, "blk.0.out")


def test_what_changes_nothing_is_told_before_what_is_not_there():
    effects = Effects(np.array([[np.nan, 3.0], [1.0, np.nan]]), {"layer": (0, 1), "head": (0, 1)},
                      1.0, np.nan, "a test")  # fmt: skip
    assert effects.top(2) == [("layer 0, head 1", 2.0), ("layer 1, head 0", 0.0)]
