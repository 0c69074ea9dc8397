"""Activations by name: unique names, what is read, what an edit changes, and no trace left."""

import numpy as np
import pytest
from kinds import each_kind
from tiny_models import zero_parts

import pyggml
from pyggml import At
from pyggml import functions as F
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.errors import ConfigError, NoGradientError, NotFiniteError, ShapeError
from pyggml.generation import Session
from pyggml.graph import Graph
from pyggml.graph.arrays import read
from pyggml.lora import loss_and_grads
from pyggml.models import (
    ARCHITECTURES,
    Inputs,
    Taps,
    build,
)

IDS = np.arange(1, 13)
N_VOCAB = 11


@pytest.fixture(scope="module")
def model(golden_file):
    return pyggml.load(golden_file("llama-F16.gguf"), compute="f32")


@pytest.fixture(scope="module")
def logits(model):
    return model.logits(IDS)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_names_are_unique_and_alike_in_every_architecture(architecture):
    """A name given twice is an AssertionError of Taps."""
    parts, taps = zero_parts(architecture, N_VOCAB), Taps(["*"])
    build(parts, Inputs.empty(3), taps=taps)
    names = set(taps.names)
    assert {"token_embd", "output", "logits"} <= names
    n = parts.config.n_layer
    assert {f"blk.{i}.out" for i in range(n)} <= names
    branches = [{f"blk.{i}.attn_out", f"blk.{i}.ffn_out"} & names for i in range(n)]
    if architecture in ("mamba", "mamba2"):
        assert branches == [{f"blk.{i}.attn_out"} for i in range(n)]
    else:  # of Nemotron H, a block is one part
        assert {len(b) for b in branches} == {1 if architecture.startswith("nemotron_h") else 2}
    assert all(t.shape[0] == 3 for t in taps.read.values())


@pytest.mark.parametrize("architecture", each_kind())
def test_what_is_made_on_demand_is_offered_and_made(architecture):
    """With it the graph is built; each head has its part of what all heads have."""
    parts, offered = zero_parts(architecture, N_VOCAB), Taps([])
    taps = Taps(["*", "*attn_head.*", "*attn_pattern"])
    build(parts, Inputs.empty(3), taps=offered)
    build(parts, Inputs.empty(3), taps=taps)
    assert sorted(taps.read) == sorted(offered.names)
    for name, x in taps.read.items():
        if name.endswith("attn_pattern"):
            assert x.shape == (3, taps.read[name.replace("attn_pattern", "q")].shape[1], 3)
    for at in (f"blk.{i}." for i in range(parts.config.n_layer)):
        for of, words in (("q", ("attn_pattern", "attn_head.0")), ("ffn_out", ("ffn_neurons",))):
            missing = [w for w in words if not any(n.startswith(at + w) for n in taps.read)]
            assert not (f"{at}{of}" in taps.read and missing), (at, missing)


@pytest.mark.parametrize("architecture", each_kind())
def test_a_model_without_a_trace_has_the_same_plan(architecture):
    """Taps that name nothing change no node, so neither does their absence."""
    parts = zero_parts(architecture, N_VOCAB)
    alone, tapped = (
        plan(Graph.of(build(parts, Inputs.empty(3), taps=taps)), CPU()) for taps in (None, Taps([]))
    )
    assert [t.op for t in alone.graph.nodes] == [t.op for t in tapped.graph.nodes]
    assert [*alone.offsets.values()] == [*tapped.offsets.values()]


# -- reading --------------------------------------------------------------------------------------


def test_reading_changes_no_bit(model, logits):
    with model.trace("*") as t:
        np.testing.assert_array_equal(model.logits(IDS), logits)
    made = [n for n in model.activations if "attn_head" not in n and "attn_pattern" not in n]
    assert t.names == made and len(model.activations) == len(made) + 2 * (4 + 1)
    np.testing.assert_array_equal(t["logits"], logits)
    assert not model.traces
    np.testing.assert_array_equal(model.logits(IDS), logits)


def test_what_was_not_read_is_named(model):
    with model.trace("blk.*.out") as t:
        model.logits(IDS)
    for ask in (t.__getitem__, t.runs):
        with pytest.raises(KeyError, match="mid was not read, but blk.0.out, blk.1.out"):
            ask("blk.0.mid")
    gradients = model.grad(lambda t: t["logits"][-1, 5], IDS, "blk.0.out")
    with pytest.raises(KeyError, match="mid is none of blk.0.out"):
        gradients["blk.0.mid"]


def test_activations_are_those_that_the_graph_computed(model):
    """By hand, from one to the next: the residual stream, and a module's product."""
    with model.trace("*") as t:
        model.logits(IDS)
    stream = t["token_embd"]
    for i in range(2):
        stream = stream + t[f"blk.{i}.attn_out"] + t[f"blk.{i}.ffn_out"]
        np.testing.assert_allclose(t[f"blk.{i}.out"], stream, rtol=1e-5, atol=1e-5)
        w = read(model.parts.weights[f"blk.{i}.attn_output.weight"]).astype(np.float32)
        by_hand = t[f"blk.{i}.attention"] @ w.T
        np.testing.assert_allclose(t[f"blk.{i}.attn_output"], by_hand, rtol=1e-4, atol=1e-5)
    assert t["blk.0.q"].shape == (12, 4, 64) and t["blk.0.k"].shape == (12, 2, 64)


def test_a_prompt_and_generation_are_read_as_a_whole_run_is(model):
    with model.trace("blk.*.out", "blk.1.k", "logits") as whole:
        model.logits(IDS)
    session = Session(model, 20)
    session.feed(IDS[:3])  # a program without taps is bound already
    session.truncate(0)
    with model.trace("blk.*.out", "blk.1.k", "logits") as t:
        session.feed(IDS[:7])
        for token in IDS[7:]:
            session.feed([token])
    assert [len(a) for a in t.runs("blk.0.out")] == [7, 1, 1, 1, 1, 1]
    for name in ("blk.0.out", "blk.1.out", "blk.1.k"):
        np.testing.assert_allclose(np.concatenate(t.runs(name)), whole[name], rtol=0, atol=2e-5)
    np.testing.assert_allclose(t["logits"], whole["logits"][-1:], rtol=0, atol=2e-5)
    session.feed([1])
    assert len(t.runs("logits")) == 6


def test_padding_of_a_prompt_is_not_read(model):
    session = Session(model, 40)
    with model.trace("blk.0.out") as t:
        session.feed(np.arange(1, 20))
    assert t["blk.0.out"].shape == (19, 256)


# -- changing -------------------------------------------------------------------------------------


def test_a_replaced_activation_is_a_forward_by_hand(model, logits):
    """Replaced by what another text has, the rest of the model does as it does for that text."""
    other = IDS[::-1].copy()
    with model.trace("blk.0.out") as t:
        wanted = model.logits(other)
    with model.trace("blk.0.out", replace={"blk.0.out": t["blk.0.out"]}) as changed:
        found = model.logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(changed["blk.0.out"], t["blk.0.out"], rtol=0, atol=1e-6)


def test_edits_are_arithmetic(model):
    vector = np.linspace(-1, 1, 256, dtype=np.float32)
    with model.trace("blk.0.ffn_out", "blk.0.out") as t:
        model.logits(IDS)
    with model.trace("blk.0.*out", scale={"blk.0.ffn_out": 0.5}, add={"blk.0.out": vector}) as e:
        model.logits(IDS)
    half = 0.5 * t["blk.0.ffn_out"]
    np.testing.assert_allclose(e["blk.0.ffn_out"], half, rtol=1e-6)
    np.testing.assert_allclose(e["blk.0.out"], t["blk.0.out"] - half + vector, rtol=1e-4, atol=1e-5)


def test_tokens_choose_rows(model, logits):
    with model.trace("blk.1.out") as before:
        model.logits(IDS)
    with model.trace("blk.1.out", scale={"blk.1.out": 3.0}, tokens=[2, -1]) as t:
        model.logits(IDS)
    factors = np.where(np.isin(np.arange(12), [2, 11]), 3, 1)[:, None]
    np.testing.assert_allclose(t["blk.1.out"], before["blk.1.out"] * factors, rtol=1e-6)
    with model.trace(add={"blk.0.ffn_out": 0.3}, tokens=[-2]):
        changed = np.abs(model.logits(IDS) - logits).max(axis=1) > 1e-4
    np.testing.assert_array_equal(np.flatnonzero(changed), [10, 11])


def test_no_tokens_are_none(model, logits):
    for changes in ({"scale": {"blk.0.out": 0}}, {"add": {"*.out": 2.0}}, {"replace": {"*": 1.0}}):
        with model.trace(**changes, tokens=[]):
            np.testing.assert_array_equal(model.logits(IDS), logits)


def test_tokens_of_a_text_are_changed_while_it_is_generated(model):
    """Also where its last pass has one token, and of the logits, which are made for that alone."""
    changes = {"add": {"blk.0.out": 0.5, "logits": 1.0}, "tokens": [2, 11]}
    with model.trace(**changes):
        whole = model.logits(IDS)
        session = Session(model, 40)
        session.feed(IDS[:8])
        last = [session.feed(IDS[i : i + 2]) for i in (8, 10)]
    for at, found in zip((9, 11), last, strict=True):
        np.testing.assert_allclose(found, whole[at], rtol=0, atol=2e-5)
    assert np.abs(whole[11] - model.logits(IDS)[11]).mean() > 0.5


def test_arrays_scale_each_number(model):
    mask = np.arange(256) % 3
    with model.trace("blk.1.out") as before:
        model.logits(IDS)
    with model.trace("blk.1.out", scale={"blk.1.out": mask}) as t:
        model.logits(IDS)
    np.testing.assert_allclose(t["blk.1.out"], before["blk.1.out"] * mask, rtol=1e-6)


def test_a_function_of_the_activation_is_part_of_the_graph(model):
    """Of each verb, with its slope: a stream of length 1 has no gradient along itself."""
    with model.trace("blk.0.out", "blk.1.ffn_out") as plain:
        model.logits(IDS)
    x, f = plain["blk.0.out"], plain["blk.1.ffn_out"]
    with model.trace("blk.0.out", scale={"blk.0.out": lambda x: 1 / _length(x)}) as t:
        model.logits(IDS)
        with model.trace("blk.0.ffn_out") as inner:
            loss_and_grads(model, IDS)
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    np.testing.assert_allclose(t.runs("blk.0.out")[0], unit, rtol=0, atol=1e-6)
    along = (inner.grad("blk.0.ffn_out") * x[:-1]).sum(axis=-1)
    assert np.abs(along).max() < 1e-3 * np.abs(inner.grad("blk.0.ffn_out")).max()
    shifted = {"blk.1.ffn_out": lambda x: F.concatenate([x[1:], x[:1]])}
    added = {"blk.1.out": lambda x: np.arange(256)}
    with model.trace("blk.1.*out", replace=shifted, add=added) as t:
        model.logits(IDS)
    np.testing.assert_allclose(t["blk.1.ffn_out"], np.roll(f, -1, axis=0), rtol=1e-6)
    whole = x + t["blk.1.attn_out"] + t["blk.1.ffn_out"] + np.arange(256)
    np.testing.assert_allclose(t["blk.1.out"], whole, rtol=1e-5, atol=1e-5)


def _length(x):
    return (x * x).sum(axis=-1, keepdims=True).sqrt()


def test_at_says_where(model):
    """Layers, heads, neurons and tokens; what is not named stays as it is, to the bit."""
    names = "blk.0.attention", "blk.1.attention", "blk.1.q", "blk.0.ffn_up"
    with model.trace(*names) as before:
        model.logits(IDS)
    with model.trace(*names, scale={"*.attention": At(0, heads=[1, -1], layers=[0])}) as t:
        model.logits(IDS)
    heads = before["blk.0.attention"].reshape(12, 4, 64).copy()
    heads[:, [1, 3]] = 0
    np.testing.assert_array_equal(t["blk.0.attention"], heads.reshape(12, 256))
    assert t["blk.1.attention"].any(axis=0).all()
    with model.trace(*names, scale={"blk.0.ffn_up": At(4, neurons=[2, 5])}) as t:
        model.logits(IDS)
    factor = np.where(np.isin(np.arange(before["blk.0.ffn_up"].shape[1]), [2, 5]), 4, 1)
    np.testing.assert_array_equal(t["blk.0.ffn_up"], before["blk.0.ffn_up"] * factor)
    replace = {"blk.1.q": At(lambda q: -q, heads=2, tokens=[-1], neurons=range(32))}
    with model.trace("blk.1.q", replace=replace, tokens=[0]) as t:
        model.logits(IDS)
    q = before["blk.1.q"].copy()
    q[-1, 2, :32] *= -1
    np.testing.assert_array_equal(t["blk.1.q"], q)


def test_parts_of_attention_are_those_of_numpy(model, logits):
    """The pattern, each head's result, the neurons, and the stream between both parts."""
    names = "blk.1.attn_pattern", "blk.1.attn_head.*", "blk.1.ffn_neurons", "blk.1.mid"
    with model.trace("*", *names) as t:
        found = model.logits(IDS)
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-5)
    q, k, v = (t[f"blk.1.{x}"].astype(np.float64) for x in "qkv")
    s = np.einsum("thd,shd->ths", q, np.repeat(k, 2, axis=1)) / 8
    e = np.exp(s - s.max()) * np.tri(12)[:, None]
    p = e / e.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(t["blk.1.attn_pattern"], p, rtol=0, atol=1e-6)
    heads = np.einsum("ths,shd->thd", p, np.repeat(v, 2, axis=1))
    for i in range(4):
        np.testing.assert_allclose(t[f"blk.1.attn_head.{i}"], heads[:, i], rtol=0, atol=1e-5)
    mid = t["blk.0.out"] + t["blk.1.attn_out"]
    np.testing.assert_allclose(t["blk.1.mid"], mid, rtol=1e-6, atol=1e-6)
    w = read(model.parts.weights["blk.1.ffn_down.weight"]).astype(np.float32)
    by_hand = t["blk.1.ffn_neurons"] @ w.T
    np.testing.assert_allclose(t["blk.1.ffn_down"], by_hand, rtol=1e-3, atol=1e-4)


def test_a_pattern_that_is_changed_reads_other_tokens(model):
    """Each head reads the first token alone; a head is removed by its pattern or its result."""
    first = np.zeros((12, 4, 12), np.float32)
    first[..., 0] = 1
    with model.trace("blk.1.v", "blk.1.attention", replace={"blk.1.attn_pattern": first}) as t:
        model.logits(IDS)
    v = np.repeat(t["blk.1.v"][0], 2, axis=0).reshape(-1)
    np.testing.assert_allclose(t["blk.1.attention"], np.tile(v, (12, 1)), rtol=0, atol=1e-6)
    ways = {"blk.1.attn_pattern": At(0, heads=[2])}, {"blk.1.attn_head.2": 0}
    with model.trace(scale={"blk.1.attention": At(0, heads=[2])}):
        wanted = model.logits(IDS)
    for scale in ways:
        with model.trace(scale=scale):
            np.testing.assert_allclose(model.logits(IDS), wanted, rtol=0, atol=1e-5)
            session = Session(model, 20)
            session.feed(IDS[:9])
            last = session.feed(IDS[9:])
        np.testing.assert_allclose(last, wanted[-1], rtol=0, atol=2e-5)


def test_a_head_is_ablated_alike_in_a_run_a_loss_and_generation(model, logits):
    with model.trace(scale={"blk.1.attention": At(0, heads=[2])}):
        whole = model.logits(IDS)
        session = Session(model, 20)
        session.feed(IDS[:7])
        for token in IDS[7:]:
            last = session.feed([token])
        loss, _ = loss_and_grads(model, IDS, parameters={})
    np.testing.assert_allclose(last, whole[-1], rtol=0, atol=2e-5)
    z = whole[:-1].astype(np.float64)
    own = z[np.arange(11), IDS[1:]] - np.log(np.exp(z).sum(axis=1))
    assert loss == pytest.approx(-own.mean(), abs=1e-5)
    assert np.abs(whole - logits).max() > 0.01


def test_traces_nest(model):
    """An inner one changes what the outer one has changed; both read the result."""
    with model.trace("blk.1.out", add={"blk.1.out": 1.0}) as outer:
        model.logits(IDS)
        with model.trace("blk.1.*out", scale={"blk.1.out": 2.0}) as inner:
            model.logits(IDS)
        model.logits(IDS)
    first, second, third = outer.runs("blk.1.out")
    np.testing.assert_array_equal(first, third)
    np.testing.assert_allclose(second, 2 * first, rtol=1e-6)
    np.testing.assert_array_equal(inner["blk.1.out"], second)
    assert outer.names == ["blk.1.out"]
    assert inner.names == ["blk.1.attn_out", "blk.1.ffn_out", "blk.1.out"]


def test_a_steered_model_generates_steered(model):
    session, steered = Session(model, 16), Session(model, 16)
    with model.trace(add={"blk.0.out": 0.5}):
        whole = model.logits(IDS)
        steered.feed(IDS[:8])
        for token in IDS[8:]:
            last = steered.feed([token])
    np.testing.assert_allclose(last, whole[-1], rtol=0, atol=2e-5)
    assert np.abs(session.feed(IDS) - last).max() > 0.01


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token_embd", "blk.0.attn_q", "blk.0.v", "blk.1.out", "logits"])
def test_gradients_of_activations_are_slopes_of_the_loss(model, name):
    with model.trace(name) as t:
        loss, _ = loss_and_grads(model, IDS)
    rng = np.random.default_rng(0)
    v = rng.standard_normal(t[name].shape).astype(np.float32)
    h, ends = 0.01 * float(t[name].std()), []
    for step in (h, -h):
        with model.trace(add={name: step * v}):
            ends.append(loss_and_grads(model, IDS)[0])
    slope, scale = (ends[0] - ends[1]) / (2 * h), float(np.linalg.norm(t.grad(name)))
    assert slope == pytest.approx(float(np.sum(t.grad(name) * v)), abs=0.02 * scale)
    assert np.isfinite(loss)


def test_gradients_wait_for_a_loss(model):
    with model.trace("blk.0.out") as t:
        model.logits(IDS)
    with pytest.raises(NoGradientError, match=r"blk.0.out has no gradient: no loss"):
        t.grad("blk.0.out")


# -- mistakes -------------------------------------------------------------------------------------


MISTAKES = [
    (
        "blk.9.out",
        {"scale": {"q*": 1}},
        ConfigError,
        r"no activation is named blk.9.out, q\*: did you mean 'blk.\d.out'",
    ),
    (
        "logits",
        {"add": {"blk.0.out": np.nan}},
        ConfigError,
        "blk.0.out: its numbers are not finite",
    ),
    (
        "logits",
        {"add": {"blk.0.out": np.ones(3)}},
        ShapeError,
        r"blk.0.out has shape \(12, 256\), and",
    ),
    ("logits", {"scale": {"*.out": 2}, "tokens": [12]}, ShapeError, "no token 12 in a run of 12"),
]


@pytest.mark.parametrize(("pattern", "changes", "error", "said"), MISTAKES)
def test_mistakes_are_named(model, logits, pattern, changes, error, said):
    with pytest.raises(error, match=said), model.trace(pattern, **changes):
        model.logits(IDS)
    np.testing.assert_array_equal(model.logits(IDS), logits)


def test_a_text_that_is_generated_has_no_end(model):
    session = Session(model, 20)
    with (
        model.trace(scale={"blk.0.out": 2}, tokens=[-1]),
        pytest.raises(ConfigError, match="tokens has -1, counted from the end of a text: while a"),
    ):
        session.feed(IDS)


NO_NUMBERS = [
    (
        {"scale": {"blk.0.out": lambda x: None}},
        "scale of blk.0.out: the function gave None",
    ),
    ({"add": {"blk.0.out": "2"}}, "add of blk.0.out is '2', wanted a number or an array"),
    (
        {"replace": {"blk.0.out": [[1], [1, 2]]}},
        r"replace of blk.0.out is \[\[1\], \[1, 2\]\], wanted",
    ),
    ({"scale": 2}, "scale is 2, wanted names and numbers: scale={'blk.0.out': 2}"),
    ({"scale": {"blk.0.out": 2}, "tokens": [1.5]}, r"tokens is \[1.5\], wanted whole numbers"),
    ({"scale": {"blk.0.out": 2}, "tokens": [True]}, r"tokens is \[True\], wanted whole numbers"),
    ({"tokens": [1]}, "tokens says where scale, add and replace change, and none is given"),
    ({"scale": {"blk.*.out": At(2, layers=[0, 2])}}, r"blk.\*.out names nothing in layer 2"),
    ({"scale": {"*_embd": At(2, layers=-1)}}, r"\*_embd names nothing in layer -1"),
    ({"scale": {"blk.0.out": At("2")}}, "scale of blk.0.out is '2', wanted a number"),
    ({"scale": {"blk.0.out": At(2, heads="a")}}, "heads is 'a', wanted whole numbers"),
]


@pytest.mark.parametrize(("changes", "said"), NO_NUMBERS)
def test_what_is_no_number_is_refused_in_a_sentence(model, changes, said):
    with pytest.raises(ConfigError, match=said), model.trace(**changes):
        model.logits(IDS)


PLACES = [
    ({"blk.0.out": At(2, heads=[0])}, "blk.0.out has no heads"),
    ({"blk.0.q": At(2, heads=[4])}, "blk.0.q: there is no head 4 among its 4"),
    ({"blk.0.k": At(2, heads=[2])}, "blk.0.k: there is no head 2 among its 2"),
    ({"blk.0.out": At(2, neurons=[256])}, "blk.0.out: there is no neuron 256 among its 256"),
    ({"blk.0.out": At(2, rows=[1])}, "blk.0.out: there is no row 1 in a batch of 1"),
    ({"blk.0.out": lambda x: x[:3]}, r"shape \(12, 256\), and numbers of shape \(3, 256\) do not"),
]


@pytest.mark.parametrize(("scale", "said"), PLACES)
def test_places_that_an_activation_lacks_are_named(model, scale, said):
    with pytest.raises(ShapeError, match=said), model.trace(scale=scale):
        model.logits(IDS)


def test_a_name_that_is_nearly_one_is_suggested(model):
    with (
        pytest.raises(ConfigError, match=r"named blk.0.atn_out: did you mean 'blk.0.attn_out'\?$"),
        model.trace("blk.0.atn_out"),
    ):
        pass


def test_numbers_that_a_trace_breaks_are_its_own_fault(model):
    """Not that of the file, in a whole run and in generation."""
    said = "the greatest logit is nan, .*: what a trace makes of blk.1.out leads to no numbers"
    with model.trace(scale={"blk.1.out": 3e38}):
        with pytest.raises(NotFiniteError, match=said):
            model.logits(IDS)
        with pytest.raises(NotFiniteError, match=said):
            Session(model, 20).feed(IDS)


def test_a_model_that_rounds_says_so_once_where_activations_are_changed(golden_file):
    model = pyggml.load(golden_file("llama-F16.gguf"), compute="int8")
    with model.trace("blk.0.out"):
        model.logits(IDS)
    with model.trace(scale={"blk.0.out": 2.0}):
        with pytest.warns(RuntimeWarning, match="products round to int8, .* changing blk.0.out: "):
            model.logits(IDS)
        model.logits(IDS)
