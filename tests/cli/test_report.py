"""adapter.html: one file that needs no network, in which no text of others is more than text."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from pyggml.cli.web.pages import part
from pyggml.cli.web.report.data_card import data_card
from pyggml.cli.web.report.run_page import Page, render
from pyggml.cli.web.report.series import charts_of

HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


class Seen(HTMLParser):
    """Tags of a page with their attributes, and the text inside each kind of them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open = tag

    def handle_data(self, data):
        self.texts.setdefault(self._open, []).append(data)


def _step(step, loss=1.0, **more):
    return {"event": "step", "step": step, "loss": loss, "lr": 1e-3, "grad_norm": 0.5} | more


def test_texts_of_others_stay_texts():
    norms = {"layers": [HOSTILE, "blk.0"], "columns": [HOSTILE], "norm": [[0.5], [0.1]]}
    page = Page(HOSTILE, [("data", HOSTILE)], {"prompt": HOSTILE}, HOSTILE, [("before", HOSTILE)])
    seen = Seen(
        render(page, [_step(1), {"event": "gradients", "step": 1, **norms}, _step(2, loss=HOSTILE)])
    )
    assert [tag for tag, _ in seen.tags].count("script") == 2
    assert not any(tag == "img" or "onerror" in about for tag, about in seen.tags)
    shown = HOSTILE.replace("\x1b", r"\x1b")
    assert seen.texts["mark"][:2] == [shown, shown], "the prompt, and the answer behind it"
    assert shown in seen.texts["td"] and shown in seen.texts["title"]
    charts = json.loads(seen.texts["script"][0])
    assert any(line["name"] == HOSTILE for chart in charts for line in chart["series"])


def test_the_head_says_what_the_run_is_of():
    about = [("model", "tiny, 2 blocks\nF32 100 %"), ("adapter", "rank 2"), ("data", "a.txt: 9")]
    when = "2026-01-02 03:04"
    page = Page("adapter", about, {}, command="pyggml finetune -m 'a b.gguf'", date=when)
    head = [text for text in Seen(render(page, [_step(1)])).texts["dd"] if text.strip()]
    assert head[:3] == ["tiny, 2 blocks", "a.txt: 9", when]
    assert "finetune -m &#39;a b.gguf&#39;" in render(page, [_step(1)])
    assert "<dt>command" not in render(Page("adapter", [], {}), [_step(1)])


def test_a_page_fetches_nothing():
    text = render(Page("adapter", [], {}), [_step(1)])
    seen = Seen(text)
    for tag, about in seen.tags:
        assert tag not in ("link", "iframe", "img", "base") and not {"src", "href"} & about.keys()
    policy = next(about["content"] for _, about in seen.tags if "http-equiv" in about)
    assert sum("sha256-" in word for word in policy.split()) == 4, (
        "styles of page, maps and text; script"
    )
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    assert not re.search(r"fetch\(|XMLHttpRequest|@import|url\(", text)


def test_gradients_have_maps_and_a_word_of_what_is_wrong():
    table = {"layers": ["blk.0", "blk.1"], "columns": ["ffn_up A"], "norm": [[0.5], [0.0]]}
    records = [_step(i) for i in (1, 2)]
    records += [{"event": "gradients", "step": i, **table} for i in (1, 2)]
    seen = Seen(render(Page("adapter", [], {}), records))
    assert "Gradients" in seen.texts["h2"]
    wrong = [t for t in seen.texts["li"] if t.strip()]
    assert wrong == ["blk.1: dead: the gradient is 0, 2 recorded steps, from 1 to 2"]
    titles = [about["aria-label"] for tag, about in seen.tags if tag == "svg"]
    assert titles == ["gradient norm ‖g‖, step 2", "gradient norm ‖g‖, over steps"]
    assert "Gradients" not in render(Page("adapter", [], {}), records[:2])


def test_charts_have_the_numbers_of_the_run():
    records = [_step(i, 2.0 / i) for i in range(1, 81)]
    records.insert(0, {"event": "validation", "step": 0, "loss": 3.0})
    records.append({"event": "validation", "step": 80, "loss": 0.5})
    loss, norm, rate = charts_of(records)
    assert loss["x"] == list(range(81))
    each, smooth, held_out = (line["y"] for line in loss["series"])
    assert each == [None, *(2.0 / i for i in range(1, 81))]
    assert smooth[:4] == [None] * 4 and smooth[4] == pytest.approx((2 + 1 + 2 / 3 + 0.5) / 4)
    assert smooth[80] == pytest.approx((2 / 80 + 2 / 79 + 2 / 78 + 2 / 77) / 4)
    assert held_out == [3.0, *[None] * 79, 0.5]
    assert (norm["series"][0]["y"], rate["series"][0]["y"]) == ([0.5] * 80, [1e-3] * 80)


def test_a_short_run_has_a_smooth_line_too_unless_it_has_hardly_steps():
    def names(n):
        loss, *_ = charts_of([_step(i) for i in range(1, n + 1)])
        return [line["name"] for line in loss["series"]]

    assert names(5) == ["each step"]
    assert names(6) == ["each step", "mean of 2 steps"]
    assert names(60) == ["each step", "mean of 3 steps"]


AXES = """
const { oneFormat, short } = pyggmlTicks;
const same = (given, wanted, isLog) => {
  const found = oneFormat(given, isLog).join(" ");
  if (found !== wanted) throw Error(`${found}, wanted ${wanted}`);
};
same([0, 0.05, 0.1], "0.00 0.05 0.10");
same([0, 5e-5, 1e-4, 1.5e-4], "0 0.5e-4 1.0e-4 1.5e-4");
same([0, 2.5e-4, 5e-4, 7.5e-4, 1e-3], "0 0.25e-3 0.50e-3 0.75e-3 1.00e-3");
same([0, 0.0005, 0.001, 0.0015, 0.002], "0.0000 0.0005 0.0010 0.0015 0.0020");
same([0, 2500, 5000], "0 2,500 5,000");
same([0, 5e7, 1e8], "0 0.5e8 1.0e8");
same([0.01, null, 0.1, 1], "0.01  0.1 1", true);
same([1e-6, null, 1e-5], "1e-6  1e-5", true);
same([], "");
same([0], "0");
same([-2, 0, 2], "-2 0 2");
if (short(2.1e-7) !== "2.1e-7" || short(12300) !== "12,300" || short(null) !== "") throw Error();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node (it runs the page's functions)")
def test_the_numbers_of_an_axis_have_one_format(tmp_path):
    script = tmp_path / "checks.js"
    script.write_text(part("pyggml.cli.web.report", "ticks.js") + AXES)
    ended = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_accuracy_has_a_chart_of_its_own():
    records = [{"event": "validation", "step": 0, "loss": 3.0, "token_accuracy": 0.1}]
    records += [_step(i, token_accuracy=0.1 * i) for i in (1, 2)]
    chart = next(c for c in charts_of(records) if c["title"] == "Token accuracy")
    assert [line["y"] for line in chart["series"]] == [[None, 0.1, 0.2], [0.1, None, None]]


def test_a_long_run_is_binned():
    (chart, *_) = charts_of([{"event": "step", "step": i, "loss": i % 2} for i in range(1, 4001)])
    each = [y for y in chart["series"][0]["y"] if y is not None]
    assert len(each) == 1000 and set(each) == {0.5}


def test_rewards_of_a_preference_run_are_drawn():
    rewards = {"chosen": 0.5, "rejected": -0.5, "margin": 1.0, "accuracy": 0.75}
    charts = {c["title"]: c for c in charts_of([_step(1, rewards=rewards)])}
    assert [line["y"] for line in charts["Rewards"]["series"]] == [[1.0], [0.5], [-0.5]]
    assert charts["Reward accuracy"]["series"][0]["y"] == [0.75]


def test_the_card_on_the_data_has_every_count_lengths_languages_and_losses():
    finding = {"what": "with an empty answer", "n": 2, "examples": ["<b>row</b>"]}
    data = {"lengths": [1, 2, 3, 4000], "answers": [1, 1, 2, 3], "scripts": [["Latin", 0.75]]}
    data |= {"n_rows": 9, "n_held_out": 1, "n_read": 10, "absent": ["repeating an earlier one"]}
    run = {"event": "run", "step": 0, "data": data | {"findings": [finding]}}
    losses = [[f"row {i}", 9.0 - i, None if i == 0 else 8.0 - i] for i in range(4)]
    rare = {"what": "in a language that few rows have", "n": 1, "examples": []}
    spoken = {"shares": [["en", 0.9], ["de", 0.06]], "untold": 0.04, "findings": [rare]}
    last = {"event": "answers", "step": 2, "prompt": "", "answers": [], "rows": losses}
    card = data_card([run, last | {"languages": spoken}])
    assert [(c["n"], c["text"]) for c in card["counts"]] == [
        (2, "with an empty answer"),
        (1, "in a language that few rows have"),
        (0, "repeating an earlier one"),
    ]
    assert card["rows"] == "9 rows to train on, 1 held out for validation"
    html = render(Page("t", [], {}), [run, _step(1), _step(2), last | {"languages": spoken}])
    assert "<td>4,000</td>" in html and "<td>90 %</td>" in html and "too short to tell" in html
    assert "</strong> rows with an empty answer" in html and "&lt;b&gt;row&lt;/b&gt;" in html
    assert "<td>no number</td>" in html and "<td>6.000</td><td>5.000</td>" in html
    assert "Latin" not in html, "one script is no news"
    assert "<h2>Data</h2>" not in render(Page("t", [], {}), [_step(1), _step(2)])


def test_a_run_leaves_its_report(finetune, tmp_path):
    ended = finetune()
    assert ended.code == 0 and ended.row("report") == str(tmp_path / "adapter.html")
    text = (tmp_path / "adapter.html").read_text()
    seen = Seen(text)
    assert ended.row("steps") in "".join(seen.texts["td"]) and "lora_rank" in seen.texts["span"]
    assert seen.texts["mark"].count("the ") == 2, "the prompt of both answers"
    losses = [t for t in seen.texts["h3"] if "mean loss" in t]
    assert len(losses) == 2 and losses[0].startswith("before: mean loss ")
    spans = [about for tag, about in seen.tags if tag == "span" and "title" in about]
    assert len(spans) >= 12 and all("rank" in about["title"] for about in spans[1:6])
    assert finetune().code == 0, "an older report is replaced"


def test_no_report_is_made_where_none_is_wanted(finetune, tmp_path):
    (tmp_path / "adapter.html").write_text("mine")
    refused = finetune()
    assert refused.code == 2 and "adapter.html: is there already, and is not" in refused.err
    assert finetune("--no-report").code == 0
    assert (tmp_path / "adapter.html").read_text() == "mine"


def test_a_stopped_run_has_metrics_and_report_too(finetune, signal_after, tmp_path):
    signal_after(2)
    assert finetune().code == 130
    lines = (tmp_path / "adapter.metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [
        "run",
        "validation",
        *("step", "gradients") * 2,
    ]
    assert "Before and after" not in (tmp_path / "adapter.html").read_text()


def test_an_unknown_logger_is_refused_before_the_work(finetune, tmp_path):
    ended = finetune("--log-to", "aim")
    assert ended.code == 2 and ended.out == "" and not list(tmp_path.iterdir())
    assert "--log-to aim is unknown, wanted some of tensorboard, wandb, mlflow" in ended.err
