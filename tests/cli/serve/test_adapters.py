"""Adapters that are loaded and dropped while the server runs."""

import shutil

import pytest
from tiny_models import TOKENS, VOCABULARY, write_llama

import pyggml
from pyggml.lora import LoraConfig, attach

GREEDY = {"temperature": 0, "max_tokens": 12}


def vector_of(server, name):
    answer = server.http.post("/v1/embeddings", json={"input": "the", "model": name})
    return answer.json()["data"][0]["embedding"]


@pytest.fixture
def loading(serve, adapters):
    with serve(folder=adapters["red"].parent) as server:
        yield server


def test_an_adapter_is_loaded_used_and_dropped(loading):
    http = loading.http
    assert http.get("/v1/adapters").json() == {
        "object": "list",
        "data": [],
        "files": ["blue.gguf", "red.gguf"],
    }
    made = http.post("/v1/adapters", json={"name": "new", "file": "red.gguf"})
    about = {"id": "new", "object": "adapter", "file": "red.gguf", "model": "tiny"}
    assert made.json() == about
    half = {"name": "half", "file": "red.gguf", "weight": 0.5}
    assert http.post("/v1/adapters", json=half).status_code == 200
    texts = {n: loading.said(model=n, **GREEDY) for n in ("red", "new", "half", "tiny")}
    assert texts["red"] == texts["new"] != texts["tiny"]
    assert loading.chat(model="new", max_tokens=2).status_code == 200
    assert "new" in [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert http.delete("/v1/adapters/new").json()["deleted"]
    answer = loading.text(model="new", max_tokens=1)
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert [each["id"] for each in http.get("/v1/adapters").json()["data"]] == ["half"]


@pytest.mark.filterwarnings("ignore:.*was trained on another model")  # in the server's log
def test_an_adapter_of_another_model_is_answered_with_a_warning(loading, adapters, tmp_path):
    other = write_llama(tmp_path / "other.gguf", len(TOKENS), n_layer=2, seed=6, keys=VOCABULARY)
    path = adapters["red"].parent / "strange.gguf"
    attach(pyggml.load(other), LoraConfig(rank=2)).save(path)
    body = {"name": "new", "file": "strange.gguf"}
    told = loading.http.post("/v1/adapters", json=body).json()
    path.unlink()
    (said,) = told["warnings"]
    assert said.startswith("strange.gguf was trained on another model")


def test_a_name_that_is_given_anew_is_the_new_adapter_s(loading):
    http = loading.http
    for file in ("red", "blue"):
        body = {"name": "new", "file": f"{file}.gguf"}
        assert http.post("/v1/adapters", json=body).status_code == 200
        assert vector_of(loading, "new") == vector_of(loading, file) != vector_of(loading, "tiny")
        assert loading.said(model="new", **GREEDY) == loading.said(model=file, **GREEDY)
        http.delete("/v1/adapters/new")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"name": "red", "file": "red.gguf"}, 409),
        ({"name": "", "file": "red.gguf"}, 409),
        ({"name": "x", "file": "../red.gguf"}, 400),
        ({"name": "x", "file": "/etc/passwd"}, 400),
        ({"name": "x", "file": "none.gguf"}, 400),
        ({"name": "x", "file": "n" * 5000}, 400),
        ({"name": "x", "file": "a\0.gguf"}, 400),
        ({"name": "x", "file": "red.gguf", "weight": 1e9}, 400),
        ({"name": "x", "file": "red.gguf", "path": "a"}, 400),
        ({"name": "x", "file": "none_of_this_model.bin"}, 400),
    ],
)
def test_what_may_not_be_loaded(loading, adapters, chatty, body, status):
    shutil.copy(chatty, adapters["red"].parent / "none_of_this_model.bin")
    answer = loading.http.post("/v1/adapters", json=body)
    assert answer.status_code == status, answer.text
    assert [*loading.service.voices] == ["tiny", "red", "blue"]
    assert loading.http.delete("/v1/adapters/red").status_code == 404


def test_without_permission_nothing_is_loaded(server):
    body = {"name": "x", "file": "red.gguf"}
    assert server.http.post("/v1/adapters", json=body).status_code == 403
    assert server.http.get("/v1/adapters").status_code == 403
    assert server.http.delete("/v1/adapters/red").status_code == 403
