"""gradcheck tells right rules from wrong ones, and names the worst element."""

import dataclasses

import numpy as np
import pytest

from pyggml import ops
from pyggml.eager import apply, tensor
from pyggml.eager import functions as F
from pyggml.eager.gradcheck import gradcheck
from pyggml.errors import ConfigError
from pyggml.graph.tensor import Tensor
from pyggml.ops import OPS, mul, scale

X = np.random.default_rng(0).uniform(0.5, 2, (3, 4))
LARGE = np.random.default_rng(0).uniform(0.5, 2, (60, 60))


def with_rule(name, rule):
    """An op with another gradient rule, as a user may declare one; no kernel knows it."""
    return dataclasses.replace(OPS[name], name=f"my_{name}", grad=rule)


WRONG = with_rule("sqr", lambda node, dy: (mul(dy, node.src[0]),))  # x·dy, and not 2x·dy
RIGHT = with_rule("sqr", lambda node, dy: (scale(mul(dy, node.src[0]), 2.0),))


def once_wrong(node, dy):
    """Twice x·dy, but for one element."""
    mask = np.ones(node.shape, np.float32)
    mask[1, 2] = 0.9
    return (scale(mul(mul(dy, node.src[0]), tensor(mask).node), 2.0),)


@pytest.mark.parametrize("x", [X, LARGE])
def test_an_op_of_one_s_own_is_checked(x):
    assert gradcheck(RIGHT, x)
    check = gradcheck(WRONG, x)
    assert not check
    assert check.inputs[0].error > 0.1


@pytest.mark.parametrize("x", [X, LARGE])
def test_the_worst_element_is_named(x):
    check = gradcheck(with_rule("sqr", once_wrong), x)
    (found,) = check.inputs
    if x is X:
        assert found.worst.by == found.worst.of == (1, 2)
        assert found.worst.analytic == pytest.approx(0.9 * found.worst.numeric, rel=1e-6)
        assert "d(the output at [1, 2]) / d(input at [1, 2])" in str(check)
    else:
        assert not check and found.method == "8 directions"


def test_each_input_has_its_own_verdict():
    half = with_rule("mul", lambda node, dy: (mul(dy, node.src[1]), dy))
    check = gradcheck(half, X, X + 1)
    assert [c.error < 1e-6 for c in check.inputs] == [True, False]
    assert str(check).startswith("the gradient is wrong: worst error")
    assert "input 1  (3, 4)   Jacobian 12 x 12" in str(check)


def test_a_kink_is_told_from_a_wrong_rule():
    check = gradcheck(F.relu, [0.0, 1.0])
    assert not check and check.inputs[0].worst.kink == pytest.approx((0, 1))
    assert "a kink" in str(check)
    assert gradcheck(WRONG, X).inputs[0].worst.kink is None


def test_ops_are_checked_by_their_names_with_settings():
    assert gradcheck(ops.rms_norm, X, eps=1e-6)
    assert gradcheck(ops.mul_mat, X, X[:2])
    assert gradcheck(OPS["scale"], X, s=2.0, b=1.0)
    assert gradcheck(F.softmax, X, axis=0)

    def doubled(x: "Tensor", by: float) -> "Tensor":
        return scale(x, by)

    assert gradcheck(doubled, X, by=2.0)
    assert not gradcheck(ops.relu, [0.0, 1.0])


def test_kernels_are_checked_on_request_and_where_they_must():
    rule = gradcheck(ops.rms_norm, X, eps=1e-6, kernels=True)
    assert rule and rule.tolerance == 1e-3 and rule.inputs[0].error > 1e-9
    span = np.array([[0, i + 1] for i in range(3)], np.int32)
    x = np.random.default_rng(1).standard_normal((3, 1, 16))
    attention = gradcheck(lambda q: apply(ops.flash_attn_ext, q, x, x, span, scale=0.3), x)
    assert attention and attention.tolerance == 1e-3


def test_a_value_is_checked_by_its_leaves():
    w, fixed = tensor(X, requires_grad=True, name="w"), tensor(X)
    assert [c.name for c in gradcheck((w * fixed).tanh().sum()).inputs] == ["w"]


def test_masked_outputs_are_no_fault():
    assert gradcheck(lambda x: apply(ops.diag_mask_inf, x, n_past=0), X[:, :3])


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(ConfigError, match="no input of floats"):
        gradcheck(lambda x: x, [1, 2])
    with pytest.raises(ConfigError, match="gave float, wanted a Value"):
        gradcheck(lambda x: 1.0, X)
    with pytest.raises(ConfigError, match="takes no inputs or settings"):
        gradcheck(tensor(X, requires_grad=True).sum(), X)
