"""The steps of a backward pass show each op's numbers and gradients."""

import re
from inspect import getdoc

import numpy as np
import pytest

from pyggml.eager import tensor
from pyggml.eager.steps import backward_steps
from pyggml.errors import NoGradientError
from pyggml.graph.op import NoGrad
from pyggml.ops import OPS


@pytest.fixture
def loss():
    x = tensor([1.0, 2.0], requires_grad=True, name="x")
    w = tensor([3.0, 4.0], requires_grad=True, name="w")
    return (x * w + x).sum(), x, w


@pytest.mark.quick
def test_steps_go_from_the_loss_to_the_leaves(loss):
    total, x, _ = loss
    steps = list(backward_steps(total))
    assert [s.op for s in steps] == ["sum", "add", "mul"]
    product = steps[-1]
    np.testing.assert_array_equal(product.value, [3, 8])
    np.testing.assert_array_equal(product.incoming, [1, 1])
    assert [s.name for s in product.sources] == ["x", "w"]
    np.testing.assert_array_equal(product.sources[0].outgoing, [3, 4])
    np.testing.assert_array_equal(product.sources[1].outgoing, [1, 2])
    assert not x.has_grad


@pytest.mark.quick
def test_what_flows_out_adds_up_to_the_gradient(loss):
    total, *leaves = loss
    steps = list(backward_steps(total))
    total.backward()
    for leaf in leaves:
        parts = [s.outgoing for step in steps for s in step.sources if s.name == leaf.name]
        np.testing.assert_allclose(sum(parts), leaf.grad)


@pytest.mark.quick
def test_fixed_sources_get_nothing():
    x = tensor([1.0], requires_grad=True, name="x")
    (step,) = backward_steps(x * tensor([5.0], name="five"))
    assert step.sources[1].outgoing is None


@pytest.mark.quick
def test_a_step_prints_as_a_table(loss):
    text = str(list(backward_steps(loss[0]))[-1])
    assert text.startswith("step 3, node 0: mul0 = mul(x, w)    da = dy · b")
    assert "\n  dy    [1. 1.]   of step 2\n" in text
    assert "\n  dx    [3. 4.]\n  Σ dx  [4. 5.]   the sum of steps 2 and 3\n" in text


@pytest.mark.quick
def test_steps_have_numbers_and_lead_to_their_nodes(loss):
    total, *_ = loss
    steps = list(backward_steps(total))
    assert [s.number for s in steps] == [1, 2, 3]
    nodes = total.graph.nodes
    assert [nodes[s.index] for s in steps] == [s.node for s in steps] == list(reversed(nodes))
    assert [s.name for s in steps] == ["sum2", "add1", "mul0"]
    assert steps[0].sources[0].node is steps[1].node


@pytest.mark.quick
def test_steps_tell_where_gradients_add_up():
    x = tensor([1.0, 2.0], requires_grad=True, name="x")
    h = (x * 3.0).named("h")
    steps = list(backward_steps((h * h + h).sum()))
    assert [s.from_steps for s in steps] == [(), (1,), (2,), (2, 3)]
    twice = steps[2].sources  # h · h adds to one gradient two times
    np.testing.assert_array_equal(twice[0].total, [4, 7])
    np.testing.assert_array_equal(twice[1].total, steps[3].incoming)
    assert twice[1].steps == (2, 3) and "Σ dh  [ 7. 13.]" in str(steps[2])


@pytest.mark.quick
def test_steps_need_a_loss(loss):
    with pytest.raises(NoGradientError, match="2 elements, wanted a loss of one number"):
        next(backward_steps(loss[1]))


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if not isinstance(op.grad, NoGrad)])
def test_every_gradient_rule_begins_with_its_formula(name):
    first = getdoc(OPS[name].grad).splitlines()[0]
    assert re.match(r"d\w+ = |d\w+, d\w+ = |d\w+_\w+ = |The recurrence run backwards: dS", first), (
        first
    )
    assert first == first.rstrip(".") and len(first) < 100
