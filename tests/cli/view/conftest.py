"""A tiny model and a run of it, behind the application of `pyggml view`."""

import json

import pytest
from browsers import launched
from extras import reason
from starlette.testclient import TestClient
from view_pages import ANSWERS, DATA, RUN, gradients, served
from view_pages import step as run_step

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


# -- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """Chromium, where it and igraph are there."""
    pytest.importorskip("igraph", reason=reason("igraph"))
    yield from launched()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("runs")
    records = [
        RUN | {"data": DATA},
        *(r for i in range(1, 9) for r in (run_step(i), gradients(i))),
        ANSWERS,
    ]
    (folder / "done.metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(scope="module")
def url(tiny, runs):
    with served(make_app(ViewedFile(tiny), Runs(runs))) as found:
        yield found


@pytest.fixture
def visit(browser, url):
    """visit("#/graph"): the page there. At the end its console, visit.said, is empty."""
    section_facts, said = [], []

    def open_(place, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda r: r.url.startswith(url) or said.append(r.url))
        page.goto(url + place)
        page.set_default_timeout(120_000)
        section_facts.append(page)
        return page

    open_.said = said
    yield open_
    for page in section_facts:
        page.close()
    assert not said
