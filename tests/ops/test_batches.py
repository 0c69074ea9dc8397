"""The scratch of a product of any strides is that of the calls which it becomes."""

from itertools import permutations

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.graph.tensor import leaf
from pyggml.kernels import gemm
from pyggml.ops.product import matmul
from pyggml.runtime import run

pytestmark = pytest.mark.quick

SHAPES = {
    "a thin second factor": ((20, 70), (20, 8)),
    "a thin first factor": ((20, 8), (20, 70)),
    "one column": ((20, 1), (20, 70)),
    "one column of the other": ((20, 70), (20, 1)),
    "batches": ((2, 20, 8), (4, 20, 30)),
    "a batch": ((1, 20, 8), (1, 20, 30)),
    "two axes of batches": ((2, 1, 20, 8), (4, 1, 20, 30)),
    "batches that repeat in both": ((2, 2, 20, 8), (4, 6, 20, 30)),
}


def orders(n):
    """Orders of the axes in memory."""
    return [*list(permutations(range(n)))[::3], tuple(range(n))[::-1]]


def laid_out(rng, shape, order):
    """Numbers whose axes lie in memory in this order."""
    return (
        rng.standard_normal([shape[i] for i in order])
        .astype(np.float32)
        .transpose(np.argsort(order))
    )


@pytest.fixture
def made(monkeypatch):
    """The problems of the calls that are bound, each that of its arrays."""
    found, multiply = [], gemm.call_of

    def bind(p, o):
        if p.form == "strided":
            assert p == gemm.strided_problem(o.c, o.a, o.b)
            found.append(p)
        return multiply(p, o)

    monkeypatch.setattr(gemm, "call_of", bind)
    return found


def check(node, wanted, made):
    (found,) = run(node)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(set(made)) <= 1
    for problem in made:
        assert CPU().scratch(node) == gemm.scratch_bytes(problem)


@pytest.mark.parametrize("name", SHAPES)
def test_the_scratch_is_that_of_the_calls(name, rng, made):
    n_made = 0
    for order in orders(len(SHAPES[name][0])):
        a, b = (laid_out(rng, shape, order) for shape in SHAPES[name])
        made.clear()
        check(matmul.OUT_PROD(leaf(a), leaf(b)), matmul.OUT_PROD.ref(a, b), made)
        n_made += len(made)
    assert n_made, "all were products of whole rows"


def test_a_row_of_a_column_lies_in_no_column(rng, made):
    """Its floats lie apart; the step from row to row, of which there is one, says nothing."""
    x, w = laid_out(rng, (7, 4), (0, 1))[:, :1].T, laid_out(rng, (5, 7), (0, 1))
    check(matmul.MUL_MAT(leaf(w), leaf(x)), x @ w.T, made)
    assert made
