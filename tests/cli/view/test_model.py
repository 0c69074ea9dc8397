"""What the view tells of a file: its facts, its tensors and their numbers."""

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml
from pyggml import gguf
from pyggml.cli.commands.view import weights
from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.source import ViewedFile
from pyggml.graph.dtypes import F32, dtype
from pyggml.lora import LoraConfig, attach
from pyggml.quants import dequantize, quantize

NAME = "blk.1.attn_q.weight"


def test_a_file_at_a_glance(ask, tiny):
    found = ask("model")
    assert (found["name"], found["n_layer"], found["fault"]) == ("tiny", 2, "")
    with gguf.open(tiny) as file:
        wanted = [[t.name, "F32", list(t.shape), t.n_bytes] for t in file.tensors.values()]
        assert found["tensors"] == wanted
        keys = [*file.metadata]
    sections = {s["title"]: s for s in ask("glance", rank=4)["sections"]}
    assert [key for key, _ in sections["metadata"]["table"]["rows"]] == keys
    assert "llama, " in sections["architecture"]["rows"][0][1]
    assert sections["LoRA"]["table"]["columns"][3] == "rank 4" and "tensors" not in sections


def test_the_histogram_counts_the_numbers(ask, tiny):
    found = ask("tensor", name=NAME)
    with gguf.open(tiny) as file:
        w = np.array(file.data(NAME))
    assert (found["shape"], found["type"], found["bytes"]) == ([32, 32], "F32", w.nbytes)
    n = found["numbers"]
    assert n["sampled"] == n["finite"] == sum(n["counts"]) == w.size
    assert n["edges"] == [pytest.approx(w.min()), pytest.approx(w.max())]
    assert n["std"] == pytest.approx(w.std(), rel=1e-5) and n["zeros"] == 0


@pytest.mark.parametrize("name", ["F32", "Q4_K", "BF16"])
def test_a_sample_is_spread_evenly_over_a_large_tensor(rng, name, monkeypatch):
    monkeypatch.setattr(weights, "_SAMPLED", 2048)
    values = np.repeat(np.arange(1, 65, dtype=np.float32), 256).reshape(16, 1024)
    raw = quantize(values, name)
    raw = raw if name == "Q4_K" else raw.view(dtype(name).numpy)
    found = weights.sample(raw, dtype(name))
    assert found.size == 2048
    whole = dequantize(raw, name)
    assert (found[0], found[-1]) == (whole[0, 0], whole[-1, -1])
    assert found.mean() == pytest.approx(whole.mean(), rel=0.02)


def test_numbers_that_are_not_finite_are_counted():
    found = weights.numbers(np.array([1, np.nan, np.inf, 1], np.float32))
    assert (found["sampled"], found["finite"], found["mean"]) == (4, 2, 1.0)
    assert sum(found["counts"]) == 2
    assert weights.numbers(np.full(3, np.nan, np.float32)) == {"sampled": 3, "finite": 0}


def test_the_update_of_a_run_is_measured(ask, add_run, tiny, folder, rng):
    adapter = attach(pyggml.load(tiny), LoraConfig(rank=2, alpha=5.0))
    data = adapter.parameters.data
    data[:] = rng.normal(0, 0.4, len(data))
    add_run("mine", [])
    assert "update" not in ask("tensor", name=NAME, run="mine")
    adapter.save(folder / "mine.gguf")
    found = ask("tensor", name=NAME, run="mine")["update"]
    with gguf.open(folder / "mine.gguf") as file, gguf.open(tiny) as base:
        a, b = file.data(f"{NAME}.lora_a"), file.data(f"{NAME}.lora_b")
        change, weight = 5.0 / 2 * b @ a, base.data(NAME)
    assert found["change"] == pytest.approx(np.linalg.norm(change), rel=1e-5)
    assert found["weight"] == pytest.approx(np.linalg.norm(weight), rel=1e-5)
    assert found["a"]["norm"] == pytest.approx(np.linalg.norm(a), rel=1e-5)
    assert ask("tensor", name="output_norm.weight", run="mine")["update"] is None


def test_a_file_that_is_no_model_is_shown_as_a_file(tmp_path):
    path = tmp_path / "strange.gguf"
    values = np.ones((2, 4), np.float32)
    gguf.write(path, {"general.architecture": "unheard"}, [("x", F32, (2, 4), values)])
    with TestClient(make_app(ViewedFile(path), None), "http://localhost") as client:
        found = client.get("/api/model").json()
        assert "unheard" in found["fault"] and found["tensors"] == [["x", "F32", [2, 4], 32]]
        assert client.get("/api/glance").json()["sections"][0]["title"] == "file"
        assert client.get("/api/tensor?name=x").json()["numbers"]["mean"] == 1
        for path in ("graph", "plan"):
            answer = client.get(f"/api/{path}")
            assert answer.status_code == 409 and "unheard" in answer.json()["error"]["message"]


def test_it_tells_that_the_file_has_gone_or_changed(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny.read_bytes())
    source = ViewedFile(path)
    assert source.state() == "there"
    (tmp_path / "other.gguf").write_bytes(tiny.read_bytes())
    (tmp_path / "other.gguf").replace(path)
    assert source.state() == "changed"
    path.unlink()
    assert source.state() == "gone"
