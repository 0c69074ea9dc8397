"""Changes as adapters: what they do without a trace, in a file, and in llama.cpp with that file."""

import os

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml import At, lab
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.graph.arrays import read
from pyggml.lab.linear import exact, head_counts
from pyggml.lora import combine

TEXTS = [np.random.default_rng(i).integers(0, 90, 12) for i in range(8)]
HEADS = {0: [1], 1: [0, 3]}


def with_updates(model, updates):
    return model.with_adapters(*model.adapters, updates)


def without(model, scale, ids):
    with (twin := exact(model)).trace(scale=scale):
        return twin.logits(ids)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen3-F16", "gpt2-F16"])
def test_an_update_takes_heads_away(name, opened, clean):
    """As their results times 0 do; of the size of a head each; beside an adapter as without."""
    model = opened(name)
    updates = lab.without_heads(model, HEADS)
    scale = {f"blk.{i}.attention": At(0, heads=heads) for i, heads in HEADS.items()}
    found, wanted = exact(with_updates(model, updates)).logits(clean), without(model, scale, clean)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert np.abs(wanted - exact(model).logits(clean)).max() > 0.01
    size = model.parts.weights["blk.0.attn_output.weight"].shape[1] // head_counts(model)[0]
    assert [p.rank for p in updates.values()] == [size, 2 * size]


def test_an_update_takes_heads_from_an_adapter_too(qwen3, clean):
    updates = lab.without_heads(qwen3, {1: [2]})
    scale = {"blk.1.attention": At(0, heads=[2])}
    found = exact(with_updates(qwen3, updates)).logits(clean)
    np.testing.assert_allclose(found, without(qwen3, scale, clean), atol=2e-5)


@pytest.mark.parametrize("name", ["llama-Q8_0", "gpt2-F16"])
def test_an_update_takes_neurons_away(name, opened, clean):
    model = opened(name)
    updates = lab.without_neurons(model, {1: [5, 0, 5]})
    scale = {"blk.1.ffn_neurons": At(0, neurons=[0, 5])}
    found = exact(with_updates(model, updates)).logits(clean)
    np.testing.assert_allclose(found, without(model, scale, clean), atol=2e-5)
    assert [p.rank for p in updates.values()] == [2]


def test_steering_adds_what_it_says_that_it_adds(opened):
    """Of every token its neurons' product with a; the error is that of tokens that were not fitted,
    and 0 where the neurons have a part that never changes."""
    model = exact(opened("llama-Q8_0"))
    v = np.random.default_rng(1).normal(0, 1, model.config.n_embd)
    found = lab.steering(model, v, 1, TEXTS)
    (pair,) = found.updates.values()
    a = read(pair.a)[0]
    with model.trace("blk.1.ffn_neurons", "blk.1.out") as t:
        model.logits(TEXTS[0])
    steered = with_updates(model, found.updates)
    with steered.trace("blk.1.out") as u:
        steered.logits(TEXTS[0])
    shares = t["blk.1.ffn_neurons"] @ a
    added = u["blk.1.out"] - t["blk.1.out"]
    np.testing.assert_allclose(added, shares[:, None] * v, atol=1e-4)
    x = lab.as_adapter.neurons_of(model, 1, TEXTS)
    assert found.error == pytest.approx(np.sqrt(np.mean((x[4::5] @ a - 1) ** 2)), rel=1e-4)
    with model.trace(replace={"blk.1.ffn_neurons": np.linspace(1, 2, x.shape[1])}):
        assert lab.steering(model, v, 1, TEXTS).error < 0.01, "neurons that are always alike"


def test_what_is_no_update_is_refused(opened, clean):
    llama, gemma = opened("llama-Q8_0"), opened("gemma2-F16")
    n = llama.config.n_embd
    for ask, kind, said in (
        (lambda: lab.without_heads(llama, {0: [99]}), ConfigError, "block 0 has no head 99 among"),
        (lambda: lab.without_heads(llama, {9: [0]}), ConfigError, "there is no block 9 among"),
        (lambda: lab.without_heads(llama, {}), ConfigError, "no heads, wanted one at least"),
        (lambda: lab.without_neurons(llama, {0: [-1]}), ConfigError, "no neuron -1 among its"),
        (lambda: lab.without_neurons(llama, {7: [1]}), ConfigError, "there is no block 7"),
        (lambda: lab.steering(llama, np.ones(3), 0, TEXTS), ShapeError, r"shape \(3,\), wanted"),
        (lambda: lab.steering(llama, np.ones(n), 0, []), DataError, "no texts, wanted one"),
        (lambda: lab.steering(llama, np.ones(n), 0, [[1]]), DataError, "have 1 tokens, wanted 5"),
        (
            lambda: lab.steering(gemma, np.ones(gemma.config.n_embd), 0, TEXTS),
            ConfigError,
            "changes what its feed-forward adds: a control vector is exact",
        ),
    ):
        with pytest.raises(kind, match=said):
            ask()


@pytest.mark.interop
@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen3-F16"])
@pytest.mark.parametrize("change", ["heads", "neurons", "rome"])
def test_llama_cpp_loads_the_file_and_gives_the_same_logits(name, change, opened, clean, tmp_path):
    """As close as without, where its products round too."""
    llama_cpp = need("llama_cpp")
    model = exact(opened(name).with_adapters())
    if change == "heads":
        updates = lab.without_heads(model, HEADS)
    elif change == "neurons":
        updates = lab.without_neurons(model, {0: range(0, 30), 1: [3]})
    else:
        c = lab.key_covariance(model, 0, TEXTS)
        updates = lab.rome(model, clean, [17], 0, 3, c).updates
    path = tmp_path / "change.gguf"
    combine(with_updates(model, updates), path)
    where, tokens = os.fspath(model.file.path), [int(t) for t in clean]

    def theirs(**more):
        llama = llama_cpp.Llama(where, n_ctx=16, logits_all=True, verbose=False, **more)
        llama.eval(tokens)
        return np.array(llama.scores[: len(tokens)])

    plain, changed = theirs(), theirs(lora_path=os.fspath(path))
    ours = exact(pyggml.load(where, path)).logits(clean)
    np.testing.assert_allclose(ours, exact(with_updates(model, updates)).logits(clean), atol=1e-5)
    rounding = np.std(plain - model.logits(clean))
    assert np.std(changed - plain) > 5 * rounding
    assert np.std(changed - ours) < 1.5 * rounding
