"""The chat page, in a real browser where there is one: every click, and nothing in the console."""

import hashlib
import json
import re
import shutil
import subprocess
import time
from importlib.resources import files

import pytest
from browsers import contrast, launched, schemes

# As npm has them: marked 18.2.1's lib/marked.umd.js, dompurify 3.4.18's dist/purify.min.js.
VENDORED = {
    "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
    "purify.min.js": "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970",
}
NODE = shutil.which("node")
WEB = files("pyggml.cli.commands.serve").joinpath("web")
HOSTILE = "<img src=x onerror=alert(1)><b>the</b> "


# -- without a browser --------------------------------------------------------------------------


def test_the_page_fetches_nothing_of_others(server):
    page = server.http.get("/")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; ") and "unsafe" not in policy
    assert policy.endswith("require-trusted-types-for 'script'; trusted-types dompurify")
    for name in ("page.css", "page.js", "icon.svg", "api.js", "store.js", "markdown.js"):
        part = server.http.get(f"/{name}")
        assert part.status_code == 200
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", part.text)
    assert not re.search(r"https?://|<script>|<style>|\son\w+=", page.text)


@pytest.mark.parametrize("name", VENDORED)
def test_the_renderer_and_the_sanitiser_are_npm_s(server, name):
    part = server.http.get(f"/{name}")
    assert hashlib.sha256(part.content).hexdigest() == VENDORED[name]
    licence = {"marked.umd.js": "marked.LICENSE", "purify.min.js": "DOMPurify.LICENSE"}[name]
    assert WEB.joinpath(licence).is_file() and name in server.http.get("/").text


def test_fields_have_the_declared_settings(server):
    page = server.http.get("/").text
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens"):
        assert f'name="{name}"' in page
    assert 'name="temperature" step="any" placeholder="0.8"' in page


@pytest.mark.parametrize("colours", [*schemes("serve")], ids=["light", "dark"])
def test_text_stands_out(colours):
    """WCAG's AA: a contrast of 4.5."""
    pairs = [(text, page) for text in ("ink", "quiet") for page in ("page", "card")]
    pairs += [("ink", "said"), ("on-main", "main"), ("fault", "fault-page"), ("fault", "card")]
    for text, page in pairs:
        assert contrast(colours[text], colours[page]) >= 4.5, (text, page)


# -- past chats: pure functions, in Node ---------------------------------------------------------

CHECKS = r"""
import { messagesOf, merged, parsed, titleOf } from "./store.mjs";
import assert from "node:assert";
const answered = (content) => ({ content, note: "", model: "m", seed: 1, isFault: false });
const chat = (id, time, ...texts) => ({
  id, time, mode: "chat", system: " ", models: ["m", "n"],
  turns: texts.map((text) => ({ text, answers: [answered(`left ${text}`), null] })),
});
const talk = { ...chat("a", 1, "one", "two", "three"), system: "Be terse." };
const said = (role, content) => ({ role, content });
assert.deepEqual(messagesOf(talk, 0, 1), [
  said("system", "Be terse."), said("user", "one"), said("assistant", "left one"),
  said("user", "two")]);
const unanswered = messagesOf(chat("a", 1, "one", "two"), 1, 1);
assert.deepEqual(unanswered, [said("user", "two")]);
assert.equal(titleOf(chat("a", 1, "  a line\nand another")), "a line");
assert.equal(titleOf(chat("a", 1, "x".repeat(99))).length, 60);
assert.equal(titleOf(chat("a", 1)), "New chat");
const many = Array.from({ length: 100 }, (_, i) => chat(`c${i}`, 100 - i, "x"));
const ids = merged(many, chat("c7", 500, "y")).map(({ id }) => id);
assert.deepEqual([ids.length, ids[0], ids[1]], [100, "c7", "c0"]);
assert.equal(merged(many, chat("new", 500, "y")).length, 100, "the oldest is gone");
const damaged = [null, "", "[", "3", "{}", '[{"id": 1}]', '[{"id": "a", "time": 1, "mode": "x"}]'];
for (const text of damaged)
  assert.deepEqual(parsed(text), []);
assert.deepEqual(parsed(JSON.stringify([null, talk])), [talk]);
"""


@pytest.mark.skipif(NODE is None, reason="Node (it runs the page's pure functions)")
def test_past_chats_are_whole_and_bounded(tmp_path):
    tmp_path.joinpath("store.mjs").write_text(WEB.joinpath("store.js").read_text())
    checks = tmp_path / "checks.mjs"
    checks.write_text(CHECKS)
    ended = subprocess.run([NODE, str(checks)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


# -- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    yield from launched()


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
    page.click("text=Settings >> nth=0")
    for name, value in given.items():
        page.fill(f"input[name={name}]", str(value))
    page.click("#settings button:text-is('Done')")


def chats_of(page):
    """What the browser keeps."""
    return json.loads(page.evaluate("localStorage.getItem('pyggml.chats')") or "[]")


def contents_of(page, side, turn=0):
    """The text of an answer of the newest chat, as the model wrote it."""
    return chats_of(page)[0]["turns"][turn]["answers"][side]["content"]


def keep(page, *answers, mode="chat"):
    """Let the browser have kept a chat whose questions had these answers; open it."""
    turns = [
        {"text": f"Question {i}", "answers": [about(text), None]} for i, text in enumerate(answers)
    ]
    kept = {"id": "kept", "time": 1, "mode": mode, "system": "Be terse.", "models": ["tiny", "red"]}
    page.evaluate(
        "t => localStorage.setItem('pyggml.chats', t)", json.dumps([kept | {"turns": turns}])
    )
    page.reload()
    page.wait_for_selector("#left option", state="attached")
    page.click("#chats li button >> nth=0")
    page.wait_for_selector("#left .answer", state="attached")


def about(text):
    return {"content": text, "model": "tiny", "seed": 1, "note": "done", "isFault": False}


def test_base_beside_adapter(open_page, server):
    page = open_page(server)
    assert page.locator("#right select").input_value() == "red"
    page.select_option("#right select", "blue")
    set_fields(page, max_tokens=6, seed=5, temperature=1)
    page.fill("#prompt", "hello")
    page.click("#send")
    notes = settle(page)
    assert all("most tokens reached · 6 tokens" in note and "seed 5" in note for note in notes)
    for side, model in enumerate(("tiny", "blue")):
        wanted = server.chat("hello", model=model, max_tokens=6, seed=5, temperature=1).json()
        assert contents_of(page, side) == wanted["choices"][0]["message"]["content"]
        assert notes[side].startswith(f"{model} · ")
    page.fill("#prompt", "and?")
    page.keyboard.press("Enter")
    settle(page, 4)
    page.click("#fresh")
    assert not page.locator(".log .turn").count()


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
            assert page.is_enabled("#send") and page.is_visible("#send")
            assert page.is_disabled("#stop") and not page.is_visible("#stop")
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

    def check(*names):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for name in names:
            box = page.locator(name).bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, name
            assert box["y"] + box["height"] <= 800, name

    check("#send", "#prompt", "#system", "#left select", "#fresh")
    page.click("text=Settings >> nth=0")
    check("#mode", "#both", "input[name=seed]", "#settings button:text-is('Done')")


MARKDOWN = """# A heading

**Strong**, <b>no tag</b> <img src=x onerror=alert(1)> and `code`.

```python
print("<i>")
```

- [ ] one
- [link](https://example.org) [bad](javascript:alert(1)) ![picture](https://example.org/x.png)
- [number](tel:1) [here](/v1/models)

| a | b |
|---|---|
| 1 | 2 |
"""


def test_an_answer_is_markdown_and_no_other_markup(open_page, server):
    page = open_page(server)
    keep(page, MARKDOWN)
    answer = page.locator("#left .answer")
    assert answer.locator("h1").inner_text() == "A heading"
    assert answer.locator("strong").inner_text() == "Strong"
    assert answer.locator("td").all_inner_texts() == ["1", "2"]
    assert "<b>no tag</b> <img src=x onerror=alert(1)>" in answer.inner_text()
    assert "☐ one" in answer.inner_text()
    assert not answer.locator("b, i, img, input, script, style, iframe").count()
    links = answer.locator("a")
    assert not answer.locator("a[href]").count()  # see the test of links
    assert [link.get_attribute("title") for link in links.all()] == [
        "https://example.org",
        None,
        "https://example.org/x.png",
        *(None, None),
    ]
    assert links.first.get_attribute("rel") == "noopener noreferrer"
    assert answer.locator(".head").inner_text().split() == ["python", "Copy"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator(".head button").click()
    page.wait_for_selector(".head button:text-is('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("<i>")\n'


@pytest.mark.parametrize("press", ["pointer", "key"])
def test_a_link_of_an_answer_leads_nowhere_until_it_is_pressed(open_page, server, press):
    page = open_page(server)
    keep(page, "[link](http://127.0.0.1:9/x)")
    link = page.locator("#left .answer a")
    link.hover()
    assert link.get_attribute("href") is None
    with page.context.expect_page() as opened:
        if press == "pointer":
            link.click()
        else:
            link.focus()
            page.keyboard.press("Enter")
    assert opened.value.evaluate("window.opener") is None
    opened.value.close()


def test_nothing_but_the_sanitiser_makes_html(open_page, server):
    page = open_page(server)
    fault = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x'; } catch (e) { return e.name; } }"
    )
    assert fault == "TypeError"
    open_page.said.clear()  # the browser's own note


def test_a_chat_survives_a_reload_and_goes_on(open_page, server):
    page = open_page(server)
    page.uncheck("#both")
    set_fields(page, max_tokens=4, temperature=0)
    page.fill("#system", "the path")
    page.fill("#prompt", "hello\nthere")
    page.click("#send")
    settle(page, 1)
    page.reload()
    page.wait_for_selector("#left option", state="attached")
    page.click("#chats li button:text-is('hello')")
    assert page.input_value("#system") == "the path" and page.is_visible("#system")
    assert page.locator("#left .said").inner_text() == "hello\nthere"
    first = contents_of(page, 0)
    page.uncheck("#both")
    set_fields(page, max_tokens=4, temperature=0)
    page.fill("#prompt", "and?")
    page.click("#send")
    settle(page, 2)
    messages = [
        ("system", "the path"),
        ("user", "hello\nthere"),
        ("assistant", first),
        ("user", "and?"),
    ]
    body = {"messages": [{"role": r, "content": c} for r, c in messages]}
    body |= {"model": "tiny", "max_tokens": 4, "temperature": 0}
    wanted = server.http.post("/v1/chat/completions", json=body).json()
    assert contents_of(page, 0, 1) == wanted["choices"][0]["message"]["content"]
    page.click("[aria-label='Delete hello']")
    assert chats_of(page) == [] and not page.locator(".turn").count()


def test_an_answer_is_made_anew_and_a_message_changed(open_page, server):
    page = open_page(server)
    page.uncheck("#both")
    set_fields(page, max_tokens=8, seed=3, temperature=2)
    for text in ("first", "second"):
        page.fill("#prompt", text)
        page.click("#send")
        settle(page, 1 + (text == "second"))
    assert page.locator("button:text-is('Regenerate')").count() == 1, "of the last answer"
    before = contents_of(page, 0, 1)
    page.click("button:text-is('Regenerate')")
    page.wait_for_selector(".note:has-text('seed 4')")
    assert contents_of(page, 0, 1) != before
    page.click("button:text-is('Edit') >> nth=0")
    assert "The message after it will be gone." in page.inner_text(".edit")
    page.fill(".edit textarea", "other")
    page.click(".edit button:text-is('Send')")
    settle(page, 1)
    (turn,) = chats_of(page)[0]["turns"]
    assert turn["text"] == "other" and page.locator("#left .said").all_inner_texts() == ["other"]
    page.click("button:text-is('Edit')")
    page.click("button:text-is('Cancel')")
    assert page.locator("#left .said").all_inner_texts() == ["other"]


def test_an_empty_chat_has_samples(open_page, server):
    page = open_page(server)
    page.uncheck("#both")
    set_fields(page, max_tokens=2)
    sample = page.locator("#left .samples button").first
    text = sample.inner_text()
    sample.click()
    settle(page, 1)
    assert page.locator("#left .said").inner_text() == text
    assert not page.locator("#left .samples").count()


def test_a_phone_has_tabs_and_sheets(open_page, server):
    page = open_page(server, 390)
    assert page.is_visible("#left") and not page.is_visible("#right")
    assert page.locator("#left").bounding_box()["height"] > 400
    page.click("[role=tab]:text-is('red')")
    assert page.is_visible("#right") and not page.is_visible("#left")
    assert page.get_attribute("#right-tab", "aria-selected") == "true"
    for opener, sheet in (("[aria-label='Past chats']", "#chats"), ("text=Settings", "#settings")):
        assert not page.is_visible(sheet)
        page.click(f"{opener} >> nth=0")
        assert page.is_visible(sheet)
        page.keyboard.press("Escape")
        assert not page.is_visible(sheet)


COUNT = """() => {
  const text = document.querySelector("#left .answer p").firstChild;
  const range = document.createRange(), lines = {};
  for (let i = 0; i < text.length; i++) {
    range.setStart(text, i);
    range.setEnd(text, i + 1);
    const top = Math.round(range.getBoundingClientRect().top);
    lines[top] = (lines[top] ?? 0) + 1;
  }
  return Object.values(lines);
}"""


def test_lines_have_at_most_75_characters(open_page, server):
    page = open_page(server, 1600)
    keep(page, "The path to the other thing is the path that the others took, and no other. " * 9)
    page.uncheck("#both")
    lines = page.evaluate(COUNT)
    assert 60 < max(lines) <= 75, lines
