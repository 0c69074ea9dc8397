"""Long training on every path: a short round, and what counts as drift."""

import numpy as np
import pytest

from attacks import drift
from pyggml import gguf


@pytest.mark.filterwarnings("ignore")
def test_a_short_round(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "_N_HELD_OUT", 8)
    drift.corpus.cache_clear()
    results = tmp_path / "drift.jsonl"
    for _ in range(2):  # the second one has nothing to do
        drift.run_all(["llama"], 30, results)
        made = drift.read_results(results)
        assert len(results.read_text().splitlines()) == len(drift.COMPUTES)
    runs = made["llama"]
    assert drift.faults(runs) == []
    assert runs["int8", 0]["after"] != runs["f32", 0]["after"], "one path for all"
    drift.corpus.cache_clear()


def runs(f32, *int8):
    """Ends by float32, the same for each seed, and by bytes."""
    ends = [("f32", f32)] * len(int8), [("int8", x) for x in int8]
    return {(c, s): {"before": 4.0, "after": x} for of in ends for s, (c, x) in enumerate(of)}


def test_what_counts_as_a_fault():
    assert drift.faults(runs(3.0, 3.005)) == []
    assert drift.faults(runs(3.0, 3.007)) == ["int8 ends +0.23 % from float32"]
    assert drift.faults(runs(3.0, 2.99)) == ["int8 ends -0.33 % from float32"]
    assert drift.faults(runs(3.99, 3.99)) == ["nothing is learned"]
    assert drift.faults(runs(3.0, 3.009, 3.001)) == []
    both = drift.faults(runs(3.0, 3.009, 3.005))
    assert both == ["int8 ends +0.23 % from float32, the mean of 2 seeds"]
    ended = {("f32", 0): {"after": 3.0, "before": 4.0}}
    broken = ended | {("bf16", 0): {"fault": "PyggmlError: no"}}
    assert drift.faults(broken) == ["bf16, seed 0: PyggmlError: no"]


def test_one_that_ends_further_away_is_trained_by_other_seeds(tmp_path, monkeypatch):
    """The first one drifts at seed 0 alone, the second one never."""

    def train(path, compute, n_steps, seed):
        drifts = compute == "int8" and seed == 0 and "first" in path.read_text()
        return {"before": 4.0, "after": 3.0 + 0.01 * drifts, "ms": 1.0}

    def write_model(path, name):
        path.write_text(name)
        return path

    monkeypatch.setattr(drift, "train", train)
    monkeypatch.setattr(drift, "write_model", write_model)
    results = tmp_path / "drift.jsonl"
    drift.run_all(["first", "second"], 1, results, 3)
    made = drift.read_results(results)
    assert {seed for _, seed in made["first"]} == {0, 1, 2} and len(made["first"]) == 9
    assert {seed for _, seed in made["second"]} == {0} and drift.faults(made["first"]) == []


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_scores_are_as_large_whatever_divides_them(name, tmp_path):
    """Where the root of a head's size does not divide scores, queries are shorter by as much."""
    path = drift.write_model(tmp_path / "model.gguf", name)
    with gguf.open(path) as file:
        weights = file.data("blk.0.attn_q_norm.weight")
    long = 1 if name == "qwen3" else weights.size**-0.5
    assert np.mean(weights) == pytest.approx(long, rel=0.1)
