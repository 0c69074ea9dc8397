"""Nodes that one kernel computes: the numbers of each node by itself."""

import numpy as np
import pytest

from pyggml.backends import CPU, write
from pyggml.backends.cuda import device
from pyggml.backends.cuda.driver import SIMULATED
from pyggml.backends.cuda.fusion import fused
from pyggml.graph import Graph
from pyggml.ops import (
    OPS,
    add,
    add_inplace,
    mul_mat,
    out_prod,
    rms_norm_mul,
    scale,
    swiglu,
)
from pyggml.ops.norm_mul import rms_norm_mul_back
from pyggml.ops.rope import rope_apply, rope_apply_back, rope_table
from pyggml.schedule import Devices, bind, schedule
from pyggml.tensors import leaf, zeros

RNG = np.random.default_rng(11)


def numbers(*shape):
    return leaf(RNG.standard_normal(shape).astype(np.float32))


def ops_of(program, card):
    """The ops of each pattern that was found."""
    calls = program.programs[card].calls
    found = fused(calls, program.schedule.plans[card].graph)
    return ["+".join(s.node.op.name for s in c.sites) for c in found if len(c.sites) > 1]


def results(card, graph, changed=()):
    """The results of the second of two runs, and the leaves that it changes."""
    (program,) = bind(schedule(graph, Devices([card, CPU()])))
    program()
    for t in changed:
        write(t, np.ones(t.shape, np.float32))
    program()
    return program, [program.read(t) for t in graph.outputs]


def summed():
    total = zeros((5, 7))
    return Graph.of(add_inplace(total, out_prod(numbers(3, 7), numbers(3, 5)))), [total]


def scaled():
    return Graph.of(add(scale(mul_mat(numbers(4, 6), numbers(5, 6)), 2.5), numbers(5, 4))), []


def residual_and_norm():
    x = add(numbers(6, 40), numbers(6, 40))
    return Graph.of(rms_norm_mul(x, numbers(40), eps=1e-3), scale(x, 2.0)), []


def norm_gradient_and_residual():
    back = rms_norm_mul_back(numbers(6, 40), numbers(40), numbers(6, 40), eps=1e-3)
    return Graph.of(add(numbers(6, 40), back)), []


def rotated(head=128, neox="neox"):
    """The norm of heads, turned, and the gradient of both."""
    x, w, dy = numbers(5, 3, head), numbers(head), numbers(5, 3, head)
    table = rope_table(leaf(np.array([0, 1, 5, 2, 9], np.int32)), n_dims=head, mode=neox)
    turned = rope_apply(rms_norm_mul(x, w, eps=1e-3), table, neox)
    return Graph.of(turned, rms_norm_mul_back(x, w, rope_apply_back(dy, table, neox), eps=1e-3)), []


def gates_gradients():
    gate, up, dy = (numbers(7, 12) for _ in range(3))
    return Graph.of(OPS["swiglu_back_gate"](gate, up, dy), swiglu(gate, dy)), []


PATTERNS = {
    "out_prod+add": summed,
    "mul_mat+scale": scaled,
    "add+rms_norm_mul": residual_and_norm,
    "rms_norm_mul_back+add": norm_gradient_and_residual,
    "rms_norm_mul+rope_apply": rotated,
    "rope_apply_back+rms_norm_mul_back": rotated,
    "swiglu_back_gate+swiglu": gates_gradients,
}
ON_A_CARD = {"mul_mat+scale", "rms_norm_mul+rope_apply", "rope_apply_back+rms_norm_mul_back"}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_gives_the_numbers_of_its_nodes(name, card, monkeypatch):
    if SIMULATED and name in ON_A_CARD:
        pytest.skip("the simulator has no cuBLAS, and no warps")
    graph, changed = PATTERNS[name]()
    program, found = results(card, graph, changed)
    assert name in ops_of(program, card)
    monkeypatch.setattr(device, "fused", lambda calls, graph: list(calls))
    for a, b in zip(found, results(card, graph, changed)[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_a_result_that_others_read_is_made(card):
    total, a, b = zeros((5, 7)), numbers(3, 7), numbers(3, 5)
    product = out_prod(a, b)
    graph = Graph.of(add_inplace(total, product), scale(product, 2.0))
    program, (first, second) = results(card, graph, [total])
    assert "out_prod+add" not in ops_of(program, card)
    np.testing.assert_allclose(second, 2 * (first - 1), rtol=1e-5, atol=1e-5)


def test_a_node_does_not_move_behind_one_that_changes_its_source(card):
    total, other, x = zeros((5, 7)), zeros((3, 7)), numbers(3, 5)
    product = out_prod(other, x)
    changed = add_inplace(other, numbers(3, 7))
    graph = Graph.of(changed, add_inplace(total, product))
    nodes = (product, changed, graph.outputs[1])
    graph = Graph(nodes, graph.leaves, graph.outputs)
    program, (_, found) = results(card, graph, [total, other])
    assert ops_of(program, card) == []
    np.testing.assert_allclose(found, 1 + x.data.T @ np.ones((3, 7)), rtol=1e-5)
