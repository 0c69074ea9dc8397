"""A graph's way through its passes: what each takes away, and what it makes."""

from itertools import pairwise

import numpy as np
import pytest

from pyggml import ops
from pyggml.backward import Keep, build_backward, training_graph
from pyggml.graph import Graph
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import leaf
from pyggml.graph.verify import PASSES, graph_pass, recording_passes
from pyggml.look.passes import changes, stages
from pyggml.runtime import schedule

X, W = (leaf(np.ones((2, 3), np.float32), name) for name in ("x", "w"))


def loss_graph():
    y = ops.silu(ops.mul(X, W).named("y")).named("z")
    return Graph.of(loss=ops.sum_(ops.sqr(y)).named("loss"))


@pytest.mark.quick
def test_passes_are_recorded_in_their_order_and_only_inside():
    with recording_passes() as runs:
        graph = training_graph(loss_graph(), [W], keep=Keep.COSTLY)
        (plan,) = schedule(graph).plans.values()
    names = [run.change.__name__ for run in runs]
    order = ["build_backward", "round_attention", "round_large", "round_gradients", "rematerialise"]
    assert names[:5] == order
    assert all(a.after is b.before for a, b in pairwise(runs))
    build_backward(loss_graph(), [W])
    assert len(runs) == len(names)
    found = stages(runs, plan.graph)
    assert [s.name for s in found][:2] == ["as built", "build_backward"]
    assert found[0].graph is runs[0].before and found[-1].graph is plan.graph
    assert found[1].new == set(found[1].graph.nodes) - set(found[0].graph.nodes)
    silent = next(s for s in found if s.name == "round_attention")
    assert silent.told == "finds nothing to change here" and not silent.new


@pytest.mark.quick
def test_a_node_that_only_reads_another_is_no_change():
    y = ops.mul(X, W)
    z = ops.silu(y)
    before = Graph.of(ops.sum_(z))
    after = rewrite(before, {y: ops.add(X, W)})
    new, gone = changes(before, after)
    assert [t.op.name for t in new] == ["add"] and gone == {y}


def test_the_graphs_of_another_way_are_left_out():
    """As those of validation beside those of training."""

    @graph_pass
    def replaced(graph):
        return rewrite(graph, {t: ops.add(*t.src) for t in graph.nodes if t.op.name == "mul"})

    try:
        with recording_passes() as runs:
            one, _ = (replaced(loss_graph()) for _ in range(2))
        before, after = stages(runs, one)[1:]
        assert (before.name, after.name) == ("replaced", "replaced")
        assert [t.op.name for t in before.gone] == ["mul"] and before.told == "takes 1 of 4 nodes"
        assert [t.op.name for t in after.new] == ["add"] and after.told == "makes 1: 4 nodes"
    finally:
        del PASSES["replaced"]


@pytest.mark.quick
def test_a_graph_without_a_pass_is_a_stage_alone():
    graph = loss_graph()
    (only,) = stages([], graph)
    assert only.graph is graph and only.name == "as built"


@pytest.mark.quick
def test_the_notes_name_each_gradient_through_all_passes():
    """Also where a pass puts another node for what gradients flow to, or for a gradient."""
    forward = loss_graph()
    graph = build_backward(forward, [W])
    gradients = graph.notes.gradients
    assert gradients[W] is graph["grad:w"]
    assert {t.name for t in gradients if t.op is not None and t.name} == {"y", "z", "loss"}
    assert all(gradients[t].shape == t.shape for t in gradients)
    y, new = next(t for t in forward.nodes if t.name == "y"), ops.mul(W, X)
    after = rewrite(graph, {y: new})
    assert after.notes.gradients[new] in after.nodes and y not in after.notes.gradients
