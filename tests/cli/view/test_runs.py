"""Runs as they are written: half lines, other people's files, folders that are gone."""

import json
import os
import shutil

import pytest
from starlette.testclient import TestClient

import pyggml
from pyggml.cli.commands.view import reading, runs
from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import source_of_run
from pyggml.errors import ConfigError
from pyggml.lora import LoraConfig, attach
from pyggml.lora.trainer.lock import hold, is_held

HERE = "http://localhost"
RUN = {"event": "run", "step": 0, "settings": {"lr": 0.1}, "about": [["model", "tiny"]]}
ANSWERS = {"event": "answers", "step": 4, "prompt": "the", "answers": [["before", " a"]]}


def step(i, n_steps=4, **more):
    return {"event": "step", "step": i, "n_steps": n_steps, "loss": 5.0 / i, "seconds": 0.5} | more


def gradients(i, **more):
    table = {"norm": [[0.5, 0.25]], "zeros": [[0, 1]], "weight": [[1, 1]], "update": [[0.1, 0.2]]}
    names = {"layers": ["blk.0"], "columns": ["attn_q A", "attn_q B"]}
    return {"event": "gradients", "step": i, **names, **table} | more


def test_a_finished_run(ask, add_run):
    add_run("mine", [RUN, *(step(i) for i in (1, 2, 3, 4)), ANSWERS])
    found = ask("run", name="mine")
    assert (found["state"], found["step"], found["n_steps"]) == ("finished", 4, 4)
    assert found["charts"][0]["title"] == "Loss"
    assert found["charts"][0]["series"][0]["y"] == [5.0, 2.5, pytest.approx(5 / 3), 1.25]
    assert dict(found["facts"])["steps"] == "4"
    assert (found["settings"], found["about"]) == (RUN["settings"], RUN["about"])
    assert (found["prompt"], found["answers"]) == ("the", [["before", " a"]])


def test_a_run_has_the_card_on_its_data(ask, add_run, client):
    """And what no run writes there is refused in a sentence, or left out."""
    data = {"lengths": [1, 2, 3, 4], "answers": [1, 1, 2, 3], "scripts": [["Latin", 1.0]]}
    findings = [{"what": "with an empty answer", "n": 2, "examples": []}, 3, {"n": 1}]
    add_run("mine", [RUN | {"data": data | {"findings": findings}}, step(1)])
    (count,) = ask("run", name="mine")["data"]["counts"]
    assert count["n"] == 2 and count["text"] == "with an empty answer"
    add_run("mine", [RUN, step(1)])
    assert ask("run", name="mine")["data"] is None
    for wrong in ({"lengths": 3}, {"lengths": [1], "scripts": [[1]]}, {"lengths": ["x"]}):
        add_run("mine", [RUN | {"data": wrong}, step(1)])
        answer = client.get("/api/run", params={"name": "mine"})
        assert answer.status_code == 422 and "make no sense" in answer.json()["error"]["message"]


def test_the_model_of_a_run_is_compared_by_its_contents(ask, add_run, tiny, model_with, tmp_path):
    copy, other = tmp_path / "copy.gguf", model_with(llama__rope__freq_base=5.0)
    copy.write_bytes(tiny.read_bytes())
    assert other.name == tiny.name
    models = {
        str(tiny): "same",
        str(copy): "same",
        str(other): "other",
        f"gone/{tiny.name}": "same",
        "gone/other.gguf": "unknown",
        3: "same",
    }
    for name, compared in models.items():
        add_run("mine", [RUN | {"settings": {"model": name}}, step(1)])
        assert ask("run", name="mine")["model"] == compared, name


def test_what_a_run_has_written_is_an_adapter_a_model_or_nothing(ask, add_run, tiny, folder):
    add_run("mine", [step(1)])

    def kind():
        return ask("state")["runs"][0]["kind"]

    assert kind() == ""
    (folder / "mine.gguf").write_bytes(b"GGUF")
    assert kind() == ""
    (folder / "mine.gguf").write_bytes(tiny.read_bytes())
    assert kind() == "model"
    attach(pyggml.load(tiny), LoraConfig(rank=2)).save(folder / "mine.gguf")
    assert kind() == "adapter"


def test_a_text_to_begin_with_is_the_newest_answer(ask, add_run):
    assert ask("model")["sample"] == reading.SAMPLE
    add_run("mine", [step(1), ANSWERS, ANSWERS | {"answers": [["before", " a"], ["after", " b"]]}])
    assert ask("model")["sample"] == "the b"


def test_a_run_that_ended_by_its_patience_is_called_so(ask, add_run):
    about = RUN | {"settings": {"patience": 2}}
    losses = [{"event": "validation", "step": i, "loss": x} for i, x in enumerate([3.0, 2.0, 2.5])]
    add_run("mine", [about, step(1), *losses])
    assert ask("run", name="mine")["state"] == "stopped"
    more = {"event": "validation", "step": 3, "loss": 2.1}
    add_run("ended", [about, step(1), *losses, more])
    assert ask("run", name="ended")["state"] == "ended early"
    add_run("damaged", [about, step(1), *losses, more | {"loss": "much"}])
    add_run("without", [RUN, step(1), *losses, more])
    assert ask("run", name="without")["state"] == "stopped"


def test_a_half_written_line_is_left_out_until_it_is_whole(ask, add_run, folder):
    add_run("mine", [step(1)], rest='{"event": "step", "step": 2, "n_')
    before = ask("run", name="mine")
    assert (before["state"], before["step"]) == ("stopped", 1)
    with (folder / "mine.metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(2))[len('{"event": "step", "step": 2, "n_') :] + "\n")
    after = ask("run", name="mine")
    assert after["step"] == 2 and after["version"] != before["version"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "no JSON\n",
        "[1]\n",
        '{"event": "step", "step": 1}\n',
        '{"event": 3}\n',
        "\0" * 99,
    ],
)
def test_a_damaged_file_is_shown_as_far_as_it_can_be(ask, folder, text):
    (folder / "mine.metrics.jsonl").write_text(text)
    found = ask("run", name="mine")
    assert found["state"] in ("empty", "stopped") and found["charts"] == []


@pytest.mark.parametrize(
    "record",
    [
        {"event": "run", "step": 0, "settings": 3, "about": "x"},
        {"event": "answers", "step": 0, "prompt": [1], "answers": {"a": 1}},
        {"event": "run", "step": 0, "about": [["model"], 3, ["a", {"b": 1}]]},
        step(1, n_steps="many", loss="x", seconds=[1]),
        gradients(1, norm="x"),
        gradients(1, layers=[1]),
    ],
)
def test_a_stranger_s_record_is_shown_as_far_as_it_can_be(ask, add_run, record):
    add_run("mine", [step(1, n_steps=2), record, step(2, n_steps=2)])
    found = ask("run", name="mine")
    assert found["step"] == 2 and found["measured"] == []
    assert isinstance(found["settings"], dict) and found["about"] == found["answers"] == []
    assert isinstance(found["prompt"], str)


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "1e400", "-1e308", "1" + "0" * 400, "true"])
def test_strange_numbers_end_in_a_sentence_at_worst(client, folder, loss):
    line = '{"event": "step", "step": %d, "n_steps": 2, "loss": ' + loss + "}\n"
    (folder / "mine.metrics.jsonl").write_text(line % 1 + line % 2)
    answer = client.get("/api/run?name=mine")
    assert answer.status_code in (200, 422)
    assert answer.status_code == 200 or "make no sense" in answer.json()["error"]["message"]


def test_runs_are_looked_at_without_a_model(add_run, folder, tiny, tmp_path):
    """That of the newest run is taken where it is there; else all but the runs says so."""
    add_run("mine", [RUN | {"settings": {"model": "gone.gguf"}}, *(step(i) for i in range(1, 5))])
    found = Runs(folder)
    assert found.model() is None
    with TestClient(make_app(source_of_run(None, "auto"), found), HERE) as client:

        def get(path):
            answer = client.get(f"/api/{path}")
            return answer.status_code, answer.json()

        assert get("state")[1]["first"] == "run" and "<title>Runs" in client.get("/").text
        assert len(get("runs")[1]["rows"]) == 1
        assert get("run?name=mine")[1]["model"] == "none"
        assert get("model")[1]["fault"].startswith("no model was named: pyggml view MODEL")
        for path in ("graph", "tensor?name=a"):
            status, body = get(path)
            assert 400 <= status < 500 and "no model was named" in body["error"]["message"]
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    add_run("other", [RUN | {"settings": {"model": str(tmp_path / "broken.gguf")}}, step(1)])
    assert source_of_run(Runs(folder).model(), "auto").name == "Runs"
    (folder / "other.metrics.jsonl").unlink()
    add_run("mine", [RUN | {"settings": {"model": str(tiny)}}, step(1)])
    source = source_of_run(Runs(folder).model(), "auto")
    assert (source.path, source.is_asked) == (tiny, False)


def cells_of(table, name):
    (row,) = [row for row in table["rows"] if row["name"] == name]
    return dict(zip(table["columns"], row["cells"], strict=True))


def test_the_table_of_runs(ask, add_run, folder):
    settings = {"lr": 2e-4, "lora_rank": 8}
    held_out = [{"event": "validation", "step": i, "loss": 2.5 + i} for i in (0, 4)]
    steps = [step(i, 40, loss=10.0 - i) for i in range(1, 9)]
    add_run("done", [RUN | {"settings": settings}, *steps, *held_out])
    add_run("short", [step(1, loss=7.0)])
    (folder / "odd.metrics.jsonl").write_text('{"event": "step", "step": 1, "seconds": [1]}\n')
    table = ask("runs")
    assert {row["name"] for row in table["rows"]} == {"done", "short", "odd"}
    done = cells_of(table, "done")
    texts = ["stopped", "8 of 40", "3.5000", "2.5000 in validation", "0.0002", "8", "4.0 s"]
    assert [cell["text"] for cell in done.values()] == texts
    assert [cell["value"] for cell in done.values()] == ["stopped", 8, 3.5, 2.5, 2e-4, 8, 4.0]
    card = dict(ask("run", name="done")["facts"])
    assert card["loss"] == "7.5000 → 3.5000 (means of 4 steps)", "the table's number"
    short = cells_of(table, "short")
    assert short["best loss"] == {"value": 7.0, "text": "7.0000 (mean)"}
    assert short["rank"] == {"value": None, "text": ""}


def test_runs_are_laid_over_each_other(ask, client, add_run):
    add_run("a", [step(i, loss=float(i % 2)) for i in range(1, 41)])
    add_run("b", [step(i, loss=3.0) for i in range(1, 11)])
    (chart,) = ask("runs/overlay", name=["a", "b"])["charts"]
    assert chart["title"] == "Loss" and chart["x"] == [*range(2, 41)]
    a, b = chart["series"]
    assert [(a["name"], a["role"]), (b["name"], b["role"])] == [("a", "run0"), ("b", "run1")]
    assert set(a["y"]) == {0.5}, "means of two steps"
    assert b["y"] == [3.0] * 9 + [None] * 30
    for names, status in ((["a", "none"], 404), ([f"r{i}" for i in range(7)], 400)):
        assert client.get("/api/runs/overlay", params={"name": names}).status_code == status


def test_halves_of_characters_are_shown(ask, add_run):
    record = {"event": "run", "step": 0, "settings": {"x\ud800": float("nan")}}
    add_run("mine", [record | {"about": [["model", "\udfff"]]}, step(1)])
    found = ask("run", name="mine")
    assert found["settings"] == {"x\ud800": "nan"} and found["about"] == [["model", "\udfff"]]


def test_a_run_under_way_says_how_long_it_will_be(ask, add_run, folder):
    with hold(folder / "mine.gguf"):
        assert is_held(folder / "mine.gguf")
        assert ask("run", name="mine")["state"] == "starting"
        add_run("mine", [step(i, 100) for i in range(1, 11)])
        found = ask("run", name="mine")
        assert (found["state"], found["left"]) == ("running", "45 s")
        (summaries,) = ask("state")["runs"]
        assert summaries["running"] and summaries["name"] == "mine"
    assert ask("run", name="mine")["state"] == "stopped"


def test_a_lock_that_a_killed_process_left_is_none(folder):
    lock = folder / ".mine.gguf.lock"
    for text in ("", "x", "-1", "0", "9" * 400, "4194305"):
        lock.write_text(text)
        assert not is_held(folder / "mine.gguf")


def test_runs_are_in_the_order_of_their_lines(ask, add_run, folder):
    for name, when in (("old", 200), ("new", 300), ("older", 100)):
        add_run(name, [step(1)])
        os.utime(folder / f"{name}.metrics.jsonl", (when, when))
    (folder / "new.metrics.old.jsonl").write_text("{}\n")
    (folder / "folder.metrics.jsonl").mkdir()
    assert [run["name"] for run in ask("state")["runs"]] == ["new", "old", "older"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="asks for pipes with names")
def test_a_pipe_is_no_run(ask, folder):
    os.mkfifo(folder / "mine.metrics.jsonl")
    assert ask("state")["runs"] == []


def test_the_gradients_of_a_step(ask, client, add_run):
    add_run("mine", [step(1), gradients(1), step(2), gradients(2, norm=[[1.0, 0.0]])])
    assert ask("run", name="mine")["measured"] == [1, 2]
    found = ask("run/gradients", name="mine", kind="norm", step=2)
    assert "step 2" in found["map"] and found["map"].startswith("<svg")
    assert found["kinds"].keys() == {"norm", "ratio", "zeros"} and found["over"].startswith("<svg")
    assert any("blk.0" in sentence for sentence in found["findings"])
    for fields, status in (({"step": 3}, 404), ({"step": 1, "kind": "x"}, 400), ({}, 400)):
        answer = client.get("/api/run/gradients", params={"name": "mine", **fields})
        assert answer.status_code == status


def test_a_tensor_s_gradients_over_steps(ask, add_run):
    add_run("mine", [step(1), gradients(1), step(2), gradients(2, norm=[[1.0, "nan"]])])
    (chart,) = ask("tensor", name="blk.0.attn_q.weight", run="mine")["charts"]
    assert chart["x"] == [1, 2]
    assert {s["name"]: s["y"] for s in chart["series"]} == {
        "attn_q A": [0.5, 1.0],
        "attn_q B": [0.25, None],
    }
    assert ask("tensor", name="blk.1.attn_q.weight", run="mine")["charts"] == []


def test_a_file_that_is_too_large_is_not_read(client, add_run, monkeypatch):
    monkeypatch.setattr(runs, "_MOST_BYTES", 10)
    add_run("mine", [step(1)])
    answer = client.get("/api/run?name=mine")
    assert answer.status_code == 413 and "is larger than 10 B" in answer.json()["error"]["message"]


def test_a_folder_that_is_gone_is_told(client, folder):
    shutil.rmtree(folder)
    answer = client.get("/api/state")
    assert answer.status_code == 410 and "cannot be read" in answer.json()["error"]["message"]


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist, wanted the folder of a run's adapter"):
        Runs(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        Runs(tmp_path / "file")


def test_what_a_real_run_leaves(finetune, tmp_path, tiny):
    assert finetune("--weight-decay", 0.1, "--grad-accum", 2).code == 0
    found = Runs(tmp_path).describe("adapter")
    assert (found["state"], found["step"]) == ("finished", 4)
    assert found["settings"]["weight_decay"] == 0.1 and found["settings"]["model"] == str(tiny)
    assert [label for label, _ in found["about"]][:3] == ["model", "adapter", "data"]
    assert [label.split(",")[0] for label, _ in found["answers"]] == ["before", "after"]
    assert found["prompt"] == "the " and found["measured"] == (1, 2, 3, 4)
    (chart,) = Runs(tmp_path).norms("adapter", "blk.1.attn_q.weight")
    assert [s["name"] for s in chart["series"]] == ["attn_q A", "attn_q B"]
