"""Heat maps: each cell has its number's colour and words, and what is wrong has a mark."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from pyggml.look.draw import heat_map, heat_steps, kinds_of
from pyggml.look.draw.scale import N_LEVELS, Scale
from pyggml.look.overview import Measure, overview

pytestmark = pytest.mark.quick

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def measured():
    """Four layers with A and B of two modules at two steps, and an output that breaks."""
    steps = {}
    for step in (1, 5):
        found = {}
        for layer in range(4):
            for module in ("attn_q", "ffn_up"):
                a = 0.0 if (layer, module) == (2, "attn_q") else 10.0 ** (layer - step)
                found[f"blk.{layer}.{module}.weight.lora_a"] = Measure(a, float(a == 0), 2.0, 0.5)
                found[f"blk.{layer}.{module}.weight.lora_b"] = Measure(1.0, 0.25, step - 1.0, 0.5)
        found["output.weight"] = Measure(np.inf if step == 5 else 1.0, 0.0, 1.0, 0.1)
        steps[step] = found
    return overview(steps)


def cells(picture):
    """First line of its words → (class, all lines)."""
    found = {}
    for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect"):
        lines = rect.find(f"{SVG}title").text.splitlines()
        found[lines[0]] = rect.get("class"), lines
    return found


def test_a_cell_has_the_colour_and_the_words_of_its_number(measured):
    found = cells(heat_map(measured))
    assert found["blk.3 attn_q A, step 5"] == (
        "h3",
        ["blk.3 attn_q A, step 5", "‖g‖ 0.01", "‖ΔW‖ / ‖W‖ 0.25", "zeros 0.0%"],
    )
    assert found["blk.2 attn_q A, step 5"][0] == "hz"
    assert found["output weight, step 5"][0] == "hn"
    assert found["output weight, step 5"][1][-1] == "the gradient is not finite"
    assert "output attn_q A, step 5" not in found, "a tensor that is not there"
    first = cells(heat_map(measured, "ratio", step=1))
    assert first["blk.0 attn_q B, step 1"][0] == "unknown", "B was 0"
    moved = (np.array(measured.steps) < 5)[:, None, None]
    still = replace(measured, updates=measured.updates * moved)
    assert "step 1" in heat_map(still, "ratio") and "step 5" in heat_map(still)
    assert cells(heat_map(measured, "zeros"))["blk.0 attn_q B, step 5"][0] == "h2"


def test_marks_stand_on_what_is_wrong_and_are_explained(measured):
    picture = ElementTree.fromstring(heat_map(measured))
    texts = [t.text for t in picture.iter(f"{SVG}text")]
    assert "! output" in texts and "blk.0" in texts and "×" in texts
    assert "×  dead: the gradient is 0" in texts
    assert "!  not finite: the gradient holds NaN or infinity" in texts
    first = ElementTree.fromstring(heat_map(measured, step=1))
    assert not any("not finite: " in (t.text or "") for t in first.iter(f"{SVG}text"))


def test_steps_have_one_scale_and_as_many_tiles_as_tensors(measured):
    picture = heat_steps(measured)
    assert [t for t in ("step 1<", "step 5<") if t in picture] == ["step 1<", "step 5<"]
    assert len(re.findall(r"M[\d.]+ [\d.]+h6", picture)) == 2 * measured.there.sum()
    many = overview({s: {"blk.0.a.weight": Measure(1.0, 0.0)} for s in range(100)})
    assert len(re.findall(r"step \d+<", heat_steps(many, most=7))) == 7
    assert kinds_of(many) == ["norm"], "no update is known, and nothing is 0"
    assert kinds_of(measured) == ["norm", "ratio", "zeros"]


def test_names_of_others_stay_text():
    name = 'blk.0.<script>"&.weight'
    o = overview({1: {name: Measure(1.0, 0.0)}})
    assert "<script>" not in heat_map(o) + heat_steps(o)
    ElementTree.fromstring(heat_map(o))


def test_a_scale_spans_its_numbers_and_six_decades_at_most():
    scale = Scale.logarithmic(np.array([0.0, np.nan, np.inf, 1e-3, 1e3]))
    assert [scale.colour(x) for x in (0, 1e-3, 1.0, 1e3, np.inf)] == ["hz", "h0", "h4", "h8", "hn"]
    assert scale.at(0.5) == pytest.approx(1.0)
    wide = Scale.logarithmic(np.array([1e-20, 1.0]))
    assert wide.at(0) == pytest.approx(1e-6) and wide.colour(1e-20) == "h0"
    one = Scale.logarithmic(np.array([2.0]))
    assert one.colour(2.0) == f"h{N_LEVELS - 1}" and Scale.logarithmic(np.zeros(2)).at(0) == 1.0
