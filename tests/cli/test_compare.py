"""`pyggml compare`: its numbers are the library's, of an adapter and of another type."""

import json

import numpy as np
import pytest

import pyggml as library
from pyggml import lab
from pyggml.lora import LoraConfig, attach


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory):
    made = attach(library.load(tiny), LoraConfig(rank=2, alpha=3.0))
    p = made.parameters.data
    p[:] = np.random.default_rng(0).normal(0, 0.2, p.size)
    path = tmp_path_factory.mktemp("adapter") / "a.gguf"
    made.save(path)
    return path


@pytest.mark.quick
def test_an_adapter_of_half_weight(pyggml, tiny, adapter, text):
    given = ("compare", tiny, f"{adapter}:0.5", "-f", text, "--ctx", 16)
    ended = pyggml(*given, "--json")
    assert ended.code == 0 and "its first 16 tokens are read" in ended.err, ended.err
    found, model = json.loads(ended.out), library.load(tiny, (adapter, 0.5))
    sizes = lab.update_sizes(model)
    assert [w["name"] for w in found["weights"]] == [s.name for s in sizes]
    assert [w["ratio"] for w in found["weights"]] == pytest.approx([s.ratio for s in sizes])
    ids = model.tokenizer.encode_prompt(text.read_text())[:16]
    run = lab.compare_runs(model.with_adapters(), model, ids)
    assert found["run"]["kl"] == pytest.approx(run.kl.tolist(), abs=1e-9)
    assert len(found["heads"]["results"]) == 2
    shown = pyggml(*given).out
    for word in ("‖ΔW‖ / ‖W‖", "effective rank", "KL ", "heads: what they give"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_another_type(pyggml, tiny, text, tmp_path):
    other = tmp_path / "q8.gguf"
    assert pyggml("quantize", tiny, other, "Q8_0").code == 0
    ended = pyggml("compare", tiny, other)
    assert ended.code == 0 and "‖W − W′‖ / ‖W‖" in ended.out and "tensors are the same" in ended.out
    found = json.loads(pyggml("compare", tiny, other, "--json").out)["weights"]
    errors = lab.weight_errors(library.load(tiny), library.load(other))
    assert [w["error"] for w in found] == [e.error for e in errors]
    alike = pyggml("compare", tiny, tiny)
    assert alike.code == 0 and f"{len(errors)} of {len(errors)} tensors are the same" in alike.out


def test_bad_input_is_one_sentence(pyggml, tiny, adapter, text, tmp_path):
    (tmp_path / "short.txt").write_text("")
    other = tmp_path / "short.txt"
    for given, said in (
        ((adapter, adapter), "general.architecture|adapter"),
        ((tiny, f"{tiny}:0.5"), "is no adapter, wanted no weight"),
        ((tiny, adapter, "--ctx", 16), "--ctx: for a text, wanted -f FILE beside it"),
        ((tiny, adapter, "-f", other), "wanted 2 at least"),
        ((tiny, text), "GGUF"),
        ((tiny, adapter, "-f", tiny), "not UTF-8"),
    ):
        ended = pyggml("compare", *given)
        assert ended.code == 2 and ended.err.count("\n") == 1, ended.err
        assert any(part in ended.err for part in said.split("|")), ended.err
