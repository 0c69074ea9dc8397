"""The chat page, in a real browser where there is one: every click, and nothing in the console."""

import re
import shutil
import time
from importlib.resources import files

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
HOSTILE = "<img src=x onerror=alert(1)><b>the</b> "


# -- without a browser --------------------------------------------------------------------------


def test_the_page_fetches_nothing_of_others(server):
    page = server.http.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
    for name in ("page.css", "page.js", "icon.svg"):
        part = server.http.get(f"/{name}")
        assert part.status_code == 200 and name in page.text
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", part.text)
    assert not re.search(r"https?://|<script>|<style>|\son\w+=", page.text)


def test_fields_have_the_declared_settings(server):
    page = server.http.get("/").text
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens"):
        assert f'name="{name}"' in page
    assert 'name="temperature" step="any" placeholder="0.8"' in page


def schemes():
    """Light and dark: name of a colour -> its red, green and blue."""
    css = files("pyggml.cli.commands.serve").joinpath("web/page.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", css, re.S):
        found = re.findall(r"--([\w-]+): #(\w{6})", block)
        yield {name: [int(text[i : i + 2], 16) for i in (0, 2, 4)] for name, text in found}


def luminance(colour):
    """WCAG 2.1, relative luminance."""
    parts = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [*schemes()], ids=["light", "dark"])
def test_text_stands_out(colours):
    """WCAG's AA: a contrast of 4.5."""
    pairs = [(text, page) for text in ("ink", "quiet") for page in ("page", "card")]
    pairs += [("ink", "said"), ("on-main", "main"), ("fault", "fault-page"), ("fault", "card")]
    for text, page in pairs:
        dark, light = sorted((luminance(colours[text]), luminance(colours[page])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, page)


# -- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright (pip install playwright)")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser):
    """open_page(server): its page, ready. At the end its console, open_page.said, is empty."""
    opened, said = [], []

    def open_(server, width=1200):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(server.url)
        page.wait_for_selector("#left option", state="attached")
        opened.append(page)
        return page

    open_.said = said
    yield open_
    for page in opened:
        page.close()
    assert not said


def settle(page, n=2):
    """Wait until n notes say how the answers ended; what they say."""
    end = time.monotonic() + 60
    while True:
        notes = page.locator(".note").all_inner_texts()
        if len(notes) == n and "…" not in notes:
            return notes
        assert time.monotonic() < end, notes
        time.sleep(0.05)


def set_fields(page, **given):
    page.click("summary")
    for name, value in given.items():
        page.fill(f"input[name={name}]", str(value))
    page.click("summary")


def test_base_beside_adapter(open_page, server):
    page = open_page(server)
    assert page.locator("#right select").input_value() == "red"
    page.select_option("#right select", "blue")
    set_fields(page, max_tokens=6, seed=5, temperature=1)
    page.fill("#prompt", "hello")
    page.click("#send")
    notes = settle(page)
    assert all("most tokens reached · 6 tokens" in note and "seed 5" in note for note in notes)
    for side, model in (("left", "tiny"), ("right", "blue")):
        wanted = server.chat("hello", model=model, max_tokens=6, seed=5, temperature=1).json()
        shown = page.locator(f"#{side} .answer").evaluate("node => node.textContent")
        assert shown == wanted["choices"][0]["message"]["content"]
    page.fill("#prompt", "and?")
    page.keyboard.press("Enter")
    settle(page, 4)
    page.click("#fresh")
    assert not page.locator(".log *").count()


def test_texts_are_texts_and_can_be_continued(open_page, server):
    page = open_page(server)
    page.uncheck("#both")
    page.select_option("#mode", "text")
    set_fields(page, max_tokens=4, temperature=0)
    page.fill("#prompt", HOSTILE)
    page.keyboard.press("Enter")
    settle(page, 1)
    shown = page.locator("#left .answer").evaluate("node => node.textContent")
    assert shown == HOSTILE + server.said(HOSTILE, max_tokens=4, temperature=0)
    assert not page.locator(".log img, .log b").count() and not page.is_visible("#right")


def test_an_answer_can_be_stopped(open_page, serve):
    with serve(adapters={}) as server:
        server.slow_down()
        page = open_page(server)
        for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
            page.fill("#prompt", "a")
            page.click("#send")
            server.until(lambda: server.service.worker.n_active == 1)
            stop()
            assert settle(page, 1) == ["stopped"]
            server.until_let_go()
            assert page.is_enabled("#send") and page.is_disabled("#stop")
            page.click("#fresh")


def test_faults_are_shown(open_page, server):
    page = open_page(server)
    page.uncheck("#both")
    set_fields(page, top_p=3)
    page.fill("#prompt", "a")
    page.keyboard.press("Enter")
    assert "top_p is 3, wanted 0 to 1" in settle(page, 1)[0]
    (told,) = open_page.said
    assert "status of 400" in told, "the browser's own note"
    open_page.said.clear()


@pytest.mark.parametrize("width", [320, 700, 1600])
def test_nothing_is_cut_off(open_page, server, width):
    page = open_page(server, width)
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("#send", "#prompt", "#mode", "#left select"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= 800
