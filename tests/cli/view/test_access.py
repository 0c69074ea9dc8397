"""Who may ask, and for what: this machine alone, and nothing but what the page needs."""

import re
from importlib.resources import files

import pytest
from browsers import contrast, schemes

PARTS = [p.name for p in files("pyggml.cli.commands.view").joinpath("web").iterdir()]


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org", "127.0.0.1.nip.io", "", "192.168.0.1:8090"]
)
def test_another_host_is_refused(client, host):
    answer = client.get("/api/model", headers={"host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["message"] == "the Host header names no host of this server"


@pytest.mark.parametrize("host", ["localhost:8090", "127.0.0.1:8090", "[::1]:8090", "LOCALHOST"])
def test_this_machine_may_ask(client, host):
    assert client.get("/api/state", headers={"host": host}).status_code == 200


def test_a_page_of_another_origin_may_not_ask(client):
    headers = {"origin": "https://example.org"}
    assert client.post("/api/losses", json={"text": "the"}, headers=headers).status_code == 403


def test_another_site_may_link_to_the_page_and_no_more(client):
    """An image or a script of another site has no Origin header."""
    headers = {"sec-fetch-site": "cross-site"}
    for path in ("/api/model", "/", "/api/graph"):
        assert client.get(path, headers=headers).status_code == 403
    headers |= {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/web/page.js",
        "/app.js/../../command.py",
        "/page.html",
        "/api/",
        "/api/model/x",
    ],
)
def test_there_is_no_other_file(client, path):
    answer = client.get(path)
    assert answer.status_code == 404 and answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_nothing_can_be_changed(client, method):
    assert getattr(client, method)("/api/model").status_code == 405
    assert getattr(client, method)("/api/run?name=x").status_code == 405


@pytest.mark.parametrize("name", ["../x", "x/../../y", "/etc/passwd", "..", ".", "x\0", "é" * 200])
def test_a_run_s_name_is_no_path(client, add_run, name):
    add_run("x", [])
    for path in ("run", "tensor", "run/gradients"):
        fields = {"name": name, "run": name, "step": 1}
        fields |= {"name": "output.weight"} if path == "tensor" else {}
        assert client.get(f"/api/{path}", params=fields).status_code == 404


def test_the_page_fetches_nothing_of_others(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for name in PARTS:
        if name == "page.html":
            continue
        part = client.get(f"/{name}")
        assert part.status_code == 200, f"{name} is not sent"
        assert not re.search(r"https?://(?!www\.w3\.org/)|@import|url\(|eval\(", part.text), name
    assert not re.search(r"https?://|<script>|<style|\son\w+=", page.text)
    for name in re.findall(r'(?:src|href)="([^#"]+)"', page.text):
        assert client.get(f"/{name}").status_code == 200, name


def test_a_name_is_text_in_the_page(tmp_path, tiny, model_with):
    from starlette.testclient import TestClient

    from pyggml.cli.commands.view.app import make_app
    from pyggml.cli.commands.view.source import ViewedFile

    path = model_with(general__name="<script>alert(1)</script>")
    with TestClient(make_app(ViewedFile(path), None), "http://localhost") as client:
        page = client.get("/").text
    assert "&lt;script&gt;alert" in page and "<script>alert" not in page


@pytest.mark.parametrize("colours", [*schemes("view")], ids=["light", "dark"])
def test_what_is_shown_stands_out(colours):
    """WCAG's AA: 4.5 for text, 3 for edges of fields, lines of charts and the outline of focus."""
    text = [(t, page) for t in ("ink", "quiet", "main") for page in ("page", "card", "chosen")]
    text += [("on-main", "main"), ("fault", "fault-page"), ("fault", "card"), ("ink", "mark")]
    for one, other in text:
        assert contrast(colours[one], colours[other]) >= 4.5, (one, other)
    for one in ("edge", "main", "second", "third", "points"):
        for other in ("page", "card"):
            assert contrast(colours[one], colours[other]) >= 3, (one, other)
    heated = zip(colours["heat"], colours["card"], strict=True)
    strongest = [0.75 * heat + 0.25 * card for heat, card in heated]
    assert contrast(colours["ink"], strongest) >= 4.5
