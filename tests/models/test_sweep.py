"""A sweep's cells give what traces of the same changes give, by one program that is bound once."""

import numpy as np
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st
from separate_cpu import SeparateCPU

import pyggml
from pyggml import At
from pyggml.errors import ConfigError, DataError, NotFiniteError, ShapeError

IDS = np.arange(1, 13)


@pytest.fixture(scope="module")
def model(golden_file):
    return pyggml.load(golden_file("llama-F16.gguf"), compute="f32")


def difference(t):
    return t["logits"][-1, 7] - t["logits"][-1, 5]


def traced(model, cell, ids=IDS):
    with model.trace(**cell):
        z = model.logits(ids)
    return z[-1, 7] - z[-1, 5]


def test_a_sweep_of_patches_is_a_patch_each(model):
    """Layers × positions, and heads; of one text, several cells in a pass."""
    other = IDS[::-1].copy()
    names = "blk.0.out", "blk.1.out", "blk.0.attention"
    with model.trace(*names) as t:
        model.logits(other)
    cells = [{}]
    cells += [{"replace": {n: At(t[n], tokens=[p])}} for n in names[:2] for p in (0, 4, -1)]
    cells += [{"scale": {names[2]: At(0, heads=[h])}} for h in range(4)]
    sweep = model.sweep(difference, IDS, *names, n_cells=4)
    assert sweep.names == ["blk.0.attention", "blk.0.out", "blk.1.out"]
    found = list(sweep(cells))
    assert all(isinstance(y, float) for y in found)
    np.testing.assert_allclose(found, [traced(model, c) for c in cells], rtol=0, atol=2e-5)
    np.testing.assert_allclose(list(sweep(cells[::-1])), found[::-1], rtol=0, atol=2e-6)
    assert np.ptp(found) > 0.1


def test_one_program_serves_all_cells(model, monkeypatch):
    plain = traced(model, {})
    bound, bind = [], pyggml.model.bind
    monkeypatch.setattr("pyggml.model.bind", lambda *args: bound.append(1) or bind(*args))
    sweep = model.sweep(difference, IDS, "blk.*.out", n_cells=3)
    cells = ({"add": {"blk.0.out": i / 10}} for i in range(8))
    first = next(found := sweep(cells))
    assert len(bound) == 1 and first == pytest.approx(plain, abs=2e-5)
    assert next(cells) == {"add": {"blk.0.out": 0.3}}  # read as passes take them
    assert len(list(found)) == 6 and len(list(sweep([{}, {}]))) == 2
    assert len(bound) == 1


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_drawn_cells_are_traces(small, data):
    """Scales, addends and replacements at drawn places, one after another on one activation."""
    model = small(data.draw(st.sampled_from(["llama", "gemma3", "deepseek2", "mamba2"])))
    texts = [np.arange(n) * 3 % 11 for n in (5, 2)]
    places = st.fixed_dictionaries(
        {},
        optional={
            "tokens": st.lists(st.sampled_from([0, 1, -1]), max_size=2),
            "rows": st.lists(st.sampled_from([0, 1, -1]), max_size=2),
            "neurons": st.lists(st.integers(-16, 15), max_size=4),
            "layers": st.lists(st.integers(0, 1), min_size=1, max_size=2),
        },
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    numbers = [0.5, rng.standard_normal(16).astype(np.float32)]
    numbers.append([rng.standard_normal((len(text), 16)).astype(np.float32) for text in texts])

    def cell():
        verbs = data.draw(st.sets(st.sampled_from(["scale", "add", "replace"])))
        change = {}
        for verb in sorted(verbs):
            term = At(data.draw(st.sampled_from(numbers)), **data.draw(places))
            change[verb] = {"blk.*.out": term}
        return change

    def last(t):
        return t["logits"][-1]

    cells = [cell() for _ in range(3)]
    for change, found in zip(cells, model.sweep(last, texts, "blk.*.out")(cells), strict=True):
        with model.trace(**change):
            wanted = [z[-1] for z in model.logits(texts)]
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=5e-5 * np.abs(b).max())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder, opened = tmp_path_factory.mktemp("sweeps"), {}

    def load(kind):
        if kind not in opened:
            path = tiny_models.write(folder / f"{kind}.gguf", kind, numbers=tiny_models.scaled)
            opened[kind] = pyggml.load(path, compute="f32")
        return opened[kind]

    return load


def test_gradients_of_cells_are_those_of_traces(model):
    cells = [{"scale": {"blk.0.out": s}} for s in (0.0, 0.5, 1.0)]
    sweep = model.sweep(difference, IDS, "blk.0.out", by=("blk.0.out", "blk.1.ffn_out"), n_cells=2)
    for cell, g in zip(cells, sweep(cells), strict=True):
        with model.trace(**cell):
            wanted = model.grad(difference, IDS, "blk.0.out", "blk.1.ffn_out")
        assert g.metric == pytest.approx(wanted.metric, abs=2e-5)
        for name in wanted:
            scale = np.abs(wanted[name]).max()
            np.testing.assert_allclose(g[name], wanted[name], rtol=0, atol=1e-5 * scale)
            np.testing.assert_allclose(g.at[name], wanted.at[name], rtol=0, atol=1e-5)


def test_patterns_and_heads_are_changed(model):
    first = np.zeros((12, 4, 12), np.float32)
    first[..., 0] = 1
    cells = [
        {"replace": {"blk.1.attn_pattern": At(first, heads=[1])}},
        {"scale": {"blk.0.attn_head.2": At(0, tokens=[-1])}},
        {"add": {"blk.1.attn_pattern": At(0.1, neurons=[-1], tokens=[3])}},
    ]
    sweep = model.sweep(difference, IDS, "blk.1.attn_pattern", "blk.0.attn_head.*")
    wanted = [traced(model, c) for c in cells]
    np.testing.assert_allclose(list(sweep(cells)), wanted, rtol=0, atol=2e-5)


def test_traces_that_are_on_change_the_model_of_all_cells(model):
    texts = [IDS, IDS[:5]]
    own = [np.full((len(text), 256), 0.1 * (i + 1), np.float32) for i, text in enumerate(texts)]
    changes = {
        "scale": {"blk.0.ffn_out": At(0, rows=[1])},
        "add": {"blk.0.mid": own, "blk.1.mid": At(lambda x: x * 0.1, tokens=[-1])},
    }
    cells = [{}, {"scale": {"blk.1.out": 0.5}}, {"add": {"blk.1.out": At(1.0, rows=[0])}}]
    with model.trace("blk.0.out", **changes) as t:
        sweep = model.sweep(lambda t: t["logits"][-1, :9], texts, "blk.1.out")
    found = list(sweep(cells))
    assert not t.names
    for cell, rows in zip(cells, found, strict=True):
        with model.trace(**changes), model.trace(**cell):
            wanted = model.logits(texts)
        for a, b in zip(rows, wanted, strict=True):
            np.testing.assert_allclose(a, b[-1, :9], rtol=0, atol=2e-5)


def test_a_sweep_is_computed_on_the_model_s_device(model):
    device = SeparateCPU()
    elsewhere = pyggml.load(model.file.path, compute="f32", backends=[device])
    cells = [{"scale": {"blk.0.out": At(0, tokens=[i])}} for i in range(3)]
    here, there = (
        list(m.sweep(difference, IDS, "blk.0.out", n_cells=2)(cells)) for m in (model, elsewhere)
    )
    assert device.launches
    np.testing.assert_allclose(there, here, rtol=0, atol=1e-5)


CELLS = [
    ([3], ConfigError, "a cell is 3, wanted such as {'scale': {name: 0}}"),
    ([{"replac": {}}], ConfigError, "a cell has 'replac': did you mean 'replace'"),
    ([{"scale": {"blk.0.out": lambda x: x}}], ConfigError, "a cell changes it by a function"),
    (
        [{"scale": {"blk.1.mid": 0}}],
        ConfigError,
        "blk.1.mid, which the sweep does not open: it was",
    ),
    ([{"scale": {"*.out": At(0, layers=[7])}}], ConfigError, "names nothing in layer 7"),
    ([{"scale": {"blk.0.out": At(0, tokens=[12])}}], ShapeError, "no token 12 in a text of 12"),
    ([{"scale": {"blk.0.out": At(0, rows=[1])}}], ShapeError, "no row 1 in a batch of 1"),
    ([{"scale": {"blk.0.out": At(0, heads=[1])}}], ShapeError, "blk.0.out has no heads"),
    ([{"add": {"blk.0.out": np.ones(3)}}], ShapeError, r"shape \(3,\) do not broadcast to it"),
    ([{}, {"scale": {"blk.0.out": 3e38}}], NotFiniteError, "cell 1 of the sweep gives NaN or inf"),
]


@pytest.mark.parametrize(("cells", "error", "said"), CELLS)
def test_cells_that_do_not_fit_are_named(model, cells, error, said):
    with pytest.raises(error, match=said):
        list(model.sweep(difference, IDS, "blk.*.out")(cells))


SWEEPS = [
    (lambda m: m.sweep(difference, IDS), ConfigError, "sweep takes names of what cells change"),
    (lambda m: m.sweep(difference, IDS, "blk.0.outt"), ConfigError, "did you mean 'blk.0.out'"),
    (lambda m: m.sweep(difference, [], "*.out"), DataError, "empty, wanted at least one token"),
    (lambda m: m.sweep(3, IDS, "*.out"), ConfigError, "the metric is 3, wanted a function"),
    (lambda m: m.sweep(difference, IDS, "*.out", n_cells=0), ConfigError, "n_cells is 0, wanted 1"),
]


@pytest.mark.parametrize(("make", "error", "said"), SWEEPS)
def test_sweeps_that_cannot_be_are_named(model, make, error, said):
    with pytest.raises(error, match=said):
        make(model)


def test_a_model_that_rounds_says_so(golden_file):
    model = pyggml.load(golden_file("llama-F16.gguf"), compute="int8")
    with pytest.warns(RuntimeWarning, match="products round to int8, .* changing blk.*.out: "):
        model.sweep(difference, IDS, "blk.*.out")
