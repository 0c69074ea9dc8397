"""The models of a folder: each is opened when it is asked for, and they take turns."""

import shutil

import pytest
from starlette.testclient import TestClient

from pyggml.cli.commands.serve import startup

GREEDY = {"temperature": 0, "max_tokens": 6, "prompt": "the "}


@pytest.fixture(scope="module")
def folder(model_with, chatty, adapters, tmp_path_factory):
    """Two models of unlike contexts, an adapter of the first and a file that is none."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(chatty, folder / "one.gguf")
    shutil.copy(model_with(llama__context_length=64), folder / "two.gguf")
    shutil.copy(adapters["red"], folder / "red.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    return folder


@pytest.fixture
def served(folder, pyggml, monkeypatch):
    """The application of `pyggml serve --models FOLDER`, what it printed, with so much memory."""
    apps = []

    def start(n_free, *more):
        monkeypatch.setattr(startup, "serve", lambda app, *rest: apps.append(app))
        monkeypatch.setattr(startup, "free_memory", lambda: n_free)
        ended = pyggml("serve", "--models", folder, *more, "--port", 0, "--parallel", 2)
        assert ended.code == startup.STOPPED, ended.err
        return TestClient(apps[-1], base_url="http://127.0.0.1"), ended.out

    return start


def text(http, **fields):
    answer = http.post("/v1/completions", json=GREEDY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def states(http):
    return {m["id"]: m["status"]["value"] for m in http.get("/v1/models").json()["data"]}


@pytest.mark.parametrize("n_free", [0, 1 << 40])
def test_the_request_s_model_chooses(served, folder, n_free, capsys):
    client, out = served(n_free, "--adapters", folder)
    assert "skipped    broken.gguf: " in out and "skipped    red.gguf: " in out
    with client as http:
        assert states(http) == dict.fromkeys(("one", "two"), "unloaded")
        first = text(http, model="one")
        assert http.get("/slots").json()[0]["n_ctx"] == 512
        about = {"name": "red", "file": "red.gguf", "model": "one"}
        assert http.post("/v1/adapters", json=about).json()["model"] == "one"
        red = text(http, model="red")
        assert red != first
        second = text(http, model="two")
        assert http.get("/slots").json()[0]["n_ctx"] == 64
        stays = "loaded" if n_free else "unloaded"
        assert states(http) == {"one": stays, "two": "loaded", "red": stays}
        assert [text(http, model=m) for m in ("one", "red", "two")] == [first, red, second]
        assert http.get("/props?model=two").json()["default_generation_settings"]["n_ctx"] == 64
        unknown = http.post("/v1/completions", json=GREEDY | {"model": "three"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"
        assert (
            http.post("/v1/adapters", json=about | {"name": "x", "model": "red"}).status_code == 400
        )
    assert ("closed     one, red\n" in capsys.readouterr().out) == (not n_free)


def test_a_file_that_is_gone_when_it_is_asked_for(served, folder):
    extra = folder / "extra.gguf"
    shutil.copy(folder / "two.gguf", extra)
    try:
        client, _ = served(1 << 40)
    finally:
        extra.unlink()
    with client as http:
        answer = http.post("/v1/completions", json=GREEDY | {"model": "extra"})
        assert answer.status_code == 503 and "cannot be opened" in answer.text
        assert text(http, model="two")


def test_a_model_of_its_own_beside_the_folder(served, folder, adapters):
    client, out = served(1 << 40, "-m", folder / "one.gguf", "--lora", f"red={adapters['red']}")
    assert "models     of" in out and out.count("one") >= 1
    with client as http:
        assert [*states(http)] == ["one", "red", "two"]
        assert text(http) == text(http, model="one") != text(http, model="red")


def test_what_wants_a_model_of_its_own(folder, pyggml, adapters, tmp_path):
    for words, said in [
        ((), "no model is given, wanted -m FILE or --models FOLDER"),
        (("--models", tmp_path), "has no model that can be served"),
        (("--models", folder / "one.gguf"), "wanted a folder"),
        (("--models", folder, "--lora", adapters["red"]), "wanted -m FILE beside it"),
    ]:
        ended = pyggml("serve", *words, "--port", 0)
        assert ended.code == 2 and said in ended.err.replace("\n", " "), ended.err
