"""Pictures of graphs: equal blocks are one, nodes stand below their sources, nothing is lost."""

import re
import sys
from html import escape
from itertools import pairwise
from xml.etree import ElementTree

import numpy as np
import pytest
from extras import need, needs
from graphs import graphs
from hypothesis import given, settings
from processes import printed
from tiny_models import zero_parts

from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.draw import constants, inside, lanes, overview, page, picture
from pyggml.look.draw.fold import op_counts, sections
from pyggml.look.draw.layers import place_in_layers
from pyggml.models import (
    Inputs,
    build_loss,
)
from pyggml.models.low_rank import LoraPair
from pyggml.ops import add, mul, scale, sqr, sum_

N_VOCAB, N_TOKENS = 11, 3


def training_graph(architecture):
    """The loss of a small model of zeros, and the gradients of an adapter on a matrix a block."""
    sizes = {"block_count": 4}
    if architecture == "lfm2":  # blocks of two kinds in turn
        sizes["attention.head_count_kv"] = np.array([0, 2, 0, 2], np.int32)
    parts = zero_parts(architecture, N_VOCAB, sizes)
    pairs = {
        name: LoraPair(zeros((2, w.shape[1]), F32, f"{name}.a"), zeros((w.shape[0], 2)), 1.0)
        for name, w in parts.weights.items()
        if name.endswith(("attn_output.weight", "ssm_out.weight", "out_proj.weight"))
    }
    targets, weights = zeros((N_TOKENS,), I32), zeros((N_TOKENS,))
    forward = build_loss(parts, Inputs.empty(N_TOKENS), targets, weights, [pairs])
    return build_backward(forward, [t for p in pairs.values() for t in (p.a, p.b)])


@pytest.fixture(scope="module")
def graph():
    return training_graph("llama")


# -- sections -------------------------------------------------------------------------------------


@pytest.mark.quick
def test_equal_blocks_are_one_section(graph):
    found = sections(graph)
    assert [(s.title, s.n) for s in found] == [
        ("start", 1),
        ("block 0", 1),
        ("blocks 1 to 3", 3),
        ("end", 1),
    ]
    assert dict(op_counts(found[2].forward))["flash_attn_ext"] == 1
    assert dict(op_counts(found[2].backward))["flash_attn_back"] == 1
    assert "flash_attn_back" not in dict(op_counts(found[0].backward))


@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "mamba", "qwen3moe", "gpt2", "phi2"])
def test_every_node_is_in_one_section(architecture):
    """Of a run of equal blocks the first stands for all, so nodes count as often as it repeats."""
    graph = training_graph(architecture)
    found = sections(graph)
    drawn = sum(s.n * (len(s.forward) + len(s.backward)) for s in found)
    assert drawn == len(graph.nodes)
    blocks = sum(s.n for s in found if s.title.startswith("block"))
    assert blocks == 4 and len(found) < 7


def test_a_graph_without_blocks_is_one_section():
    x = leaf(np.ones(3, np.float32), "x")
    (only,) = sections(Graph.of(add(sqr(x), scale(x, 2.0))))
    assert (only.title, only.n, len(only.forward), only.backward) == ("start", 1, 3, ())


# -- layers ---------------------------------------------------------------------------------------


@given(graphs())
@settings(max_examples=30)
def test_nodes_stand_below_their_sources_and_apart(graph):
    need("igraph")
    found = place_in_layers(graph.nodes)
    assert found.places.keys() == set(graph.nodes)
    for (source, reader), way in found.ways.items():
        assert found.places[source][1] < found.places[reader][1]
        heights = [y for _, y in way]
        assert heights == sorted(heights)
        assert (way[0], way[-1]) == (found.places[source], found.places[reader])
    places = sorted((y, x) for x, y in found.places.values())
    for (y, x), (other_y, other_x) in pairwise(places):
        assert y < other_y or other_x - x >= 0.99
    assert len(found.ways) == sum(len({s for s in t.src if s.op is not None}) for t in graph.nodes)


# -- pictures -------------------------------------------------------------------------------------


def test_pictures_are_xml_and_need_no_network(graph):
    need("igraph")
    section = sections(graph)[2]
    made = plan(graph, CPU())
    for text in (overview(graph), inside(section.forward, "forward"), lanes(made)):
        ElementTree.fromstring(text)
    text = page(graph, made)
    assert not re.search(r"(?:src|href)=|@import|url\((?!#)", text)
    assert text.count("<details>") == 4
    assert picture(graph) == overview(graph)


def test_the_overview_tells_ops_and_shapes(graph):
    text = overview(graph).replace("\u00a0", " ")
    assert "blocks 1 to 3  ×3" in text and "rms_norm_mul ×2" in text
    assert text.count(f"F32[{N_TOKENS}, 256]") == 5  # three down, two up


def test_a_page_draws_a_small_graph_whole():
    need("igraph")
    x = leaf(np.ones(3, np.float32), "x")
    for _ in range(9):
        x = scale(x, 2.0)
    small = Graph.of(x)
    text = page(small)
    assert text.count('class="box forward"') == 9 and "<details>" not in text


def test_constants_are_shown():
    need("igraph")
    x, two = (leaf(np.full(n, 2.5, np.float32), name) for n, name in ((3, "x"), (1, "two")))
    assert constants(scale(x, 0.125)) == "s 0.125, b 0"
    assert (constants(two), constants(x), constants(sqr(x))) == ("2.5", "", "")
    text = picture(Graph.of(scale(mul(x, two), 0.125)))
    assert ">s 0.125, b 0</text>" in text and ">two  2.5</text>" in text
    assert "constants s 0.125, b 0" in text


def test_what_a_section_reads_of_others_is_drawn(graph):
    """The residual stream into a block and, backward, its gradient, but no other activation."""
    need("igraph")
    forward = {t for section in sections(graph) for t in section.forward}
    first, folded = sections(graph)[1:3]
    into = inside(folded.forward, "forward")
    assert into.count('class="box input"') >= 1
    assert into.count("data-node=") == len(folded.forward)
    (stream,) = {s for t in folded.forward for s in t.src if s in first.forward}
    assert f"<title>{escape(repr(stream))}" in into
    drawn = inside(first.backward, "backward", forward=forward)
    own = {*first.backward}
    read = {s for t in first.backward for s in t.src if s.op and s not in own | forward}
    assert drawn.count('class="box input"') == len(read) > 0
    assert inside(first.backward, "backward").count('class="box input"') > len(read)


def test_no_label_stands_on_another(graph):
    """One label for a source, however many nodes read it; none at the place of another."""
    need("igraph")
    section = sections(graph)[2]
    for text in (inside(section.forward, "forward"), overview(graph)):
        places = re.findall(r'<text class="faint[^"]*" x="([^"]*)" y="([^"]*)"', text)
        assert len(places) == len(set(places)) > 3


def test_lanes_have_names_and_round_numbers(graph):
    a = sqr(leaf(np.ones(2000, np.float32), "x"))
    a.name = "squares"
    few = plan(Graph.of(add(mul(a, a), scale(a, 2.0))), CPU())
    texts = [t for t in ElementTree.fromstring(lanes(few)) if t.tag.endswith("text")]
    assert "squares" in [t.text for t in texts if t.get("class") == "inlane"]
    texts = [t for t in ElementTree.fromstring(lanes(plan(graph, CPU()))) if t.tag.endswith("text")]
    numbers = [t.text for t in texts if t.get("class") == "faint"]
    sizes = [float(t.split()[0]) for t in numbers if t.endswith("B")]
    assert sizes[0] == 0 and len({t.split()[1] for t in numbers if t.endswith("B")}) == 1
    steps = {round(b - a, 9) for a, b in pairwise(sizes)}
    assert len(steps) == 1 and f"{steps.pop():e}"[0] in "125"


def test_of_a_small_graph_every_node_and_leaf_is_drawn(monkeypatch):
    need("igraph")
    x, w = (leaf(np.ones(3, np.float32), name) for name in "xw")
    small = build_backward(Graph.of(sum_(sqr(mul(x, w)))), [w])
    text = picture(small)
    assert text.count('class="box leaf"') == len(small.leaves) == 3
    assert text.count('class="box forward"') == 3
    assert text.count('class="box backward"') == len(small.nodes) - 3 > 0
    monkeypatch.setitem(sys.modules, "igraph", None)
    assert picture(small) == overview(small)


SHOWN = """
from IPython.core.interactiveshell import InteractiveShell
formats = InteractiveShell.instance().display_formatter
import pyggml
from pyggml.graph import Graph, zeros
from pyggml.look.draw import picture
graph = Graph.of(pyggml.ops.silu(zeros((3,), name="x")))
data, _ = formats.format(graph)
assert data["text/plain"] == repr(graph), data
assert data["image/svg+xml"] == picture(graph), data
"""


@needs("IPython")
def test_a_notebook_shows_a_graph_as_its_picture(tmp_path):
    printed(SHOWN, IPYTHONDIR=str(tmp_path))


def test_the_inside_marks_what_reads_a_parameter(graph):
    need("igraph")
    section = sections(graph)[1]
    a = next(s for t in section.forward for s in t.src if s.name.endswith(".a"))
    text = inside(section.forward, "forward", {a})
    assert text.count('class="box trained"') == 1
    assert text.count('class="box forward"') == len(section.forward) - 1


@pytest.mark.quick
def test_lanes_are_as_wide_as_tensors_live_and_as_high_as_they_are_large(graph):
    made = plan(graph, CPU())
    rectangles = [
        r for r in ElementTree.fromstring(lanes(made)) if r.get("class", "").startswith("lane")
    ]
    legend = 3
    assert len(rectangles) == len(made.offsets) + len(made.scratch) + legend
    t = max(made.offsets, key=lambda t: t.n_bytes)
    (found,) = [r for r in rectangles if r[0].text.startswith(f"{t!r}\n")][:1]
    life, n = made.lives[t], len(graph.nodes)
    width = (min(life.last, n - 1) - life.first + 1) / n * 900
    assert float(found.get("width")) == pytest.approx(width, abs=0.01)
    assert float(found.get("height")) == pytest.approx(t.n_bytes / made.n_bytes * 420, abs=0.01)
