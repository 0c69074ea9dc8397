"""An op of two functions is computed, differentiated, planned and run as any other."""

import numpy as np
import pytest
from separate_cpu import SeparateCPU

from pyggml import gradcheck, op, ops, tensor
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.eager.steps import backward_steps
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import F16, Q8_0
from pyggml.graph.tensor import Tensor, leaf
from pyggml.kernels.kernel import KERNELS
from pyggml.look.draw.fold import op_counts
from pyggml.quants import quantize
from pyggml.runtime import Devices, bind, results, schedule

X = np.random.default_rng(0).uniform(0.5, 2, (3, 4)).astype(np.float32)


def cubic():
    @op
    def cube(x):
        """x³"""
        return x**3

    @cube.gradient
    def _(dy, x):
        """dx = dy · 3x²"""
        return dy * 3 * x**2

    return cube


def weighted(factor=1):
    """a · b² ^ scale, of two sources with a setting; `factor` makes the gradient wrong."""

    @op
    def power_product(a, b, n=2.0):
        return a * b**n

    @power_product.gradient
    def _(dy, a, b, n):
        return dy * b**n, factor * dy * a * n * b ** (n - 1)

    return power_product


@pytest.mark.quick
def test_an_op_computes_values_and_their_gradients():
    x = tensor(X, requires_grad=True, name="x")
    y = cubic()(x)
    np.testing.assert_allclose(y.numpy(), X**3, rtol=1e-6)
    (y * 2).sum().backward()
    np.testing.assert_allclose(x.grad, 6 * X**2, rtol=1e-6)
    assert gradcheck(cubic(), X)


@pytest.mark.quick
def test_sources_and_settings():
    found = weighted()(X, X + 1, n=3.0)
    np.testing.assert_allclose(found.numpy(), X * (X + 1) ** 3, rtol=1e-6)
    assert gradcheck(weighted(), X, X + 1) and gradcheck(weighted(), X, X + 1, n=3.0)
    wrong = gradcheck(weighted(factor=1.1), X, X + 1)
    assert [c.error < 1e-5 for c in wrong.inputs] == [True, False]


@pytest.mark.quick
def test_the_engine_runs_it_by_its_reference():
    x, w = leaf(X, "x"), leaf(X.copy(), "w")
    loss = ops.sum_(cubic()(ops.mul(x, w)))
    assert isinstance(loss, Tensor)
    graph = build_backward(Graph.of(loss), [w])
    value, slope = results(graph)
    np.testing.assert_allclose(value, ((X * X).astype(np.float64) ** 3).sum(), rtol=1e-6)
    np.testing.assert_allclose(slope, 3 * X**4 * X, rtol=1e-5)
    assert plan(graph, CPU()).n_bytes > 0
    program = bind(schedule(graph))
    program()
    np.testing.assert_array_equal(program.read(graph["grad:w"]), slope)


def test_packed_rows_and_halves_are_read_as_numbers():
    rows = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    packed = leaf(quantize(rows, "Q8_0"), "w", Q8_0)
    half = leaf(rows.astype(np.float16), "h", F16)
    for source, error in ((packed, 0.06), (half, 0.002)):
        (found,) = results(Graph.of(cubic()(source)))
        np.testing.assert_allclose(found, rows**3, atol=error * np.abs(rows**3).max())


class Card(SeparateCPU):
    """Has no kernel for ops of one's own."""

    def refusal(self, node):
        return None if node.op in KERNELS else "no kernel is declared"


def test_a_card_leaves_it_to_the_cpu_and_says_so():
    x, w = tensor(X, name="x"), tensor(X.T.copy(), requires_grad=True, name="w")
    graph = build_backward(cubic()(x @ w).sum().graph, [w.node])
    with pytest.warns(RuntimeWarning, match="separate leaves cube, cube_back to cpu"):
        found = results(graph, Devices([Card(), CPU()]))
    for a, b in zip(found, results(graph), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert dict(op_counts(graph.nodes)).items() >= {"matmul": 2, "cube": 1, "cube_back": 1}.items()


def test_steps_show_its_formula():
    x = tensor([2.0], requires_grad=True, name="x")
    (step,) = backward_steps(cubic()(x))
    assert step.op == "cube" and step.formula == "dx = dy · 3x²"
    np.testing.assert_array_equal(step.sources[0].outgoing, [12])


def test_integers_choose_and_get_no_gradient():
    @op
    def pick(table, ids):
        return table[ids]

    @pick.gradient
    def _(dy, table, ids):
        g = np.zeros_like(table)
        np.add.at(g, ids, dy)
        return g, np.zeros(ids.shape)

    table = tensor(X, requires_grad=True)
    y = pick(table, [2, 0, 2])
    np.testing.assert_array_equal(y.numpy(), X[[2, 0, 2]])
    y.sum().backward()
    np.testing.assert_array_equal(table.grad, np.outer([1, 0, 2], np.ones(4)))


def test_mistakes_are_named():
    @op
    def plain(x):
        return x * 2

    x = tensor(X, requires_grad=True)
    with pytest.raises(NoGradientError, match="plain has no gradient yet: @plain.gradient"):
        plain(x).sum().backward()

    plain.gradient(lambda dy, x: dy.sum())
    with pytest.raises(ShapeError, match=r"plain_back: float64 of shape \(\), wanted \(3, 4\)"):
        plain(x).sum().backward()

    plain.gradient(lambda dy, x: (dy, dy))
    with pytest.raises(ShapeError, match="gave 2 results for 1 sources"):
        plain(x).sum().backward()

    @op
    def joined(a, b):
        return np.concatenate([a, b])

    with pytest.raises(ShapeError, match=r"joined: of ones of shape \[3, 4\], \[2\]: all the"):
        joined(X, X[0, :2])

    @op
    def word(x):
        return "word"

    with pytest.raises(ShapeError, match="wanted numbers"):
        word(X)

    @op
    def chosen(x):
        return x[x > 0]

    with pytest.raises(ShapeError, match=r"chosen: its reference gave shape"):
        results(Graph.of(chosen(leaf(X - 1))))
    with pytest.raises(ShapeError, match=r"chosen: its reference gave shape"):
        chosen(X - 1)
