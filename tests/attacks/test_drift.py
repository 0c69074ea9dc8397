"""Long training on every path: a short round, and what counts as drift."""

import pytest

from attacks import drift


@pytest.mark.filterwarnings("ignore")
def test_a_short_round(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "_N_HELD_OUT", 8)
    drift.corpus.cache_clear()
    results = tmp_path / "drift.jsonl"
    for _ in range(2):  # the second one has nothing to do
        drift.run_all(["llama"], 30, results)
        made = drift.read_results(results)
        assert len(results.read_text().splitlines()) == len(drift.COMPUTES)
    assert drift.faults(made["llama"]) == []
    assert made["llama"]["int8"]["after"] != made["llama"]["f32"]["after"], "one path for all"
    drift.corpus.cache_clear()


def runs(f32, int8):
    return {"f32": {"before": 4.0, "after": f32}, "int8": {"before": 4.0, "after": int8}}


def test_what_counts_as_a_fault():
    assert drift.faults(runs(3.0, 3.005)) == []
    assert drift.faults(runs(3.0, 3.007)) == ["int8 ends +0.23 % from float32"]
    assert drift.faults(runs(3.0, 2.99)) == ["int8 ends -0.33 % from float32"]
    assert drift.faults(runs(3.99, 3.99)) == ["nothing is learned"]
    broken = {"f32": {"after": 3.0, "before": 4.0}, "bf16": {"fault": "PyggmlError: no"}}
    assert drift.faults(broken) == ["bf16: PyggmlError: no"]
