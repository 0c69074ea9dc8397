"""Several texts in one pass have the values that each has alone, read and changed text by text."""

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import each_kind

import pyggml
from pyggml import At
from pyggml import functions as F
from pyggml.errors import ConfigError, DataError, ShapeError
from pyggml.generation import Batch
from pyggml.lora import LoraConfig, attach
from pyggml.models.taps import fits

N_VOCAB = 11
TEXTS = [np.arange(n) * (3 + 2 * i) % N_VOCAB for i, n in enumerate((7, 1, 12))]
# Dense, with windows, experts, latent attention of both kinds, recurrent, layers that share keys.
KINDS = ("llama", "gemma3", "qwen3moe", "deepseek2", "mamba2", "rwkv7", "qwen3next", "gemma3n")


@pytest.fixture
def open_tiny(tiny):
    return lambda architecture: pyggml.load(tiny(architecture), compute="f32")


@pytest.fixture(scope="module")
def llama(golden_file):
    return pyggml.load(golden_file("llama-F16.gguf"), compute="f32")


def assert_same(found, wanted, name=""):
    assert found.shape == wanted.shape, name
    np.testing.assert_allclose(
        found, wanted, rtol=0, atol=2e-5 * np.abs(wanted).max(), err_msg=name
    )


def difference(t):
    return t["logits"][-1, 7] - t["logits"][-1, 5]


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", each_kind(KINDS, quick=("llama", "mamba2")))
def test_logits_and_activations_are_those_of_each_text(architecture, open_tiny):
    model = open_tiny(architecture)
    wanted = "blk.*.out", "*attn_pattern", "*attn_head.1"
    names = [n for n in wanted if any(fits(name, [n]) for name in model.activations)]
    with model.trace(*names) as both:
        logits = model.logits(TEXTS)
    assert len(logits) == len(TEXTS)
    for i, text in enumerate(TEXTS):
        with model.trace(*names) as one:
            assert_same(logits[i], model.logits(text))
        assert one.names == both.names
        for name in one.names:
            assert_same(both[name][i], one[name], name)


@pytest.mark.parametrize("architecture", KINDS)
def test_gradients_are_those_of_each_text(architecture, open_tiny):
    model = open_tiny(architecture)
    names = "blk.*.out", "token_embd"
    together = model.grad(difference, TEXTS, *names)
    for text, g in zip(TEXTS, together, strict=True):
        alone = model.grad(difference, text, *names)
        assert g.metric == pytest.approx(alone.metric, rel=1e-4, abs=1e-4)
        assert list(g) == list(alone)
        for name in alone:
            assert_same(g.at[name], alone.at[name], name)
            scale = max(np.abs(alone[name]).max(), 1e-6)
            np.testing.assert_allclose(g[name], alone[name], rtol=0, atol=1e-4 * scale)


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(
        st.lists(st.integers(0, N_VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=5
    ),
    kind=st.sampled_from(["llama", "gemma3", "deepseek2", "mamba2"]),
    data=st.data(),
)
def test_edits_compose_by_text(tiny_models_of, texts, kind, data):
    """Drawn texts and drawn edits: what a text gives is what it gives alone, with its edits."""
    model = tiny_models_of(kind)
    n, n_embd = len(texts), model.config.n_embd
    row = data.draw(st.integers(-n, n - 1))
    verb = data.draw(st.sampled_from(["scale", "add", "replace"]))
    token = data.draw(st.sampled_from([None, 0, -1]))
    rng = np.random.default_rng(len(texts))
    arrays = [rng.standard_normal((len(text), n_embd)).astype(np.float32) for text in texts]
    term = data.draw(st.sampled_from(["number", "array", "function", "arrays"]))
    terms = {
        "number": [0.5] * n,
        "array": [arrays[row]] * n,
        "function": [lambda x: x[:1] * 0.5] * n,
        "arrays": arrays,
    }[term]
    given = arrays if term == "arrays" else terms[row]
    with model.trace(scale={"blk.0.out": At(2.0, tokens=[-1])}):
        with model.trace(**{verb: {"blk.0.out": At(given, rows=row, tokens=token)}}):
            found = model.logits(texts)
        for i, text in enumerate(texts):
            own = {"blk.0.out": At(terms[i], tokens=token)} if i == row % n else {}
            with model.trace(**{verb: own}):
                assert_same(found[i], model.logits(text))


@pytest.fixture(scope="module")
def tiny_models_of(tmp_path_factory):
    folder, opened = tmp_path_factory.mktemp("texts"), {}

    def model(kind):
        if kind not in opened:
            path = tiny_models.write(folder / f"{kind}.gguf", kind)
            opened[kind] = pyggml.load(path, compute="f32")
        return opened[kind]

    return model


def test_patterns_are_edited_text_by_text(llama):
    """All that they read is of their own text: in numbers, in functions, by neurons and heads."""
    texts = [np.arange(1, 13), np.arange(3, 8), np.arange(20, 29)]
    first = np.zeros((5, 4, 5), np.float32)
    first[..., 0] = 1
    changes = [
        {"add": {"blk.1.attn_pattern": 0.1}},
        {"scale": {"blk.*.attn_pattern": At(0, heads=[2])}},
        {"replace": {"blk.1.attn_pattern": lambda p: p * p}},
        {"scale": {"blk.0.attn_pattern": At(0, neurons=[0, -1], tokens=[-1])}},
    ]
    for change in changes:
        with llama.trace("blk.1.attn_pattern", **change) as t:
            found = llama.logits(texts)
            for i, text in enumerate(texts):
                assert_same(found[i], llama.logits(text))
                assert_same(t.runs("blk.1.attn_pattern")[0][i], t["blk.1.attn_pattern"])
    plain = llama.logits(texts)
    with llama.trace(replace={"blk.1.attn_pattern": At(first, rows=[1])}):
        found = llama.logits(texts)
    with llama.trace(replace={"blk.1.attn_pattern": first}):
        assert_same(found[1], llama.logits(texts[1]))
    assert_same(found[0], plain[0])
    assert_same(found[2], plain[2])


def test_a_trace_of_several_texts_patches_others_of_their_lengths(llama):
    """t[name] is a list of arrays, and a list of arrays is one for each text."""
    texts = [np.arange(1, 13), np.arange(3, 8)]
    others = [text + 40 for text in texts]
    with llama.trace("blk.0.out") as t:
        wanted = llama.logits(others)
    with llama.trace(replace={"blk.0.out": t["blk.0.out"]}):
        for found, there in zip(llama.logits(texts), wanted, strict=True):
            assert_same(found, there)


def test_each_text_may_have_a_metric_of_its_own(llama):
    texts = [np.arange(1, 13), np.arange(3, 8), [9]]
    metrics = [
        difference,
        lambda t: (t["blk.0.out"][2] ** 2).sum() + t["blk.1.attn_head.1"].sum(),
        lambda t: F.log_softmax(t["logits"])[0, 3] * t["blk.1.attn_pattern"][-1, 0, 0],
    ]
    with llama.trace("blk.0.out") as t:
        together = llama.grad(metrics, texts, "blk.0.out", "blk.0.attn_pattern")
    for i, (metric, text) in enumerate(zip(metrics, texts, strict=True)):
        alone = llama.grad(metric, text, "blk.0.out")
        assert together[i].metric == pytest.approx(alone.metric, rel=1e-5, abs=1e-5)
        assert_same(together[i]["blk.0.out"], alone["blk.0.out"])
        np.testing.assert_array_equal(t.grad("blk.0.out")[i], together[i]["blk.0.out"])
        assert together[i]["blk.0.attn_pattern"].shape == (len(text), 4, len(text))


def test_second_derivatives_are_those_of_each_text(llama):
    def squares(t):
        return (t["logits"][-1] ** 2).sum()

    texts = [np.arange(1, 13), np.arange(3, 8)]
    together = llama.grad(lambda t: t.grad(squares, "output_norm").sum(), texts, "output_norm")
    for text, g in zip(texts, together, strict=True):
        alone = llama.grad(lambda t: t.grad(squares, "output_norm").sum(), text, "output_norm")
        assert_same(g["output_norm"], alone["output_norm"])


def test_one_text_in_a_list_is_a_list(llama):
    (logits,) = llama.logits([[1, 2, 3]])
    np.testing.assert_array_equal(logits, llama.logits([1, 2, 3]))


MISTAKES = [
    (lambda m: m.logits([[1, 2], []]), DataError, r"tokens\[1\]: empty, wanted at least one token"),
    (lambda m: m.logits([[1, 2], [9999]]), DataError, r"tokens\[1\]: ids from 9999 to 9999"),
    (lambda m: m.logits(["one", "two"]), DataError, r"tokens\[0\]: <U3 of shape \(\), wanted one"),
    (
        lambda m: m.logits(np.ones((2, 3), int)),
        DataError,
        "a matrix, wanted one row of integers, or a list",
    ),
    (lambda m: m.logits([[1], [1] * 9999]), DataError, r"tokens\[1\]: 9999 tokens, wanted at most"),
    (
        lambda m: m.grad([difference], [[1], [2]], "*.out"),
        ConfigError,
        "1 metrics, wanted one, or one for each of 2 texts",
    ),
    (lambda m: m.grad("loss", [1, 2], "*.out"), ConfigError, "metric is 'loss', wanted a function"),
    (lambda m: m.grad([difference], [1, 2], "*.out"), ConfigError, "wanted a function of activ"),
    (
        lambda m: m.grad(difference, [[1], [2]], "blk.0.attn_q.weight"),
        ConfigError,
        "blk.0.attn_q.weight: all texts of a batch share it, so that there is no gradient of each",
    ),
]


@pytest.mark.parametrize(("call", "error", "said"), MISTAKES)
def test_mistakes_are_named(llama, call, error, said):
    with pytest.raises(error, match=said):
        call(llama)


PLACES = [
    (At(2, rows=[2]), ShapeError, "blk.0.out: there is no row 2 in a batch of 2"),
    (At(2, tokens=[3]), ShapeError, r"no token 3 in text 1 of 2; At\(…, rows=…\) chooses texts"),
    (At(2, tokens=[-3]), ShapeError, "there is no token -3 in text 1 of 2"),
    ([np.ones(256)] * 3, ShapeError, "3 arrays, wanted one for each of 2 rows of a batch"),
    (At(np.ones((3, 256)), rows=[0]), ShapeError, r"has shape \(4, 256\), and numbers of shape"),
]


@pytest.mark.parametrize(("change", "error", "said"), PLACES)
def test_places_that_a_text_lacks_are_named(llama, change, error, said):
    with pytest.raises(error, match=said), llama.trace(scale={"blk.0.out": change}):
        llama.logits([[1, 2, 3, 4], [5, 6]])
    with llama.trace(scale={"blk.0.out": At(2, tokens=[3], rows=[0])}):
        llama.logits([[1, 2, 3, 4], [5, 6]])


def test_an_adapter_serves_all_texts(llama):
    adapter = attach(llama, LoraConfig(rank=2))
    for pair in adapter.pairs.values():
        pair.b.data[:] = 0.05
    for found, text in zip(adapter.model.logits(TEXTS), TEXTS, strict=True):
        assert_same(found, adapter.model.logits(text))


# -- generation -----------------------------------------------------------------------------------


def test_a_pattern_of_generation_is_of_the_sequence_alone(llama):
    """Read, it has the sequence's tokens; changed, it reads no row of another one."""
    texts = [np.arange(1, 13), np.arange(3, 8)]
    name = "blk.1.attn_pattern"
    batch = Batch(llama, 2, 20)
    slots = [batch.open() for _ in texts]
    batch.feed(dict(zip(slots, [[40] * 15, [50] * 15], strict=True)))
    for slot in slots:
        slot.truncate(0)
    with llama.trace(name) as t:
        batch.feed({slot: text[:4] for slot, text in zip(slots, texts, strict=True)})
        batch.feed({slots[0]: texts[0][4:]})
    with llama.trace(name) as whole:
        llama.logits(texts[0])
    np.testing.assert_allclose(t.runs(name)[0][0], whole[name][:4, :, :4], rtol=0, atol=1e-5)
    assert [p.shape for p in t.runs(name)[0]] == [(4, 4, 4)] * 2
    np.testing.assert_allclose(t[name], whole[name][4:], rtol=0, atol=1e-5)
    with llama.trace(add={name: At(0.1, tokens=[4])}):
        found = batch.feed({slots[1]: texts[1][4:]})[slots[1]]
        np.testing.assert_allclose(found, llama.logits(texts[1])[-1], rtol=0, atol=2e-5)
    for n_slots, neurons in ((2, [0]), (1, [-1])):
        slot = (several := Batch(llama, n_slots, 20)).open()
        with (
            llama.trace(scale={name: At(0, neurons=neurons)}),
            pytest.raises(ConfigError, match="neurons are the tokens that a pattern reads of one"),
        ):
            several.feed({slot: [1, 2]})


def test_sequences_that_are_generated_together_are_read_and_changed_by_slot(llama):
    """A pass of several gives lists, in the order of the slots; a pass of one gives an array."""
    texts = [np.arange(1, 13), np.arange(3, 8), np.arange(20, 29)]
    batch = Batch(llama, 3, 20)
    slots = [batch.open() for _ in texts]
    with llama.trace(
        "blk.1.out", "logits", scale={"blk.0.out": At(0.5, rows=[0, -1], tokens=[2, 8])}
    ) as t:
        first = batch.feed({slot: text[:4] for slot, text in zip(slots, texts, strict=True)})
        rest = batch.feed({slots[2]: texts[2][4:], slots[0]: texts[0][4:]})
        last = batch.feed({slots[1]: texts[1][4:]})
    assert [len(a) for a in t.runs("blk.1.out")[0]] == [4, 4, 4]
    assert [len(a) for a in t.runs("blk.1.out")[1]] == [8, 5]
    assert t["blk.1.out"].shape == (1, 256)
    for i, text in enumerate(texts):
        tokens = [] if i == 1 else [2, 8]
        with llama.trace("blk.1.out", scale={"blk.0.out": At(0.5, tokens)}) as one:
            wanted = llama.logits(text)
        found = (last if i == 1 else rest)[slots[i]]
        np.testing.assert_allclose(found, wanted[-1], rtol=0, atol=2e-5)
        np.testing.assert_allclose(first[slots[i]], wanted[3], rtol=0, atol=2e-5)
        np.testing.assert_allclose(t.runs("logits")[0][i][0], wanted[3], rtol=0, atol=2e-5)
        assert_same(t.runs("blk.1.out")[0][i], one["blk.1.out"][:4])
    with (
        llama.trace(scale={"blk.0.out": At(0, rows=[3])}),
        pytest.raises(ShapeError, match="no row 3 in a batch of 3"),
    ):
        batch.feed({slots[1]: [1]})
