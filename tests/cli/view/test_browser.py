"""The view in a real browser where there is one: clicks, keys, and nothing in the console."""

import json
import threading
import time

import pytest
from view_pages import HOSTILE, press, served, step, until

from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import ViewedFile
from pyggml.lora.trainer.lock import hold

# -- the model ----------------------------------------------------------------------------------


def test_a_tensor_by_clicks_and_its_address(visit):
    page = visit("")
    page.click("text=blk.1 >> nth=0")
    page.click('[data-value="blk.1.attn_q.weight"]')
    page.wait_for_selector("h2:text-is('blk.1.attn_q.weight')")
    assert page.url.endswith("#/model/blk.1.attn_q.weight")
    assert page.locator(".bars rect").count() == 60
    assert "steps 1 to 8: attn_q A from" in page.get_attribute(".chart", "aria-label")
    page.reload()
    page.wait_for_selector("h2:text-is('blk.1.attn_q.weight')")
    chosen = page.locator('[aria-selected="true"]')
    assert chosen.count() == 1 and chosen.is_visible(), "its block is open"


def test_the_tree_is_walked_with_keys(visit):
    page = visit("")
    page.wait_for_selector('[role="treeitem"]')
    first = page.locator('[role="treeitem"]').first
    first.focus()
    focused = "document.activeElement.querySelector('.row span').textContent"
    names = []
    for _ in range(3):
        names.append(page.evaluate(focused))
        press(page, "ArrowDown")
    assert names == ["token_embd.weight", "blk.0", "blk.1"]
    assert page.evaluate(focused) == "output_norm.weight"
    press(page, "ArrowUp", "ArrowUp")
    assert page.evaluate(focused) == "blk.0"
    press(page, "ArrowRight", "ArrowRight", "Enter")
    page.wait_for_selector("h2:text-is('blk.0.attn_norm.weight')")
    assert page.evaluate(focused) == "attn_norm.weight"
    press(page, "ArrowLeft", "ArrowLeft")
    assert page.evaluate("document.activeElement.ariaExpanded") == "false"
    press(page, "End")
    assert page.evaluate(focused) == "output.weight"
    press(page, "Home")
    assert page.evaluate(focused) == "token_embd.weight"


def test_what_is_sought_and_opened_is_there_again(visit):
    page = visit("#/model?words=ffn_down&rank=16&open=LoRA")
    page.wait_for_selector("th:text-is('rank 16')")
    assert page.input_value('[aria-label="Find a tensor"]') == "ffn_down"
    page.click("summary:text-is('LoRA')")
    until(page, lambda: "LoRA" not in page.url)
    page.fill('[aria-label="Find a tensor"]', "attn_q")
    page.click('[data-value="blk.1.attn_q.weight"]')
    page.wait_for_selector("h2:text-is('blk.1.attn_q.weight')")
    page.reload()
    page.wait_for_selector("h2:text-is('blk.1.attn_q.weight')")
    assert page.input_value('[aria-label="Find a tensor"]') == "attn_q"


def test_tensors_are_sought_and_ranks_cost(visit):
    page = visit("")
    page.fill('[aria-label="Find a tensor"]', "ffn_down")
    assert page.locator('[role="treeitem"]:not([aria-expanded])').count() == 2
    page.click("summary:text-is('LoRA')")
    before = page.inner_text("details[data-title=LoRA]")
    page.fill("input[name=rank]", "16")
    press(page, "Tab")
    page.wait_for_selector("th:text-is('rank 16')")
    assert page.inner_text("details[data-title=LoRA]") != before


# -- runs ---------------------------------------------------------------------------------------


def test_a_finished_run_is_shown(visit):
    page = visit("#/run")
    page.wait_for_selector("p:text-is('finished: step 8 of 8')")
    assert page.locator(".chart canvas").count() >= 2
    assert "Loss, steps 1 to 8: each step from 5.000 to 0.6250" in page.get_attribute(
        ".chart >> nth=0", "aria-label"
    )
    assert page.locator("article pre").text_content() == f"the {HOSTILE}"
    page.click("[role=tab]:text-is('Gradients')")
    page.wait_for_selector("output:has-text('step 8, measured at 8 steps')")
    page.locator('input[aria-label="Step"]').focus()
    press(page, "ArrowLeft")
    page.wait_for_selector("svg text:has-text('gradient norm ‖g‖, step 7')")
    page.select_option("select[name=kind]", "ratio")
    page.wait_for_selector("svg text:has-text('‖ΔW‖ / ‖W‖, step 7')")
    page.reload()
    page.wait_for_selector("svg text:has-text('‖ΔW‖ / ‖W‖, step 7')")
    press(page, "Tab")
    page.locator("[role=tab][aria-selected=true]").focus()
    press(page, "ArrowRight")
    assert "part=data" in page.url
    data = page.locator("section.data")
    assert data.locator(".counts li").all_inner_texts()[1] == "0\nrows with an empty answer"
    data.locator("summary").click()
    assert data.locator("details p").inner_text() == HOSTILE
    assert data.locator(".shares tbody tr").count() == 2
    assert data.locator(".losses tbody tr").first.inner_text() == "highest\t9.000\t8.500\thard"
    assert not page.locator("main img").count()


def test_a_run_under_way_grows(browser, tiny, tmp_path):
    with served(make_app(ViewedFile(tiny), Runs(tmp_path))) as url:
        page = browser.new_page()
        said = []
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"{url}#/run")
        page.wait_for_selector("text=The folder has no run yet")
        with hold(tmp_path / "live.gguf"):
            page.wait_for_selector("text=It has started")
            path = tmp_path / "live.metrics.jsonl"
            path.write_text(json.dumps(step(1)) + "\n")
            page.wait_for_selector("p:has-text('under way: step 1 of 8')")
            canvas = page.locator(".chart canvas").first.element_handle()
            with path.open("a") as file:
                for i in range(2, 5):
                    file.write(json.dumps(step(i)) + "\n")
                file.write('{"event": "st')
            page.wait_for_selector("p:has-text('under way: step 4 of 8')")
            assert canvas.is_visible(), "the chart got numbers, and is no new one"
        page.wait_for_selector("p:has-text('stopped before its end: step 4 of 8')")
        path.unlink()
        page.wait_for_selector("text=The folder has no run live")
        page.close()
        assert not said


def test_runs_are_sorted_and_laid_over_each_other(browser, tiny, tmp_path):
    for name, factor in (("one", 1), ("two", 3), ("three", 2)):
        records = [step(i) | {"loss": factor * 5 / i} for i in range(1, 9)]
        path = tmp_path / f"{name}.metrics.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
    with served(make_app(ViewedFile(tiny), Runs(tmp_path))) as url:
        page, said = browser.new_page(), []
        page.on("console", lambda message: said.append(message.text))
        page.goto(f"{url}#/run/two")

        def order():
            return page.locator(".runs tbody a").all_inner_texts()

        page.click("th button:text-is('final loss')")
        page.wait_for_selector("[aria-sort=ascending]")
        assert order() == ["one", "three", "two"]
        page.click("th button:text-is('final loss')")
        page.wait_for_selector("[aria-sort=descending]")
        assert order() == ["two", "three", "one"] and "down=1" in page.url
        for name in ("one", "three"):
            page.check(f"[aria-label='Lay {name} over others']")
        page.wait_for_selector("section[aria-label^='Runs laid'] canvas")
        legend = page.locator("section[aria-label^='Runs laid'] .u-legend").first.inner_text()
        assert "one" in legend and "three" in legend and "two" not in legend
        page.reload()
        page.wait_for_selector("section[aria-label^='Runs laid'] canvas")
        page.click(".runs a:text-is('one')")
        page.wait_for_selector("h2:text-is('one')")
        assert order() == ["two", "three", "one"], "sorted as before"
        page.close()
        assert not said


def test_a_legend_has_the_last_numbers_before_it_is_pointed_at(visit):
    page = visit("#/run")
    page.wait_for_selector(".u-legend")
    values = page.locator(".u-legend >> nth=0").locator(".u-value").all_inner_texts()
    assert values[:2] == ["8", "0.625"]


# -- texts --------------------------------------------------------------------------------------


def test_the_losses_of_a_text(visit):
    page = visit("#/text")
    page.fill("textarea", HOSTILE)
    page.click("button:text-is('Losses')")
    page.wait_for_selector(".tokens [role=button]")
    assert not page.locator("main img").count()
    token = page.locator(".tokens [role=button]").nth(1)
    token.click()
    press(page, "ArrowRight")
    assert "rank" in page.inner_text("pre[role=status]")
    assert page.evaluate("document.activeElement.ariaPressed") == "true"


def test_attention_by_head(visit):
    page = visit("#/text")
    page.fill("textarea", "the other path")
    page.fill("input[name=block]", "1")
    page.click("button:text-is('Attention')")
    page.wait_for_selector("canvas.map")
    about = page.locator("canvas.map").get_attribute
    assert about("aria-label").startswith("attention of head 0 of block 1")
    page.select_option("select[name=head]", "3")
    assert "head 3" in about("aria-label")
    page.click("canvas.map", position={"x": 5, "y": 5})
    assert page.locator(".reading [aria-pressed=true]").inner_text() == "th"
    assert page.locator("main p[role=status] >> nth=-1").inner_text() == "“th” reads “th” 100 %"
    for names in (".mapped .rows span", ".mapped .columns span"):
        assert page.locator(names).all_inner_texts()[:2] == ["th", "e"]
    first = [page.locator(f".mapped .{n} span").first.bounding_box() for n in ("rows", "columns")]
    box = page.locator("canvas.map").bounding_box()
    assert abs(first[0]["y"] - box["y"]) < 2 and abs(first[1]["x"] - box["x"]) < 2


def test_a_computation_is_stopped(visit, monkeypatch):
    from pyggml.cli.commands.view import reading

    ended = threading.Event()
    real = reading.lens.token_table

    def slow(model, ids):
        try:
            while True:
                real(model, ids)
                time.sleep(0.02)
        finally:
            ended.set()

    monkeypatch.setattr(reading.lens, "token_table", slow)
    page = visit("#/text")
    page.fill("textarea", "the other path")
    for stop in (lambda: page.click("button:text-is('Stop')"), lambda: press(page, "Escape")):
        page.click("button:text-is('Losses')")
        page.wait_for_selector("p:has-text('computing')")
        page.focus("textarea")
        stop()
        page.wait_for_selector("p:text-is('stopped')")
        assert ended.wait(120) and page.is_disabled("button:text-is('Stop')")
        ended.clear()


def test_what_is_asked_of_a_text_and_chosen_stands_in_the_address(visit):
    page = visit("#/text")
    page.wait_for_selector("button[name=heads]:not([disabled])")
    page.fill("textarea", "the other path")
    page.click("button:text-is('All heads')")
    page.wait_for_selector(".heads canvas")
    page.click("[aria-label='head 2 of block 1']")
    page.wait_for_selector("canvas.map")
    assert page.input_value("select[name=head]") == "2" and "block=1" in page.url
    page.locator(".reading [role=button]").nth(1).click()
    page.reload()
    page.wait_for_selector("canvas.map")
    assert page.input_value("select[name=head]") == "2"
    assert page.locator(".reading [aria-pressed=true]").inner_text() == "e"
    page.go_back()
    page.wait_for_selector(".heads canvas")
    page.go_back()
    page.wait_for_selector("section.card[hidden]", state="attached")


def test_a_patch_at_a_click(visit):
    page = visit("#/text?text=the+other+path&ask=lens")
    page.locator(".lens td").nth(2).click()
    page.wait_for_selector("h3:has-text('blk.0.out at')")
    moved = page.inner_text(".moves")
    page.fill("[aria-label='Another text']", "the ether path")
    press(page, "Enter")
    until(page, lambda: "other=" in page.url and page.inner_text(".moves") != moved)
    page.locator(".lens [aria-selected=true]").focus()
    press(page, "ArrowDown", "ArrowRight")
    page.wait_for_selector("h3:has-text('blk.1.out at')")
    page.reload()
    page.wait_for_selector("h3:has-text('blk.1.out at')")
    assert page.input_value("[aria-label='Another text']") == "the ether path"


def test_what_adds_to_a_logit(visit):
    page = visit("#/text?text=the+other+path&ask=attribution")
    page.wait_for_selector(".signed :text-is('blk.1.ffn_out')")
    page.locator(".reading [role=button]").nth(2).click()
    until(page, lambda: "at=2" in page.url)
    page.reload()
    page.wait_for_selector(".reading [aria-pressed=true]")
    assert page.locator(".reading span").nth(2).get_attribute("aria-pressed") == "true"


# -- the whole ----------------------------------------------------------------------------------


PLACES = [
    *("model/blk.0.attn_q.weight", "graph?section=1&node=2", "graph?section=1&direction=backward"),
    *("backward?step=20", "backward?text=the+path&part=1", "plan", "plan?kind=net", "run", "text"),
    *(f"text?text=the+path&ask={name}&block=1&at=2" for name in ("heads", "lens", "attribution")),
]


@pytest.mark.parametrize("place", PLACES)
def test_nothing_is_wider_than_the_window(visit, place):
    page = visit(f"#/{place}", 1600)
    page.wait_for_selector("main .card:visible")
    page.wait_for_timeout(300)
    for width in (1600, 700, 320):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


SIDEWAYS = """() => [...document.querySelectorAll("main *")].filter((node) =>
    /auto|scroll/.test(getComputedStyle(node).overflowX) && node.scrollWidth > node.clientWidth + 1
).map((node) => node.className)"""


@pytest.mark.parametrize(
    "place", ["plan?node=3", "graph?section=1&direction=backward", "backward?step=20"]
)
def test_on_a_phone_no_picture_scrolls_sideways_in_its_card(visit, place):
    page = visit(f"#/{place}", 390)
    page.wait_for_selector("svg.drawn")
    page.wait_for_timeout(300)
    assert page.evaluate(SIDEWAYS) == []


@pytest.mark.parametrize("place", ["#/toString", "#/%E0%A4%A", "#/model/%00", "#/plan?node=x"])
def test_a_strange_address_leads_somewhere(visit, place):
    page = visit(place)
    page.wait_for_selector("nav [aria-current=page]")
    page.wait_for_selector("main .card:visible")
    page.wait_for_timeout(300)
    visit.said[:] = [said for said in visit.said if "status of 404" not in said]


def test_an_answer_that_comes_late_is_not_drawn_over_another_view(visit, monkeypatch):
    about = ViewedFile.about
    monkeypatch.setattr(ViewedFile, "about", lambda self: (time.sleep(1), about(self))[1])
    page = visit("#/graph")
    page.wait_for_selector("[data-section]")
    page.click("nav a:text-is('Model')")
    page.click("nav a:text-is('Graph')")
    page.wait_for_selector("[data-section]")
    page.wait_for_timeout(1500)  # the model's view comes late
    assert page.locator("[data-section]").count() and not page.locator("[role=tree]").count()


def test_every_view_is_reached_with_the_keyboard(visit):
    page = visit("")
    page.wait_for_selector('[role="treeitem"]')
    press(page, "Tab")
    assert page.evaluate("document.activeElement.textContent") == "To the content"
    views = {
        "Model": "model",
        "Graph": "graph",
        "Backward": "backward",
        "Memory": "plan",
        "Runs": "run",
        "Text": "text",
    }
    for name, path in views.items():
        press(page, "Tab")
        assert page.evaluate("document.activeElement.textContent") == name
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", "focus is seen"
        press(page, "Enter")
        page.wait_for_selector(f'a[href="#/{path}"][aria-current="page"]')
