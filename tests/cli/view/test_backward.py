"""One backward pass, node by node: the numbers are the library's, at the places of the plan."""

import numpy as np
import pytest
from extras import reason
from starlette.testclient import TestClient

import pyggml
from pyggml.backward import Keep, training_graph
from pyggml.cli.commands.view import backward
from pyggml.cli.commands.view.app import make_app
from pyggml.cli.commands.view.net import small_net
from pyggml.cli.commands.view.source import Cancelled, NoSource
from pyggml.eager import Value
from pyggml.eager.steps import backward_steps
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.runtime import schedule

pytest.importorskip("igraph", reason=reason("igraph"))
TEXT = "the other path"


def by_name(found):
    return {t["name"]: t for t in found["tensors"] if t["name"]}


def numbers(about):
    return np.array(about["value"]["first"])


@pytest.fixture(scope="module")
def net():
    """What is told of the small net."""
    with TestClient(make_app(NoSource(), None), "http://localhost") as client:
        return client.post("/api/backward", json={}).json()


def test_every_number_of_the_small_net_is_that_of_its_values(net):
    """The eager steps compute the same pass by references, in float64."""
    loss, parameters = small_net()
    value = Value(loss["loss"], True)
    for p in parameters.values():
        Value(p, True)
    assert net["loss"] == pytest.approx(value.item(), rel=1e-6)
    told = by_name(net)
    for step in backward_steps(value):
        if step.node.name not in told:
            continue
        about = told[step.node.name]
        rows = np.reshape(step.value, (-1, about["value"]["columns"]))
        np.testing.assert_allclose(numbers(about), rows, rtol=1e-3, atol=1e-6)
        assert about["gradient"], step.node.name
        if about["gradient"]["i"] >= 0:
            gradient = numbers(net["tensors"][about["gradient"]["i"]])
            rows = np.reshape(step.incoming, gradient.shape)
            np.testing.assert_allclose(gradient, rows, rtol=1e-3, atol=1e-6)


def test_the_gradient_of_what_is_read_twice_is_a_sum(net):
    w2 = by_name(net)["w2"]
    total = net["tensors"][w2["gradient"]["i"]]
    assert total["sums"]["name"] == "w2" and total["gradient_of"]["name"] == "w2"
    assert {r["name"] for r in w2["readers"]} >= {"w2·hidden", "w2²"}
    assert w2["memory"] is None, "it is a leaf"


def test_places_lives_and_rules_are_those_of_the_plan(net):
    loss, parameters = small_net()
    (plan,) = schedule(training_graph(loss, parameters, keep=Keep.COSTLY)).plans.values()
    assert net["arena"] == plan.n_bytes and len(net["steps"]) == len(plan.graph.nodes)
    for i, t in enumerate(plan.graph.nodes):
        about = net["tensors"][net["steps"][i]]
        assert about["op"] == t.op.name and about["at"] == i
        if t.root in plan.offsets:
            assert about["memory"]["offset"] == plan.offsets[t.root]
            assert about["memory"]["lives"][0] == plan.lives[t.root].first
        else:
            assert about["memory"] is None
    hidden = by_name(net)["hidden"]
    (back,) = (t for t in net["tensors"] if (t["rule_of"] or {}).get("name") == "hidden")
    assert back["rule"] == "dx = dy · (1 - y · y)" and hidden["formula"].startswith("tanh x")
    first = net["tensors"][net["steps"][net["begin"]]]
    assert first["rule_of"] and not net["tensors"][net["steps"][net["begin"] - 1]]["rule_of"]
    (drawn,) = net["pictures"]
    assert drawn["svg"].count("data-node") == len(drawn["tensors"])
    assert drawn["tensors"] == [i for i in drawn["tensors"] if i >= 0]


def test_a_block_of_a_file_with_the_adapter_of_a_run(client, add_run, tiny, folder, rng):
    adapter = attach(pyggml.load(tiny), LoraConfig(rank=2, alpha=5.0))
    adapter.parameters.data[:] = rng.normal(0, 0.4, len(adapter.parameters.data))
    adapter.save(folder / "mine.gguf")
    add_run("mine", [])
    found = client.post("/api/backward", json={"text": TEXT, "run": "mine", "block": 2}).json()
    ids = adapter.model.tokenizer.encode_prompt(TEXT)
    loss, grads = loss_and_grads(adapter.model, ids)
    assert found["loss"] == pytest.approx(loss, rel=1e-5) and found["n_tokens"] == len(ids)
    assert found["parts"] == ["start", "block 0", "block 1", "end"] and found["part"] == 2
    told = by_name(found)
    names = [name for name in grads if name.startswith("blk.1.")]
    assert len(names) >= 14
    for name in names:
        gradient = found["tensors"][told[name]["gradient"]["i"]]
        wanted = grads[name][:6, :8]
        np.testing.assert_allclose(numbers(gradient), wanted, rtol=2e-3, atol=1e-6)
    assert not any(name.startswith("blk.0.attn_q") for name in told), "that is another part"
    assert [each["title"] for each in found["pictures"]] == ["forward", "backward"]


def test_every_node_of_every_part_has_numbers(client):
    for part in range(4):
        found = client.post("/api/backward", json={"text": TEXT, "block": part}).json()
        assert found["steps"] and all(t["value"]["finite"] for t in found["tensors"])
        assert "B is 0" in found["about"]


def test_faults_are_sentences(client):
    for body, status, words in (
        ({"text": TEXT, "block": 99}, 404, "the graph has 4 parts, wanted one below it"),
        ({"text": "a"}, 400, "the text has 1 token"),
        ({"text": ""}, 400, "text is no string"),
        ({"text": TEXT, "run": "x"}, 404, "has no run"),
    ):
        answer = client.post("/api/backward", json=body)
        assert answer.status_code == status and words in answer.json()["error"]["message"]
    with TestClient(make_app(NoSource(), None), "http://localhost") as other:
        assert other.post("/api/backward", json={"text": TEXT}).status_code == 409


def test_a_pass_stops_before_the_next_node():
    class Third:
        calls = 0

        def is_set(self):
            self.calls += 1
            return self.calls == 3

    stop = Third()
    with pytest.raises(Cancelled):
        backward.of_net(None, stop)
    assert stop.calls == 3


def test_numbers_that_json_lacks_are_told():
    about = backward.summary(np.array([[1.0, np.nan], [np.inf, -2.0]]))
    assert about["first"] == [[1.0, None], [None, -2.0]] and not about["finite"]
    assert (about["min"], about["max"]) == (-2.0, 1.0)
    assert "min" not in backward.summary(np.array([np.nan]))
    assert backward.summary(np.float64(3))["first"] == [[3.0]]
    assert backward.summary(np.array([1e300]))["length"] is None, "beyond what float64 holds"
