"""Texts: the losses and attention of a model are those of the library, within bounds, and stop."""

import threading
from base64 import b64decode

import numpy as np
import pytest

import pyggml
from pyggml.cli.commands.view.source import Cancelled, StoppableModel
from pyggml.look import lens
from pyggml.look.draw import tokens
from pyggml.lora import LoraConfig, attach

TEXT = "the other <b>path</b>\n"


@pytest.fixture(scope="module")
def model(tiny):
    return pyggml.load(tiny)


def table_of(model):
    ids = model.tokenizer.encode(TEXT, parse_special=True)
    return lens.token_table(model, ids), [model.tokenizer.token_bytes(i, True) for i in ids]


def test_losses_are_the_library_s(client, model):
    found = client.post("/api/losses", json={"text": TEXT}).json()
    table, pieces = table_of(model)
    assert found["n_tokens"] == len(table.ids)
    assert found["loss"] == pytest.approx(table.loss)
    assert found["html"] == tokens.fragment(table, pieces)
    assert len(found["about"]) == len(table.ids) and f"{table.losses[3]:.3f}" in found["about"][3]
    assert "<b>" not in found["html"]


def test_losses_with_the_adapter_of_a_run(client, add_run, model, folder, rng):
    adapter = attach(model, LoraConfig(rank=2, alpha=5.0))
    data = adapter.parameters.data
    data[:] = rng.normal(0, 0.4, len(data))
    adapter.save(folder / "mine.gguf")
    add_run("mine", [])
    found = client.post("/api/losses", json={"text": TEXT, "run": "mine"}).json()
    assert found["loss"] == pytest.approx(table_of(adapter.model)[0].loss)
    assert found["loss"] != pytest.approx(table_of(model)[0].loss, rel=1e-3)


def test_losses_of_a_whole_model_that_a_run_wrote(client, add_run, model_with, model, folder):
    other = model_with(
        general__name="other",
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__bos_token_id=np.uint32(3),
    )
    (folder / "mine.gguf").write_bytes(other.read_bytes())
    add_run("mine", [])
    found = client.post("/api/losses", json={"text": TEXT, "run": "mine"}).json()
    wanted = table_of(pyggml.load(other))[0]
    assert found["loss"] == pytest.approx(wanted.loss)
    assert found["n_tokens"] == len(wanted.ids) == len(table_of(model)[0].ids) + 1


def test_attention_is_the_library_s(client, model):
    found = client.post("/api/attention", json={"text": TEXT, "block": 1}).json()
    ids = model.tokenizer.encode(TEXT)
    (wanted,) = lens.attention_maps(model, ids, [1])
    assert len(found["tokens"]) == len(ids) and len(found["maps"]) == len(wanted)
    for head, rows in enumerate(found["maps"]):
        for i, row in enumerate(rows):
            np.testing.assert_allclose(row, wanted[head, i, : i + 1], atol=6e-5)


@pytest.mark.parametrize("path", ["losses", "attention"])
def test_of_a_long_text_the_first_tokens_are_read(client, path, monkeypatch):
    """As many as the model or a map has room for, and how many there are is told."""
    monkeypatch.setattr("pyggml.cli.commands.view.reading._MOST_MAPPED", 64)
    found = client.post(f"/api/{path}", json={"text": "a" * 65, "block": 0}).json()
    assert (found["n_tokens"], found["n_all"]) == (64, 65)
    found = client.post(f"/api/{path}", json={"text": "a" * 64, "block": 0}).json()
    assert (found["n_tokens"], found["n_all"]) == (64, 64)


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("losses", {}, "text is no string"),
        ("losses", {"text": ""}, "text is no string of 1 to 20000"),
        ("losses", {"text": "a" * 20001}, "text is no string of 1 to 20000"),
        ("losses", {"text": "a"}, "the text has 1 token, wanted at least 2"),
        ("losses", {"text": "the path", "run": "../x"}, "has no run"),
        ("losses", {"text": "the path", "run": "\0"}, "has no run"),
        ("attention", {"text": "the path"}, "block is missing"),
        ("attention", {"text": "the path", "block": True}, "block is missing"),
        ("attention", {"text": "the path", "block": -1}, "block is -1, wanted 0 to 1"),
        ("attention", {"text": "the path", "block": 2}, "block is 2, wanted 0 to 1"),
    ],
)
def test_faults_are_sentences(client, path, body, words):
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"]


def test_a_file_outside_the_folder_is_not_opened(client, folder, monkeypatch):
    opened = []
    monkeypatch.setattr("pyggml.cli.commands.view.runs._version", opened.append)
    (folder.parent / "x.gguf").write_bytes(b"GGUF")
    assert client.post("/api/losses", json={"text": "the path", "run": "../x"}).status_code == 404
    assert not opened


def test_a_body_is_bounded(client):
    answer = client.post("/api/losses", content=b'{"text": "' + b"a" * (1 << 17))
    assert answer.status_code == 413
    for content in (b"", b"[]", b"[" * 9999, b'{"text": 1e999}'):
        assert client.post("/api/losses", content=content).status_code == 400


def test_a_run_of_a_model_stops_before_the_next_kernel(model):
    stop, calls = threading.Event(), []
    watched = StoppableModel(model, stop)
    ids = model.tokenizer.encode(TEXT)
    np.testing.assert_array_equal(watched.logits(ids), model.logits(ids))

    class Third(threading.Event):
        def is_set(self):
            calls.append(1)
            return len(calls) == 3

    with pytest.raises(Cancelled):
        StoppableModel(model, Third()).logits(ids)
    assert len(calls) == 3
    stop.set()
    with pytest.raises(Cancelled):
        watched.logits(ids)


# -- activations ----------------------------------------------------------------------------------


def ids_of(model, text=TEXT):
    return model.tokenizer.encode(text)


def test_all_heads_are_the_library_s(client, model):
    found = client.post("/api/heads", json={"text": TEXT}).json()
    maps = lens.attention_maps(model, ids_of(model))
    assert [each["block"] for each in found["blocks"]] == [0, 1]
    for block, wanted in zip(found["blocks"], maps, strict=True):
        for points, head in zip(block["heads"], wanted, strict=True):
            roots = np.frombuffer(b64decode(points), np.uint8).reshape(head.shape)
            np.testing.assert_allclose((roots / 255) ** 2, head, atol=0.005)


def test_the_grid_of_heads_has_a_bound(client, monkeypatch):
    monkeypatch.setattr("pyggml.cli.commands.view.activations._MOST_POINTS", 8 * 100)
    found = client.post("/api/heads", json={"text": "a" * 40}).json()
    assert (found["n_tokens"], found["n_all"]) == (10, 40)


def test_the_logit_lens_names_what_the_library_finds(client, model):
    found = client.post("/api/lens", json={"text": TEXT}).json()
    logits = lens.logit_lens(model, ids_of(model)).astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for block, row in enumerate(found["rows"]):
        for at, cell in enumerate(row):
            best = np.sort(p[block, at])[::-1][:5]
            np.testing.assert_allclose([x for _, x in cell], best, rtol=1e-3)
            token = model.tokenizer.token_bytes(int(p[block, at].argmax()), special=True)
            assert cell[0][0] == tokens.signs(next(tokens.texts([token])))


def test_attribution_sums_to_the_logit(client, model):
    found = client.post("/api/attribution", json={"text": TEXT, "at": 6}).json()
    row = model.logits(ids_of(model)[:7])[-1]
    assert sum(value for _, value in found["parts"]) == pytest.approx(row.max(), rel=1e-4)
    g = model.grad(lambda t: t["logits"][-1, int(row.argmax())], ids_of(model)[:7], "token_embd")
    wanted = (g["token_embd"].astype(np.float64) * g.at["token_embd"]).sum(axis=-1)
    np.testing.assert_allclose(found["shares"], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("other", ["", "the ether <b>path</b>\n"])
def test_a_patch_moves_what_the_library_moves(client, model, other):
    body = {"text": TEXT, "name": "blk.0.out", "at": 4, "other": other}
    found = client.post("/api/patch", json=body).json()
    before = model.logits(ids_of(model))
    if other:
        after = lens.patch(model, ids_of(model), ids_of(model, other), "blk.0.out", tokens=[4])
    else:
        with model.trace(scale={"blk.0.out": 0.0}, tokens=[4]):
            after = model.logits(ids_of(model))
    best = {float(np.float32(x)): float(y) for x, y in zip(before[-1], after[-1], strict=True)}
    assert found["logits"]
    for _, was, now, p, q in found["logits"]:
        assert now == pytest.approx(best[was]) and 0 < p < 1 and 0 < q < 1
    assert not any(found["moved"][:4]) and found["moved"][4] > 0


def test_base_and_adapter_beside_each_other(client, add_run, model, folder, rng):
    adapter = attach(model, LoraConfig(rank=2, alpha=5.0))
    adapter.parameters.data[:] = rng.normal(0, 0.4, len(adapter.parameters.data))
    adapter.save(folder / "mine.gguf")
    add_run("mine", [])
    found = client.post("/api/compare", json={"text": TEXT, "run": "mine"}).json()
    for side, each in (("base", model), ("adapted", adapter.model)):
        wanted = lens.token_losses(each, ids_of(model))
        np.testing.assert_allclose(found[side]["losses"][1:], wanted, atol=1e-4)
        assert found[side]["loss"] == pytest.approx(wanted.mean(), rel=1e-5)
    assert found["base"]["best"] != found["adapted"]["best"]


@pytest.mark.parametrize(
    "path, body, words",
    [
        ("patch", {"text": TEXT}, "name is missing"),
        ("patch", {"text": TEXT, "name": "blk.9.out"}, "blk.9.out"),
        ("patch", {"text": TEXT, "name": "x" * 501}, "name is no string of at most 500"),
        ("patch", {"text": TEXT, "name": "blk.0.out", "at": 99}, "at is 99, wanted a position"),
        ("patch", {"text": TEXT, "name": "blk.0.out", "other": "a"}, "the other text has 1 token,"),
        ("patch", {"text": TEXT, "name": "blk.0.out", "other": 3}, "other is no string"),
        ("attribution", {"text": TEXT, "at": -1}, "at is -1"),
        ("lens", {"text": "a"}, "the text has 1 token"),
        ("heads", {}, "text is no string"),
        ("compare", {"text": TEXT, "run": "x"}, "has no run"),
    ],
)
def test_faults_of_activations_are_sentences(client, path, body, words):
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code in (400, 404) and words in answer.json()["error"]["message"]
