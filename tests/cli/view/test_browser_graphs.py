"""Graphs, passes, plans and a backward pass in a real browser: clicks, keys, and what is drawn."""

import pytest
from view_pages import HOSTILE, press, until


def test_a_section_opens_and_a_node_is_told(visit):
    page = visit("#/graph")
    page.click('[data-section="1"] >> nth=0')
    page.wait_for_selector("h2:has-text('block 0, forward')")
    page.click('.picked [data-node="1"]')
    page.wait_for_selector("[data-chosen]")
    options = page.get_by_role("listbox", name="Nodes").locator('[aria-selected="true"]')
    assert options.count() == 1 and options.inner_text().startswith("mul_mat")
    options.focus()
    press(page, "ArrowDown")
    page.wait_for_selector('[data-chosen][data-node="2"]')
    assert "node=2" in page.url
    page.go_back()
    page.wait_for_selector('[data-chosen][data-node="1"]')
    page.click("a:has-text('blk.0.attn_q.weight')")
    page.wait_for_selector("h2:text-is('blk.0.attn_q.weight')")


@pytest.mark.parametrize("width", [1280, 1600])
def test_no_box_of_the_overview_is_clipped(visit, width):
    page = visit("#/graph", width)
    page.wait_for_selector("[data-section]")
    frame = page.locator(".parts")
    assert frame.evaluate("node => node.scrollWidth <= node.clientWidth")


def test_the_line_of_the_moment_has_its_name(visit):
    page = visit("#/plan?node=3")
    page.wait_for_selector(".lanes text.title:has-text('node 3: ')")
    assert "upright line is the moment" in page.inner_text("main")


def test_text_begins_with_a_text(visit):
    page = visit("#/text")
    page.wait_for_selector("button[name=losses]:not([disabled])")
    assert page.input_value("textarea") == f"the {HOSTILE}"


def test_a_search_leads_to_the_node(visit):
    page = visit("#/graph")
    page.fill('[aria-label="Find nodes"]', "blk.1.attn_q.weight")
    press(page, "Enter")
    hits = page.get_by_role("listbox", name="Nodes found").locator('[role="option"]')
    hits.first.click()
    page.wait_for_selector("[data-chosen]")
    assert "attn_q" in page.locator("[data-chosen]").text_content()


def test_the_pass_stands_in_the_address(visit):
    page = visit("#/plan")
    page.wait_for_selector(".lanes svg")
    assert page.input_value("input[name=ctx]") == "64", "as much as the model takes"
    page.fill("input[name=ctx]", "32")
    page.select_option("select[name=keep]", "layers")
    page.click("button:text-is('Show')")
    page.wait_for_function("location.hash.includes('ctx=32') && location.hash.includes('layers')")
    page.wait_for_selector(".lanes svg")
    page.fill("input[name=ctx]", "100")
    page.click("button:text-is('Show')")
    page.wait_for_selector(".fault:has-text('ctx is 100, wanted at most the model')")
    (told,) = visit.said
    assert "status of 400" in told, "the browser's own note"
    visit.said.clear()


def test_what_is_alive_follows_the_slider_and_the_click(visit):
    page = visit("#/plan?node=3")
    page.wait_for_selector("output:has-text('node 3 of')")
    page.locator("input[type=range]").focus()
    press(page, "ArrowRight")
    page.wait_for_selector("output:has-text('node 4 of')")
    assert page.url.endswith("node=4")
    page.click(".lanes svg", position={"x": 600, "y": 200})
    assert "node 4 of" not in page.inner_text("output")
    page.click("button:text-is('Peak')")
    page.wait_for_selector("section[aria-live] td")


def test_the_graph_is_played_through_its_passes(visit):
    page = visit("#/graph?section=1")
    page.wait_for_selector(".picked svg")
    n = page.get_by_role("listbox", name="Passes").locator("[role=option]").count()
    page.click("[role=option]:has-text('as built')")
    page.wait_for_selector("output:has-text('1 of')")
    assert not page.locator(".part.backward").count()
    press(page, "ArrowRight")
    page.wait_for_selector(".part.backward .new")
    assert "stage=1" in page.url and "section=1" in page.url
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector(f"output:has-text('{n} of {n}: plan')", timeout=60_000)
    page.wait_for_selector(".frame rect.lane")
    page.wait_for_selector("button:text-is('Play')")
    page.go_back()
    page.wait_for_selector("output:has-text(': round_in_products')")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_backward_section_is_seen_at_once_and_zoomed(visit, width):
    page = visit("#/graph?section=1&direction=backward", width)
    page.wait_for_selector(".picked svg")
    seen = """() => {
        const frame = document.querySelector(".picked .frame").getBoundingClientRect();
        return [...document.querySelectorAll(".picked [data-node]")].filter((node) => {
            const box = node.getBoundingClientRect();
            return box.left >= frame.left && box.right <= frame.right
                && box.top >= frame.top && box.bottom <= frame.bottom && box.width > LEAST;
        }).length;
    }"""
    until(page, lambda: page.evaluate(seen.replace("LEAST", "40")) > 0)
    seen = seen.replace("LEAST", "0")
    page.click(".picked button:text-is('Fit')")
    n = page.locator(".picked [data-node]").count()
    assert page.evaluate(seen) == n
    page.click(".picked [aria-label='Larger']")
    page.locator(".picked .frame").focus()
    press(page, "+", "+", "+")
    assert page.evaluate(seen) < n
    press(page, "0")
    assert page.evaluate(seen) == n


def test_a_small_net_runs_backward_node_by_node(visit):
    page = visit("#/backward")
    page.wait_for_selector("output:has-text('15 of 29: scale, backward')")
    assert page.locator("[data-state=later]").count() == 14
    press(page, "ArrowRight", "ArrowRight")
    page.wait_for_selector("output:has-text('17 of 29: sqr_back')")
    assert page.url.endswith("step=16") and "backward of" in page.inner_text(".told")
    page.reload()
    page.wait_for_selector("output:has-text('17 of 29: sqr_back')")
    page.hover("[data-node]:has-text('tanh') >> nth=0")
    page.wait_for_selector(".told h3:has-text('tanh hidden')")
    told = page.inner_text(".told")
    assert "of the arena, from node 2 to" in told and "which comes at step 26" in told
    assert page.locator(".told table.numbers").count() == 2, "its numbers and its gradient's"
    page.mouse.move(5, 5)
    page.wait_for_selector(".told h3:has-text('sqr_back')")
    page.click(".told button.link:has-text('repeat 15')")
    page.wait_for_selector("output:has-text('16 of 29: repeat')")
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector("output:has-text('18 of 29')", timeout=20_000)
    page.get_by_role("button", name="Pause").click()
    press(page, "Home")
    page.wait_for_selector("output:has-text('1 of 29: mul_mat w1·x, forward')")


def test_a_block_of_the_file_runs_backward(visit):
    page = visit("#/backward")
    page.wait_for_selector("output:has-text('15 of 29')")
    page.select_option("select[name=kind]", "text")
    page.wait_for_selector("figcaption:text-is('backward')")
    page.select_option("select[name=part]", label="block 1")
    until(page, lambda: "part=2" in page.url)
    page.wait_for_selector("[data-state=now]")
    page.reload()
    page.wait_for_selector("[data-state=now]")
    assert page.locator("select[name=part] option:checked").inner_text() == "block 1"
    assert page.input_value("textarea") == f"the {HOSTILE}" and not page.locator("main img").count()
