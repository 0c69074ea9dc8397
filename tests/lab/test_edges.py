"""Edge attribution: sums that hold for it, edges by finite differences, circuits by hand."""

from dataclasses import replace

import numpy as np
import pytest

from pyggml import lab, lens
from pyggml.errors import ConfigError
from pyggml.lab.circuit import Circuit
from pyggml.lab.linear import exact


@pytest.fixture(scope="module")
def edges(qwen3, clean, corrupt, difference):
    """Of a model with an adapter: two blocks, four heads of which two share keys and values."""
    return lab.edge_attribution(qwen3, clean, corrupt, difference)


@pytest.mark.quick
def test_what_a_part_reads_is_the_sum_of_what_was_added(qwen3, edges, clean, corrupt, difference):
    """Scores of edges into the logits sum to attribution patching of the last stream, and those of
    edges out of the embedding to that of the embedding."""
    assert edges.scores.shape == (1 + 2 * 5, 2 * (4 + 2 + 2 + 1) + 1)
    whole = lens.attribution_patching(
        exact(qwen3), clean, corrupt, difference, "token_embd", "blk.1.out"
    )
    logits = edges.scores[:, edges.receivers.index("logits")]
    assert logits.sum() == pytest.approx(whole["blk.1.out"].sum(), abs=1e-5)
    assert edges.scores[0].sum() == pytest.approx(whole["token_embd"].sum(), abs=1e-5)
    assert np.isnan(edges.scores[edges.senders.index("blk.0.attn_head.1")]).sum() == 8
    assert np.isnan(edges.scores[edges.senders.index("blk.1.ffn_out")]).sum() == 18


def test_an_edge_is_what_its_receiver_alone_makes_of_it(qwen3, edges, clean, corrupt, difference):
    """A thousandth of what a head changes, added where the feed-forward part reads, and taken off
    behind it."""
    model = exact(qwen3)
    runs = []
    for ids in (clean, corrupt):
        with model.trace("blk.0.attn_head.2", "blk.0.attn_out") as t:
            model.logits(ids)
        runs.append(t["blk.0.attn_head.2"])
    column = lab.linear.matrix_columns(model, "blk.0.attn_output", 2 * 64, 64)
    step = 1e-2 * (runs[1] - runs[0]) @ column
    ends = []
    for sign in (1, -1):
        with model.trace(add={"blk.1.mid": sign * step, "blk.1.out": -sign * step}):
            ends.append(model.logits(clean)[-1])
    slope = (ends[0] - ends[1]) / 2e-2
    score = edges.scores[
        edges.senders.index("blk.0.attn_head.2"), edges.receivers.index("blk.1.ffn")
    ]
    assert score == pytest.approx(slope[7] - slope[5], abs=1e-4)


def test_with_steps_the_embedding_s_edges_sum_to_the_whole_change(
    llama, clean, corrupt, difference
):
    model, told = exact(llama), []
    found = lab.edge_attribution(
        llama, clean, corrupt, difference, n_steps=24, progress=lambda *at: told.append(at)
    )
    ends = [model.logits(ids)[-1] for ids in (clean, corrupt)]
    change = (ends[1] - ends[0])[7] - (ends[1] - ends[0])[5]
    assert found.scores[0].sum() == pytest.approx(change, abs=0.01)
    one = lab.edge_attribution(llama, clean, corrupt, difference)
    assert abs(one.scores[0].sum() - change) > 0.05, "one step is the first order alone"
    assert told == [(i + 1, 24) for i in range(24)]


def test_edges_in_a_trace_are_those_of_the_changed_model(llama, clean, corrupt, difference):
    with llama.trace(scale={"blk.1.ffn_out": 0.0, "blk.1.v": 0.0}):
        found = lab.edge_attribution(llama, clean, corrupt, difference)
    dead = [i for i, name in enumerate(found.receivers) if name.startswith("blk.1.")]
    np.testing.assert_array_equal(np.nan_to_num(found.scores[:, dead]), 0)
    assert np.abs(found.scores[0, 0]) > 0


def test_a_circuit_is_as_faithful_as_its_parts(qwen3, edges, clean, corrupt, difference):
    """All parts are the clean text, none the corrupt one; without one head it is its resampling."""

    def faithfulness(circuit):
        return lab.circuit_faithfulness(qwen3, circuit, clean, corrupt, difference)

    assert faithfulness(edges) == pytest.approx(1, abs=1e-5)
    assert faithfulness(edges.prune(n_edges=0)) == pytest.approx(0, abs=1e-5)
    scores = edges.scores.copy()
    scores[edges.senders.index("blk.1.attn_head.2")] = np.nan
    without = replace(edges, scores=scores)
    assert "blk.1.attn_head.2" not in without.parts and len(without.parts) == 10
    table = lab.head_ablation(qwen3, clean, difference, "resample", [corrupt])
    there = lab.head_ablation(qwen3, corrupt, difference).base
    expected = (table.values[1, 2] - there) / (table.base - there)
    assert faithfulness(without) == pytest.approx(expected, abs=1e-4) and expected != 1
    with pytest.raises(ConfigError, match="the circuit is of another model: this one has no x"):
        faithfulness(Circuit(["x"], ["logits"], np.ones((1, 1)), [[]]))


def by_hand():
    """The embedding a, heads b and c, whose keys are shared, and the logits."""
    scores = np.array(
        [[4.0, np.nan, -3.0, 0.1], [np.nan, 2.0, np.nan, 0.5], [np.nan, np.nan, np.nan, 5.0]]
    )
    names = ["token_embd", "blk.0.attn_head.0", "blk.1.ffn_out"]
    return Circuit(
        names, ["blk.0.q[0]", "blk.1.ffn", "blk.0.v[0]", "logits"], scores, [[1], [2], [1], []]
    )


def test_a_pruned_circuit_leads_from_the_embedding_to_the_logits():
    whole = by_hand()
    assert whole.n_edges == 6
    kept = whole.prune(1.0)
    assert [edge[2] for edge in kept.top(9)] == [5.0, 4.0, -3.0, 2.0]
    assert whole.prune(2.5).n_edges == 0, "without 2.0 nothing leads to what the logits hear"
    assert [edge[:2] for edge in whole.prune(n_edges=5).top(9)][-1] == (
        "blk.0.attn_head.0",
        "logits",
    )
    assert whole.prune().n_edges == 6 and whole.prune(n_edges=0).n_edges == 0
    with pytest.raises(ConfigError, match="0 or more, not -1 and None"):
        whole.prune(-1)


def test_circuits_are_told_and_drawn(edges):
    pruned = by_hand().prune(1.0)
    assert str(pruned).splitlines()[:2] == [
        "4 edges, the largest first",
        "  +5.0000  blk.1.ffn_out → logits",
    ]
    svg = pruned.draw()
    assert svg.count('class="edge"') == 3 and svg.count('class="edge negative"') == 1
    assert "blk.0.attn_head.0 → blk.1.ffn: +2" in svg and "stroke-dasharray" in svg
    assert str(edges).endswith(f"and {edges.n_edges - 20:,} more")
    assert edges.draw().startswith("<svg") and edges._repr_html_() == edges.draw()
    many = Circuit(["<x>"] * 30, ["y"] * 30, np.ones((30, 30)), [[]] * 30)
    with pytest.raises(ConfigError, match="900 edges, at most 400 can be seen: prune"):
        many.draw()
    assert many._repr_html_().startswith("<pre>900 edges") and "&lt;x&gt; → y" in many._repr_html_()


def test_what_does_not_fit_is_refused(llama, opened, clean, corrupt, difference):
    with pytest.raises(ConfigError, match="n_steps is 0, wanted 1 or more"):
        lab.edge_attribution(llama, clean, corrupt, difference, n_steps=0)
    with pytest.raises(ConfigError, match="block 0 of lfm2 has no attention heads"):
        lab.edge_attribution(opened("lfm2-Q4_K_M"), clean, corrupt, difference)
    with pytest.raises(ConfigError, match="mamba has no attention heads"):
        lab.edge_attribution(opened("mamba-Q4_K_M"), clean, corrupt, difference)
    with pytest.raises(ConfigError, match="block 0 of gemma2 has a norm behind its branches"):
        lab.edge_attribution(opened("gemma2-F16"), clean, corrupt, difference)


def test_an_edge_of_score_0_is_one():
    """It comes last, and before none that is there not."""
    scores = np.array([[np.nan, 0.0, 2.0]])
    circuit = Circuit(["token_embd"], ["a", "b", "logits"], scores, [[], [], []])
    found = [("token_embd", "logits", 2.0), ("token_embd", "b", 0.0)]
    assert circuit.top() == found and "nan" not in str(circuit)
