"""Graphs and plans: what is drawn, found and alive."""

from collections import Counter

import pytest
from extras import reason
from starlette.testclient import TestClient

import pyggml
from pyggml.alloc.usage import bytes_at, moment, peak
from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.pictures import Pictures
from pyggml.cli.commands.view.queries import PassQuery
from pyggml.cli.commands.view.runs import Runs
from pyggml.cli.commands.view.source import NoSource
from pyggml.graph import Graph
from pyggml.lora import LoraConfig, attach
from pyggml.lora.trainer.passes import Passes
from pyggml.models import Inputs, build
from pyggml.requantize import requantize

pytest.importorskip("igraph", reason=reason("igraph"))
PASS = {"ctx": 16, "batch": 2, "rank": 3, "modules": "attn_q,ffn_down"}


@pytest.fixture(scope="module")
def plan_facts(tiny):
    """The plan that PASS asks for, made by hand."""
    adapter = attach(pyggml.load(tiny), LoraConfig(rank=3, modules=("attn_q", "ffn_down")))
    passes = Passes(adapter.model, adapter.parameters, 32, n_ctx=16)
    (found,) = passes.training.plans.values()
    return found


def test_a_training_graph(ask, plan_facts):
    found = ask("graph", **PASS)
    assert found["n_nodes"] == len(plan_facts.graph.nodes)
    assert dict(found["ops"])["flash_attn_back"] == 2
    graph_facts = sum(s["n"] * (s["forward"] + s["backward"]) for s in found["sections"])
    assert graph_facts == found["n_nodes"]
    assert [s["index"] for s in found["sections"]] == list(range(len(found["sections"])))
    assert found["sections"][1]["forward_ops"][0][0] == "rms_norm_mul"
    assert found["streams"][0] == "F32[32, 32]"


def test_the_passes_of_a_graph_are_told_and_what_each_changes(ask, plan_facts):
    """As built, with its backward, each pass by its name, and the plan."""
    last = ask("graph", **PASS)
    names = [stage["name"] for stage in last["stages"]]
    assert names[:2] == ["as built", "build_backward"] and names[-1] == "plan"
    assert {"rematerialise", "by_table"} < {*names}
    assert len(names) > len({*names}), "of some passes both what they take and what they make"
    assert last["stage"] == len(names) - 2, (
        "the graph as it is planned, unless another is asked for"
    )
    found = [ask("graph", stage=i, **PASS) for i in range(len(names) - 1)]
    assert not any(s["backward"] for s in found[0]["sections"])
    for i, (stage, before) in enumerate(zip(found[1:], found, strict=False), 1):
        new, gone = (
            sum(s["n"] * s[f"{way}_marked"].get(mark, 0) for s in stage["sections"]
                for way in ("forward", "backward"))
            for mark in ("new", "gone")
        )  # fmt: skip
        if gone:
            assert found[i]["n_nodes"] - found[i + 1]["n_nodes"] <= gone and not new
            assert f"takes {gone}" in last["stages"][i]["told"]
        else:
            assert f"makes {new}" in last["stages"][i]["told"] or not new
            assert stage["n_nodes"] <= before["n_nodes"] + new
    plan = ask("graph", stage=len(names) - 1, **PASS)
    assert plan["plan"] and "sections" not in plan


def test_what_a_pass_takes_and_makes_is_coloured(ask):
    stages = ask("graph", **PASS)["stages"]
    takes = next(i for i, stage in enumerate(stages) if stage["told"].startswith("takes"))
    fields = {"section": 1, "direction": "backward"}
    before, after = (ask("graph/section", stage=i, **fields, **PASS) for i in (takes, takes + 1))
    for found, mark, other in ((before, "gone", "new"), (after, "new", "gone")):
        marked = [i for i, node in enumerate(found["nodes"]) if node["mark"] == mark]
        assert marked and not any(node["mark"] == other for node in found["nodes"])
        assert found["svg"].count(f' {mark}"') == len(marked)
        assert not any(node["planned"] or node["lives"] for node in found["nodes"])
    sought = ask("graph/search", words="swiglu_back", stage=0, **PASS)
    assert sought["n_hits"] == 0 and ask("graph/search", words="swiglu_back", **PASS)["n_hits"]


def test_the_small_net_needs_no_model(folder):
    with TestClient(make_app(NoSource(), Runs(folder)), "http://localhost") as client:
        found = client.get("/api/graph?kind=net&ctx=3").json()
        assert found["svg"].count("data-node") == found["n_nodes"] + found["n_leaves"]
        assert found["pass"]["ctx"] == 0, "which counts for nothing here"
        assert client.get("/api/plan?kind=net&wide=300").json()["axis"] == [64, 300]
        answer = client.get("/api/graph")
        assert answer.status_code == 409 and "no model was named" in answer.text


def test_the_graph_of_logits_has_no_backward_nodes(ask):
    found = ask("graph", kind="logits", ctx=8)
    assert not any(s["backward"] for s in found["sections"])


def test_logits_are_planned_as_a_run_plans_them(tiny, tmp_path):
    """With what a device puts for some nodes: here products that add LoRA's part are one."""
    requantize(tiny, tmp_path / "packed.gguf", "Q8_0")
    model = attach(pyggml.load(tmp_path / "packed.gguf"), LoraConfig(rank=3)).model
    out = build(model.parts, Inputs.empty(40), model.adapters)
    (wanted,) = model.program(out).schedule.plans.values()
    found = Pictures(model).of(PassQuery(kind="logits", ctx=40)).plan
    assert bytes_at(found) == bytes_at(wanted)
    assert len(found.graph.nodes) < len(Graph.of(out).nodes), "or nothing is shown"


def test_a_section_s_nodes_are_drawn_and_told(ask, plan_facts):
    found = ask("graph/section", section=1, direction="forward", **PASS)
    kinds = Counter(node["op"] for node in found["nodes"])
    assert kinds["flash_attn_ext"] == 1 and kinds["mul_mat_add"] == 2
    for i in range(len(found["nodes"])):
        assert f'data-node="{i}"' in found["svg"]
    q = next(n for n in found["nodes"] if n["name"] == "blk.0.attn_q")
    assert (q["type"], q["shape"]) == ("F32", [32, 32]) and not q["trained"]
    assert "blk.0.attn_q.weight" in [r["name"] for r in q["reads"]]
    assert [n["name"] for n in found["nodes"] if n["trained"]].count("blk.0.attn_q+lora") == 1


def test_what_is_sought_is_found_in_the_block_that_stands_for_it(ask):
    found = ask("graph/search", words="BLK.1.attn_q.weight", **PASS)
    assert found["n_hits"] == len(found["hits"]) > 0
    for hit in found["hits"]:
        section = ask("graph/section", section=hit["section"], direction=hit["direction"], **PASS)
        node = section["nodes"][hit["node"]]
        assert {k: node[k] for k in ("op", "name", "shape")} == {
            k: hit[k] for k in ("op", "name", "shape")
        }
        assert "block" in hit["title"]
    assert ask("graph/search", words="blk.7.attn_q", **PASS)["n_hits"] == 0
    assert ask("graph/search", words="flash_attn_back", **PASS)["n_hits"] > 0


def test_what_is_alive_at_a_moment(ask, plan_facts):
    found = ask("plan", **PASS)
    assert found["used"] == bytes_at(plan_facts)
    assert found["peak"] == peak(plan_facts).index
    assert found["svg"].startswith("<svg")
    for i in (0, found["peak"], len(found["used"]) - 1):
        told, wanted = ask("plan/moment", node=i, **PASS), moment(plan_facts, i)
        assert told["bytes"] == wanted.n_bytes == found["used"][i]
        assert [tuple(row) for row in told["kinds"]] == wanted.by_kind()


def test_checkpointing_takes_less(ask):
    usual, layers = ask("plan", ctx=64), ask("plan", ctx=64, keep="layers")
    assert max(layers["used"]) < max(usual["used"])


@pytest.mark.quick
@pytest.mark.parametrize(
    "path, fields, status, words",
    [
        ("graph", {"ctx": 1}, 400, "ctx is '1', wanted a whole number from 2"),
        ("graph", {"ctx": 65}, 400, "ctx is 65, wanted at most the model's 64"),
        ("graph", {"ctx": "9" * 400, "rank": "x"}, 400, "rank is 'x'"),
        ("graph", {"ctx": "８"}, 400, "ctx is"),
        ("graph", {"kind": "x"}, 400, "kind is 'x', wanted logits or training or net"),
        ("graph", {"stage": "x"}, 400, "stage is 'x'"),
        ("graph/section", {"section": 1, "stage": 50}, 404, "stage is 50"),
        ("plan", {"wide": 5000}, 400, "wide is '5000', wanted a whole number from 200 to 900"),
        ("plan", {"keep": "all"}, 400, "wanted costly or layers"),
        ("plan", {"modules": "attn_x"}, 400, "attn_x"),
        ("plan", {"modules": "a," * 300}, 400, "modules has more than 500 characters"),
        ("plan/moment", {"node": 10**6}, 404, "wanted one below it"),
        ("plan/moment", {}, 400, "node is ''"),
        ("graph/section", {"section": 99}, 404, "no section 99"),
        (
            "graph/section",
            {"section": 0, "direction": "backward"},
            404,
            "no section 0 with backward",
        ),
        ("graph/section", {"section": 0, "direction": "up"}, 400, "wanted forward or backward"),
        ("graph/search", {"words": ""}, 400, "words has 0 characters"),
        ("graph/search", {"words": "x" * 501}, 400, "words has 501 characters"),
    ],
)
def test_faults_are_sentences(client, path, fields, status, words):
    kind = {} if path == "plan" else {"kind": "logits"}
    answer = client.get(f"/api/{path}", params=kind | fields)
    assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text


@pytest.mark.quick
def test_a_stage_behind_the_plan_is_told_with_the_last(client):
    """How many there are depends on what the CPU's paths let it rewrite."""
    graph = {"kind": "logits"}
    plan = len(client.get("/api/graph", params=graph).json()["stages"]) - 1
    answer = client.get("/api/graph", params=graph | {"stage": 50})
    sentence = f"stage is 50, wanted at most {plan}, the plan"
    assert answer.status_code == 404 and sentence in answer.json()["error"]["message"], answer.text
