"""Several texts of unlike length, which share passes: each is answered as it is alone."""

import numpy as np
import pytest

from pyggml import At, lab
from pyggml.errors import ConfigError, DataError
from pyggml.lab.linear import exact


@pytest.fixture(params=["llama", "qwen3"])
def model(request):
    """One without an adapter, one with."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def cleans(clean):
    return [clean, np.arange(40, 46)]


@pytest.fixture(scope="module")
def corrupts(corrupt):
    return [corrupt, np.array([40, 41, 90, 43, 91, 45])]


@pytest.fixture(scope="module")
def metrics(difference):
    return [difference, lambda t: t["logits"][-2, 11]]


def expect_alike(found, alone):
    """Of Effects."""
    assert isinstance(found, list) and len(found) == len(alone)
    for a, b in zip(found, alone, strict=True):
        assert [*a.axes] == [*b.axes] and [*map(list, a.axes.values())] == [
            *map(list, b.axes.values())
        ]
        np.testing.assert_allclose(a.values, b.values, rtol=0, atol=1e-5)
        np.testing.assert_allclose([a.base, a.target], [b.base, b.target], rtol=0, atol=1e-5)


def test_attribution_of_several(model, cleans):
    found = lab.direct_attribution(model, cleans, [7, 3], 5, at=[-1, 2])
    alone = [
        lab.direct_attribution(model, ids, token, 5, at)
        for ids, token, at in zip(cleans, [7, 3], [-1, 2], strict=True)
    ]
    assert isinstance(found, list) and len(found) == 2
    for a, b in zip(found, alone, strict=True):
        np.testing.assert_allclose(a.heads, b.heads, rtol=0, atol=1e-5)
        assert a.logit == pytest.approx(b.logit, abs=1e-5) and a.rest.keys() == b.rest.keys()
        np.testing.assert_allclose([*a.rest.values()], [*b.rest.values()], rtol=0, atol=1e-5)
        for i, neurons in a.neurons.items():
            np.testing.assert_allclose(neurons, b.neurons[i], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("what", "by", "tokens"),
    [
        ("out", ("layer", "token"), None),
        ("attn_pattern", ("token", "head"), [-1, 2]),
        ("v", ("layer", "token"), [[3, 9, 4], [4]]),
    ],
)
def test_patching_of_several(model, cleans, corrupts, metrics, what, by, tokens):
    found = lab.activation_patching(model, cleans, corrupts, metrics, what, by, tokens=tokens)
    own = tokens if tokens and isinstance(tokens[0], list) else [tokens] * 2
    alone = [
        lab.activation_patching(model, *pair, what, by, tokens=some)
        for *pair, some in zip(cleans, corrupts, metrics, own, strict=True)
    ]
    expect_alike(found, alone)
    assert found[0].values.shape != found[1].values.shape or tokens == [-1, 2]


def test_ablation_of_several(model, cleans, corrupts, difference, metrics):
    cases = (
        ("zero", (), [(), ()]),
        ("mean", (), [(), ()]),
        ("mean", corrupts, [corrupts, corrupts]),
        ("resample", [corrupts[:1], [corrupts[1], cleans[1]]], None),
    )
    for kind, reference, own in cases:
        found = lab.head_ablation(model, cleans, metrics, kind, reference)
        alone = [
            lab.head_ablation(model, ids, metric, kind, some)
            for ids, metric, some in zip(cleans, metrics, own or reference, strict=True)
        ]
        expect_alike(found, alone)
    one = lab.head_ablation(model, cleans, difference)
    assert one[0].base == pytest.approx(found[0].base, abs=1e-5) and one[1].base != found[1].base


@pytest.mark.parametrize("receiver", ["blk.1.v", "output_norm"])
def test_paths_of_several(model, cleans, corrupts, metrics, receiver):
    heads = [1] if receiver == "blk.1.v" else None
    with model.trace(scale={"blk.0.ffn_out": 0.5}):
        found = lab.path_patching(model, cleans, corrupts, metrics, receiver, heads)
        alone = [
            lab.path_patching(model, *pair, receiver, heads)
            for pair in zip(cleans, corrupts, metrics, strict=True)
        ]
    expect_alike(found, alone)
    assert all(np.abs(each.changes).max() > 1e-3 for each in found)


def test_edges_and_circuits_of_several(model, cleans, corrupts, metrics):
    """With circuits of each pair, and one for all."""
    found = lab.edge_attribution(model, cleans, corrupts, metrics, n_steps=2)
    pairs = [*zip(cleans, corrupts, metrics, strict=True)]
    alone = [lab.edge_attribution(model, *pair, n_steps=2) for pair in pairs]
    assert isinstance(found, list) and len(found) == 2
    for a, b in zip(found, alone, strict=True):
        assert a.senders == b.senders and a.receivers == b.receivers
        np.testing.assert_allclose(a.scores, b.scores, rtol=0, atol=1e-5)
    assert np.nanmax(np.abs(found[0].scores - found[1].scores)) > 1e-2
    pruned = [circuit.prune(n_edges=12) for circuit in found]
    for circuits in (pruned, pruned[0]):
        kept = lab.circuit_faithfulness(model, circuits, cleans, corrupts, metrics)
        own = circuits if isinstance(circuits, list) else [circuits] * 2
        each = [
            lab.circuit_faithfulness(model, circuit, *pair)
            for circuit, pair in zip(own, pairs, strict=True)
        ]
        # Shares of what a metric changes by: its rounding, divided by that. 1.5e-5 on a Xeon.
        np.testing.assert_allclose(kept, each, rtol=0, atol=3e-5)


def test_a_cell_may_be_of_each_text(llama, cleans):
    """A list of cells changes each text by its own."""
    model, name = exact(llama), "blk.0.out"
    sweep = model.sweep(lambda t: t["logits"][-1], cleans, name)
    cells = [
        [{"scale": {name: At(0.0, tokens=[9])}}, {"scale": {name: At(0.5, tokens=[-2])}}],
        [{}, {"add": {name: 1.0}}],
        {"scale": {name: 0.5}},
    ]
    for cell, found in zip(cells, sweep(cells), strict=True):
        own = cell if isinstance(cell, list) else [cell] * 2
        for changes, ids, y in zip(own, cleans, found, strict=True):
            with model.trace(**changes):
                np.testing.assert_allclose(y, model.logits(ids)[-1], rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="a cell is a list of 1, wanted one for each of 2 texts"):
        [*sweep([[{}]])]
    with pytest.raises(ConfigError, match="blk.0.out: the cell is of one text, and has no rows"):
        [*sweep([[{"scale": {name: At(0.0, rows=[1])}}, {}]])]


def test_what_does_not_fit_is_refused(llama, cleans, corrupts, difference):
    def patch(clean, corrupt, **more):
        return lab.activation_patching(llama, clean, corrupt, difference, **more)

    with pytest.raises(DataError, match="clean is 2 and corrupt 1, wanted two texts, or two lists"):
        patch(cleans, corrupts[:1])
    with pytest.raises(DataError, match="clean is 2 and corrupt one, wanted two texts, or two"):
        lab.edge_attribution(llama, cleans, corrupts[0], difference)
    with pytest.raises(DataError, match="clean is empty, wanted a text or a list of texts"):
        patch([], [])
    with pytest.raises(DataError, match=r"clean\[1\] has 6 tokens and corrupt\[1\] 5, wanted as"):
        lab.path_patching(llama, cleans, [corrupts[0], corrupts[1][:5]], difference, "output_norm")
    with pytest.raises(DataError, match="tokens has 1 lists, wanted one for each of 2 pairs"):
        patch(cleans, corrupts, tokens=[[1]])
    with pytest.raises(DataError, match="there is no token 7 among 6"):
        patch(cleans, corrupts, tokens=[7])
    with pytest.raises(ConfigError, match="there are 3 metrics, wanted one, or one for each of 2"):
        lab.head_ablation(llama, cleans, [difference] * 3)
    with pytest.raises(DataError, match="ids is empty, wanted a text or a list of texts"):
        lab.head_ablation(llama, [], difference)
    with pytest.raises(DataError, match="reference has 1 lists, wanted one for each of 2 texts"):
        lab.head_ablation(llama, cleans, difference, "mean", [corrupts])
    with pytest.raises(DataError, match="token has 1 numbers, wanted one, or one for each of 2"):
        lab.direct_attribution(llama, cleans, [7])
    with pytest.raises(DataError, match="there is no position 9 in a text of 6 tokens"):
        lab.direct_attribution(llama, cleans, 7, at=9)
    circuit = lab.edge_attribution(llama, cleans[0], corrupts[0], difference)
    with pytest.raises(DataError, match="1 circuits, wanted one, or one for each of 2"):
        lab.circuit_faithfulness(llama, [circuit], cleans, corrupts, difference)
