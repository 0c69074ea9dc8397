"""Values: NumPy's numbers, the engine's graph and gradients, and clear words for mistakes."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pyggml import ops
from pyggml.backward import build_backward
from pyggml.eager import apply, tensor
from pyggml.eager import functions as F
from pyggml.eager import numbers as of_tensors
from pyggml.eager.gradcheck import gradcheck
from pyggml.errors import NoGradientError, ShapeError
from pyggml.runtime import results, schedule

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/eager"


def draw(*shape, seed=0, least=0.3):
    """Numbers of either sign, none near 0."""
    rng = np.random.default_rng([seed, *shape])
    return (rng.uniform(least, 2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def close(value, wanted):
    np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-6, atol=1e-6)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (3, "int32"),
        (3.0, "float32"),
        ([[1, 2.5]], "float32"),
        ([], "float32"),
        (True, "float32"),
        (np.arange(3, dtype=np.int64), "int32"),
        (np.ones(2), "float32"),
    ],
)
def test_numbers_become_floats_or_integers_of_32_bits(data, dtype):
    x = tensor(data)
    assert x.numpy().dtype == dtype and x.dtype == dtype
    np.testing.assert_array_equal(x.numpy(), np.asarray(data))
    assert tensor(data, requires_grad=True).dtype == "float32"


def test_a_value_has_numbers_of_its_own():
    a = np.ones(3, np.float32)
    x = tensor(a)
    a[0] = 5
    x.numpy()[1] = 5
    np.testing.assert_array_equal(x.numpy(), [1, 1, 1])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("word", "'word' is no number"),
        ([[1, 2], [3]], "unequal lengths"),
        (np.zeros((1,) * 5), "5 axes, wanted at most 4"),
        (1 << 40, "beyond 32 bits"),
        ([None], r"\[None\] is no number"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(data, said):
    with pytest.raises(ShapeError, match=said):
        tensor(data)


SHAPES = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=3)


@given(SHAPES, st.sampled_from(["+", "-", "*", "/"]), st.booleans())
def test_arithmetic_broadcasts_as_numpy_does(shapes, sign, is_array):
    (one, other), _ = shapes
    a, b = draw(*one), draw(*other, seed=1)
    names = {"a": tensor(a), "b": b if is_array else tensor(b)}
    close(eval(f"a {sign} b", names), eval(f"a {sign} b", {"a": a, "b": b}))
    close(eval(f"b {sign} a", names), eval(f"b {sign} a", {"a": a, "b": b}))


@given(SHAPES, st.sampled_from(["+", "-", "*", "/"]))
def test_gradients_of_broadcast_arithmetic_are_right(shapes, sign):
    (one, other), _ = shapes
    check = gradcheck(lambda a, b: eval(f"a {sign} b"), draw(*one), draw(*other, seed=1))
    assert check, str(check)


@pytest.mark.quick
@pytest.mark.parametrize("text", ["2 + a", "a - 0.5", "3 - a", "2 * a", "a / 4", "1 / a", "-a"])
def test_numbers_mix_with_values(text):
    a = draw(2, 3)
    close(eval(text, {"a": tensor(a)}), eval(text, {"a": a}))


@pytest.mark.quick
@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 13, 16, -1, -2, 0.5, -0.5, 1.7, 20])
def test_powers(n):
    a = np.abs(draw(4))
    close(tensor(a) ** n / (1 + a**n), a**n / (1 + a**n))
    assert gradcheck(lambda x: x**n, a)
    if n == int(n) and abs(n) <= 16:
        close(tensor(-a) ** n / (1 + a**n), (-a) ** n / (1 + a**n))


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 3), (3, 4)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((3,), (3,)),
        ((5, 2, 3), (3, 4)),
        ((2, 3), (5, 3, 4)),
        ((4, 1, 2, 3), (1, 5, 3, 2)),
        ((5, 2, 3), (3,)),
        ((3,), (5, 3, 4)),
    ],
)
def test_matrix_products_are_those_of_numpy(shapes):
    a, b = draw(*shapes[0]), draw(*shapes[1], seed=1)
    close(tensor(a) @ b, a @ b)
    close(a @ tensor(b), a @ b)
    assert gradcheck(lambda x, y: x @ y, a, b)


@pytest.mark.parametrize(
    "shapes", [((2, 3), (3, 4)), ((3,), (5, 3, 4)), ((4, 1, 2, 3), (1, 5, 3, 2))]
)
def test_a_matrix_product_is_one_node_which_a_schedule_makes_of_the_engine_s(shapes):
    a, b = tensor(draw(*shapes[0]), True, "a"), tensor(draw(*shapes[1], seed=1), True, "b")
    y = a @ b
    assert [t.op.name for t in y.graph.nodes] == ["matmul"] and "from matmul of a and b" in repr(y)
    loss = (y * y).sum()
    loss.backward()
    graph = build_backward(loss.graph, [a.node, b.node])
    names = {t.op.name for p in schedule(graph).plans.values() for t in p.graph.nodes}
    assert "mul_mat" in names and "matmul" not in names
    for found, wanted in zip(results(graph)[1:], (a.grad, b.grad), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "var", "std"])
def test_reductions_are_those_of_numpy(name, axis, keepdims):
    a = draw(2, 3, 4)
    close(getattr(tensor(a), name)(axis, keepdims), getattr(a, name)(axis, keepdims=keepdims))
    assert gradcheck(lambda x: getattr(x, name)(axis, keepdims), a)


def test_a_variance_may_leave_out_the_degree_of_the_mean():
    a = draw(3, 4)
    close(tensor(a).var(0, ddof=1), a.var(0, ddof=1))
    close(tensor(a).std(ddof=2), a.std(ddof=2))


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_running_sums_and_positions_are_those_of_numpy(axis):
    a = draw(2, 3, 4)
    close(tensor(a).cumsum(axis), a.cumsum(axis))
    assert gradcheck(lambda x: x.cumsum(axis), a)
    for name in ("argmax", "argmin"):
        found = getattr(tensor(a), name)(axis, keepdims=True)
        np.testing.assert_array_equal(found, getattr(a, name)(axis, keepdims=True))
        assert found.dtype == np.int32


@pytest.mark.parametrize("bounds", [(-1, 0.5), (None, 0.5), (-1, None), (None, None)])
def test_numbers_are_clipped(bounds):
    a = draw(3, 4)
    close(tensor(a).clip(*bounds), a if bounds == (None, None) else a.clip(*bounds))
    assert gradcheck(lambda x: x.clip(*bounds), a)


@pytest.mark.parametrize("axis", [None, 0, 2, -2, (0, 2)])
def test_axes_of_length_one_go(axis):
    a = draw(1, 3, 1, 2)
    close(tensor(a).squeeze(axis), a.squeeze(axis))
    close(tensor(a).flatten(), a.flatten())
    assert tensor([[1, 2]]).squeeze().dtype == np.int32
    assert gradcheck(lambda x: x.squeeze(axis), a) and gradcheck(lambda x: x.flatten(), a)


@pytest.mark.parametrize("base", [2, 0.25, np.float32(3), 1])
def test_numbers_to_the_power_of_values(base):
    a = draw(3, 4)
    close(base ** tensor(a), base**a)
    close(base ** tensor([1, 2]), [base, base**2])
    assert gradcheck(lambda x: base**x, a)


def test_dropout_takes_a_share_and_lets_the_rest_grow():
    x = tensor(np.ones((40, 50)), requires_grad=True)
    F.seed(1)
    y = F.dropout(x, 0.25)
    kept = y.numpy() > 0
    np.testing.assert_array_equal(y.numpy(), np.where(kept, np.float32(4 / 3), 0))
    assert 0.7 < kept.mean() < 0.8
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.numpy())
    assert (F.dropout(x, 0.25).numpy() != y.numpy()).any(), "another draw"
    F.seed(1)
    np.testing.assert_array_equal(F.dropout(x, 0.25).numpy(), y.numpy())
    assert F.dropout(x, 0.25, training=False) is x


KEYS = [0, -1, slice(1, 3), slice(None, None, 2), (slice(None), 1), (1, slice(1, None, 2), -1)]
KEYS += [
    (Ellipsis, 2),
    (None, 1),
    (slice(None), None, slice(2)),
    [0, 3, 0],
    [[1], [2]],
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_indexing_is_that_of_numpy(key):
    a = draw(4, 3, 5)
    close(tensor(a)[key], a[key])
    assert tensor(a)[key].shape == a[key].shape
    if a[key].size:
        assert gradcheck(lambda x: x[key], a)


def test_elements_and_masks_choose():
    a, rows = draw(4, 3), np.array([0, 2, -1])
    close(tensor(a)[range(3), rows], a[range(3), rows])
    close(tensor(a)[tensor([1, 1]), [0, 2]], a[[1, 1], [0, 2]])
    close(tensor(a)[a[:, 0] > 0], a[a[:, 0] > 0])
    assert gradcheck(lambda x: x[range(3), rows], a)
    np.testing.assert_array_equal(tensor([4, 5, 6])[1:].numpy(), [5, 6])


def test_values_are_walked_along_the_first_axis_and_are_arrays_for_numpy():
    a = draw(2, 3)
    x = tensor(a, requires_grad=True)
    first, second = x
    (first * second).sum().backward()
    close(first, a[0])
    close(tensor(x.grad), a[::-1])
    np.testing.assert_array_equal(np.asarray(x, np.float64), a.astype(np.float32))
    with pytest.raises(TypeError, match="Value"):
        assert 1.0 in x


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (4, "4 is none of 4"),
        ((0, 0, 0, 0), "4 indices for 3 axes"),
        (slice(None, None, -1), "step"),
        (slice(3, 1), "3:1 of axis 0 of 4 is empty"),
        (1.5, "1.5, wanted an integer"),
        ([9], "9 is none of 4"),
        (([0], slice(1)), "beside a slice"),
        (np.array([True]), "a mask of shape"),
        (np.array([0.5]), "float64, wanted integers"),
    ],
)
def test_keys_that_do_not_fit_are_refused(key, said):
    with pytest.raises(ShapeError, match=said):
        tensor(draw(4, 3, 5))[key]


@pytest.mark.parametrize(
    "name", ["exp", "sqrt", "sin", "cos", "tanh", "log", "sigmoid", "relu", "gelu", "silu"]
)
def test_functions_of_elements(name):
    a = np.abs(draw(3, 4))
    function = getattr(F, name)
    if hasattr(np, name):
        close(function(a), getattr(np, name)(a))
    assert gradcheck(function, a)


def test_softmax_and_cross_entropy():
    z, t = draw(5, 7) * 40, [0, 6, 3, 3, 1]
    e = np.exp(z.astype(np.float64) - z.max(-1, keepdims=True))
    p = e / e.sum(-1, keepdims=True)
    close(F.softmax(z), p)
    np.testing.assert_allclose(F.log_softmax(z).numpy(), np.log(p), rtol=1e-6, atol=1e-6)
    assert F.cross_entropy(z, t).item() == pytest.approx(-np.log(p[range(5), t]).mean(), rel=1e-6)
    assert gradcheck(lambda x: F.cross_entropy(x, t), z / 40)
    assert gradcheck(F.log_softmax, z / 40)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_softmax_runs_along_any_axis(axis):
    z = draw(2, 3, 4)
    p = np.exp(z) / np.exp(z).sum(axis, keepdims=True)
    close(F.softmax(z, axis), p)
    close(tensor(z).softmax(axis), p)
    close(F.log_softmax(z, axis), np.log(p))
    assert gradcheck(lambda x: F.softmax(x, axis), z)
    assert gradcheck(lambda x: F.log_softmax(x, axis), z)


def test_joins_and_choices():
    a, b = draw(2, 3), draw(2, 3, seed=1)
    close(F.concatenate([a, tensor(b)], axis=1), np.concatenate([a, b], axis=1))
    close(F.stack([a, b], axis=-1), np.stack([a, b], axis=-1))
    close(F.where(a > 0, a, b), np.where(a > 0, a, b))
    close(F.maximum(a, b), np.maximum(a, b))
    close(F.embedding(a, [[1, 0], [1, 1]]), a[[[1, 0], [1, 1]]])
    with pytest.raises(ShapeError, match="wanted integers"):
        F.embedding(a, [0.0])


def test_large_values_are_computed_by_kernels(monkeypatch):
    a, b = draw(7, 300), draw(5, 300, seed=1)
    small = tensor(a) @ tensor(b).T
    monkeypatch.setattr(of_tensors, "SMALL", 0)
    ran = []
    monkeypatch.setattr(
        of_tensors, "run", lambda node, run=of_tensors.run: ran.append(node) or run(node)
    )
    large = tensor(a) @ tensor(b).T
    assert any(node.op.name == "matmul" for node in ran)
    np.testing.assert_allclose(large.numpy(), small.numpy(), rtol=1e-5, atol=1e-5)


# -- gradients ------------------------------------------------------------------------------------


def test_a_gradient_before_backward_says_so():
    w = tensor([1.0, 2.0], requires_grad=True, name="w")
    with pytest.raises(NoGradientError, match=r"w has no gradient yet: call backward\(\)"):
        _ = w.grad
    with pytest.raises(NoGradientError, match="made without requires_grad"):
        _ = tensor([1.0]).grad
    assert not w.has_grad
    (w * w).sum().backward()
    np.testing.assert_array_equal(w.grad, [2, 4])


def test_gradients_add_up_until_they_are_forgotten():
    w = tensor([3.0], requires_grad=True)
    for wanted in (6.0, 12.0):
        (w * w).backward()
        assert w.grad == wanted
    w.zero_grad()
    assert not w.has_grad


def test_results_that_are_held_get_gradients_too():
    x = tensor([1.0, -2.0], requires_grad=True)
    h = x * 3
    (h * h).sum().backward()
    np.testing.assert_array_equal(h.grad, [6, -12])
    np.testing.assert_array_equal(x.grad, [18, -36])


def test_the_engine_finds_the_same_gradients():
    x, w = tensor(draw(4, 3), True), tensor(draw(3, 2, seed=1), True)
    loss = F.cross_entropy(F.gelu(x @ w), [0, 1, 1, 0])
    loss.backward()
    by_kernels = results(build_backward(loss.graph, [x.node, w.node]))
    for found, wanted in zip((loss.numpy(), x.grad, w.grad), by_kernels, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_rules_that_read_what_kernels_leave_run_kernels():
    q, k, v = (tensor(draw(5, 2, 16, seed=i), True) for i in range(3))
    span = np.array([[0, i + 1] for i in range(5)], np.int32)
    y = apply(ops.flash_attn_ext, q, k, v, span, scale=0.25)
    (y * draw(*y.shape, seed=9)).sum().backward()
    assert gradcheck(
        lambda v: apply(ops.flash_attn_ext, q.detach(), k.detach(), v, span, scale=0.25), v
    )
    assert np.abs(v.grad).max() > 0.1


def test_a_leaf_that_was_changed_since_is_refused():
    w = tensor([1.0], requires_grad=True, name="w")
    y = w * w
    w.data -= 0.5
    with pytest.raises(NoGradientError, match="w was changed after"):
        y.backward()
    np.testing.assert_array_equal((w * w).numpy(), [0.25])


def test_what_carries_no_gradient_gets_none():
    x = tensor([1.0, 2.0], requires_grad=True)
    fixed = tensor([5.0, 5.0])
    (x * fixed + x.detach() * x + apply(ops.argmax, x.reshape(1, 2))).sum().backward()
    np.testing.assert_array_equal(x.grad, [6, 7])
    assert not fixed.has_grad
    with pytest.raises(NoGradientError, match="depends on no value"):
        fixed.sum().backward()
    with pytest.raises(NoGradientError, match="2 elements, wanted a loss of one number"):
        x.backward()


# -- words ----------------------------------------------------------------------------------------


def test_a_value_prints_what_it_is_and_where_it_came_from():
    w = tensor([[1.0, 2.0]], requires_grad=True, name="w")
    assert repr(w) == "tensor([[1., 2.]], shape (1, 2), w, requires_grad)"
    assert repr(w * [3.0, 4.0]) == "tensor([[3., 8.]], shape (1, 2), from mul of w and F32[2])"
    assert f"{(w * [3.0, 4.0]).sum():.2f} {w}" == "11.00 " + repr(w)


def test_only_leaves_can_be_set():
    x = tensor([1.0]) * 2
    with pytest.raises(ShapeError, match="was computed"):
        x.data = np.ones(1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: x + np.ones(2), "do not broadcast"),
        (lambda x: x @ [1.0, 2.0], "3 columns of the first, 2 rows of the second"),
        (lambda x: x.sum(axis=5), "no axis 5"),
        (lambda x: x ** tensor([2.0]), "exponent is no number"),
        (lambda x: ops.mul(x.node, 2.0), r"mul: 2.0 is no Tensor: wanted leaf\(array\)"),
        (lambda x: (-2) ** x, "base is -2, wanted a number above 0"),
        (lambda x: [1.0, 2.0, 3.0] ** x, r"base is \[1.0, 2.0, 3.0\], wanted a number"),
        (lambda x: x.var(ddof=6), "6 elements and a ddof of 6"),
        (lambda x: x.squeeze(1), r"axis 1 of shape \(2, 3\) is not of length 1"),
        (lambda x: x.argmax(2), "argmax: axis 2: axis 2 is out of bounds"),
        (lambda x: x.argmax("a"), "argmax: axis 'a': "),
        (lambda x: x.var("rows"), "var: axis 'rows', wanted an integer"),
        (lambda x: x.softmax((0, 1)), "softmax: 2 axes, wanted one"),
        (lambda x: x.min(5), "max or min: there is no axis 5"),
        (lambda x: x.clip("low"), "clip: a bound of 'low', wanted a number or None"),
        (lambda x: F.dropout(x, "half"), "dropout: p is 'half'"),
        (lambda x: x.softmax(5), "softmax: there is no axis 5"),
        (lambda x: x.clip(2, 1), "low is 2.0 and high 1.0"),
        (lambda x: tensor(np.zeros((0, 3))).max(0), "nothing along"),
        (lambda x: F.dropout(x, 1.0), "p is 1.0"),
        (lambda x: x.item(), "6 elements, wanted one"),
        (lambda x: f"{x:.3f}", "6 elements, wanted one"),
        (lambda x: F.cross_entropy(x, [1]), "targets of shape"),
        (lambda x: F.cross_entropy(x, [0, 3]), "target 3 is none of 3 classes"),
        (lambda x: F.cross_entropy(x, [-1, 0]), "target -1 is none of 3 classes"),
        (lambda x: ops.mul_mat(x, x), r"is no Tensor: wanted apply\(op, …\) for Values"),
    ],
)
def test_mistakes_are_named(make, said):
    with pytest.raises(ShapeError, match=said):
        make(tensor(draw(2, 3)))


# -- training -------------------------------------------------------------------------------------


def test_two_moons_train_as_in_pytorch():
    """losses: of torch 2.13 from the same points and parameters, float32, SGD."""
    example = runpy.run_path(str(ROOT / "examples/two_moons.py"))
    rng = np.random.default_rng(1337)
    x, y = example["moons"](100, 0.1, rng)
    sizes = ((2, 16), (16, 16), (16, 1))
    parameters = [p for n in sizes for p in example["layer"](*n, rng)]
    wanted = np.load(GOLDEN / "two_moons.npz")["losses"]
    np.testing.assert_allclose(example["train"](x, y, parameters), wanted, rtol=0, atol=1e-5)


def test_the_model_of_characters_learns(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be. " * 40, encoding="utf-8")
    runpy.run_path(str(ROOT / "examples/characters.py"))["main"](text, 60)
    first, last = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:3])
    assert last < first / 3
