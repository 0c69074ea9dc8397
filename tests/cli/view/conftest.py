"""A tiny model and a run of it, behind the application of `pyggml view`."""

import json

import pytest
from starlette.testclient import TestClient

from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import ViewedFile

HERE = "http://localhost"


@pytest.fixture
def folder(tmp_path):
    """An empty folder of runs."""
    return tmp_path


@pytest.fixture
def add_run(folder):
    """add_run(name, records, rest=""): metrics as a run writes them; rest: a half-written line."""

    def add(name, records, rest=""):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.metrics.jsonl").write_text(lines + rest)

    return add


@pytest.fixture
def client(tiny, folder):
    """A client of a view of the tiny model and the folder."""
    with TestClient(make_app(ViewedFile(tiny), Runs(folder)), HERE) as found:
        yield found


@pytest.fixture
def ask(client):
    """ask(path, **fields): the object that a path answers."""

    def call(path, **fields):
        answer = client.get(f"/api/{path}", params=fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return call


def step(i, n_steps=4, **more):
    return {"event": "step", "step": i, "n_steps": n_steps, "loss": 5.0 / i, "seconds": 0.5} | more
