"""Direct logit attribution: parts sum to the logit, and each is what it is by hand."""

import numpy as np
import pytest
import tiny_models

import pyggml
from pyggml.errors import ConfigError, DataError
from pyggml.lab.linear import exact


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["llama-Q8_0", "lfm2-Q4_K_M", "gpt2-F16", "gemma2-F16", "granite-F16"]
)
def test_parts_sum_to_the_difference_of_two_logits(name, opened, clean):
    """Biases, norms behind branches, factors, blocks without attention, a cap of logits."""
    model = opened(name)
    twin = exact(model)
    with twin.trace("output") as t:
        twin.logits(clean)
    found = pyggml.lab.direct_attribution(model, clean, 7, 5, at=-2)
    assert found.logit == pytest.approx(t["output"][-2, 7] - t["output"][-2, 5], abs=2e-5)
    assert found.total == pytest.approx(found.logit, abs=1e-9)
    biases = [x for n, x in found.rest.items() if n.startswith("blk.") and n.endswith(".bias")]
    assert biases and (np.abs(biases).max() < 2e-6) == (name != "gpt2-F16"), "what is left over"
    assert np.isnan(found.heads).any() == (name == "lfm2-Q4_K_M"), "its first block has none"
    assert f"{found.logit:+.4f}  logit" in str(found)


def test_a_head_and_a_neuron_add_what_they_write_along_the_direction(qwen3, clean):
    """By hand, with an adapter: the head's result times its columns of the output matrix."""
    model = exact(qwen3)
    found = pyggml.lab.direct_attribution(qwen3, clean, 7)
    last = "blk.1.out"
    with model.trace("blk.0.attn_head.2", "blk.1.ffn_neurons", last, "blk.0.attention") as t:
        model.logits(clean)
    direction = pyggml.lens.logit_direction(model, t[last][-1], 7)
    without = {"blk.0.attention": pyggml.At(0, heads=[2])}
    outs = []
    for scale in (None, without):
        with model.trace("blk.0.attn_out", scale=scale) as run:
            model.logits(clean)
        outs.append(run["blk.0.attn_out"][-1])
    assert found.heads[0, 2] == pytest.approx((outs[0] - outs[1]) @ direction, abs=1e-5)
    neurons = t["blk.1.ffn_neurons"]
    for n in (0, 117):
        scale = {"blk.1.ffn_neurons": pyggml.At(0, neurons=[n])}
        with model.trace("blk.1.ffn_out", scale=scale) as run:
            model.logits(clean)
        with model.trace("blk.1.ffn_out") as whole:
            model.logits(clean)
        lost = (whole["blk.1.ffn_out"] - run["blk.1.ffn_out"])[-1] @ direction
        assert found.neurons[1][n] == pytest.approx(lost, abs=1e-5)
    assert neurons.shape[1] == len(found.neurons[1])


def test_what_a_trace_takes_away_adds_nothing(llama, clean):
    with llama.trace(scale={"blk.*.attention": pyggml.At(0, heads=[1])}):
        found = pyggml.lab.direct_attribution(llama, clean, 7)
    assert (found.heads[:, 1] == 0).all() and (found.heads[:, 0] != 0).all()


def test_the_picture_and_the_table_name_parts(llama, clean):
    found = pyggml.lab.direct_attribution(llama, clean, 7)
    svg = found.draw()
    assert found._repr_html_() == svg
    assert svg.startswith("<svg") and f"block 1, head 3: {found.heads[1, 3]:.4g}" in svg
    (name, x), *_ = found.top(1)
    assert abs(x) == max(
        np.abs(found.heads).max(),
        *(np.abs(n).max() for n in found.neurons.values()),
        *map(abs, found.rest.values()),
    )
    assert name in str(found)


def test_what_does_not_fit_is_refused(llama, opened, clean):
    attribute = pyggml.lab.direct_attribution
    with pytest.raises(ConfigError, match="mamba has no attention heads"):
        attribute(opened("mamba-Q4_K_M"), clean, 7)
    with pytest.raises(DataError, match="there is no position 10 in a text of 10 tokens"):
        attribute(llama, clean, 7, at=10)
    with pytest.raises(DataError, match=r"there is no position 1\.5 in a text"):
        attribute(llama, clean, 7, at=1.5)
    with pytest.raises(DataError, match="wanted 0 to 511"):
        attribute(llama, clean, 7, 512)


REFUSED = {
    "talkie": "block 0 of talkie adds ffn_out in a way of its own, which is not split",
    "nanbeige": "nanbeige runs its blocks more than once",
    "afmoe": "block 0 of afmoe has a gate between its heads and their output matrix",
}


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_no_sum_of_heads_are_refused_by_name(name, clean, tmp_path):
    model = pyggml.load(tiny_models.write(tmp_path / "model.gguf", name))
    with pytest.raises(ConfigError, match=REFUSED[name]):
        pyggml.lab.direct_attribution(model, clean[:5], 7)
    with pytest.raises(ConfigError):
        pyggml.lab.edge_attribution(model, clean[:5], clean[1:6], lambda t: t["logits"][-1, 7])


def test_what_stands_beside_heads_keeps_the_name_of_the_branch(clean, tmp_path):
    """falcon-h1 has a recurrence and attention in one branch, which edges do not tell apart."""
    model = pyggml.load(tiny_models.write(tmp_path / "model.gguf", "falcon-h1"))
    found = pyggml.lab.direct_attribution(model, clean[:5], 7)
    assert found.total == pytest.approx(found.logit, abs=1e-6)
    assert abs(found.rest["blk.0.attn_out"]) > 1e-3 and "blk.0.attn_output.bias" not in found.rest
    with pytest.raises(ConfigError, match="block 0 of falcon-h1 has more than heads"):
        pyggml.lab.edge_attribution(model, clean[:5], clean[1:6], lambda t: t["logits"][-1, 7])
