"""Products by expert: what is read, what is refused, and packed experts against dense ones."""

import numpy as np
import pytest
from derivatives import gradients_of

from pyggml.backends.cpu import CPU
from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import leaf
from pyggml.jit import JIT
from pyggml.ops import (
    add_id,
    argsort,
    experts,
    mul_mat_id,
    mul_mat_id_back,
    out_prod_id,
    sum_,
    top_k,
)
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.runtime import Devices, bind, run, schedule

IDS = np.array([[3, 1], [1, 0], [3, 0]], np.int32)


def filled(*shape, seed=0):
    return leaf(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize("kind", [n for n, q in QUANTS.items() if q.dtype.quantised])
def test_packed_experts_are_the_unpacked_ones(kind, rng, some_weight):
    raw = some_weight(rng, (4, 6, 256), kind)
    packed, dense = leaf(raw, "w", DTYPES[kind]), leaf(dequantize(raw, kind).astype(np.float32))
    x, dy, ids = filled(3, 1, 256, seed=1), filled(3, 2, 6, seed=2), leaf(IDS)
    for op, rows in ((mul_mat_id, x), (mul_mat_id_back, dy)):
        found, wanted = run(op(packed, rows, ids), op(dense, rows, ids))
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_experts_that_no_row_goes_to_are_not_read():
    """Expert 2 of four is NaN throughout, and its gradient is zero."""
    w, x, ids = filled(4, 6, 8), filled(3, 2, 8, seed=1), leaf(IDS)
    w.data[2] = np.nan
    y = mul_mat_id(w, x, ids)
    found, dw, dx = run(y, *gradients_of(sum_(y), [w, x]))
    assert np.isfinite(found).all() and np.isfinite(dx).all()
    assert not dw[2].any() and all(dw[e].any() for e in (0, 1, 3))


def test_more_rows_than_tokens_for_one_expert():
    """Which no router asks for: the rows then go in portions."""
    w, x, ids = filled(2, 5, 40), filled(9, 3, 40, seed=1), leaf(np.ones((9, 3), np.int32))
    (found,) = run(mul_mat_id(w, x, ids))
    np.testing.assert_allclose(found, x.data @ w.data[1].T, rtol=1e-4, atol=1e-5)


def test_portions_of_one_expert_are_added_one_after_the_other():
    """Were they to run at once, threads would add to the same numbers."""
    x, dy, ids = filled(2, 16, 300), filled(2, 16, 40, seed=1), leaf(np.zeros((2, 16), np.int32))
    node = out_prod_id(x, dy, ids, 1)
    program, wanted = bind(schedule(Graph.of(node), Devices())), None
    for _ in range(300):
        program()
        found = program.read(node)
        wanted = found if wanted is None else wanted
        np.testing.assert_array_equal(found, wanted)
    exact = dy.data.reshape(32, 40).T @ x.data.reshape(32, 300)
    np.testing.assert_allclose(wanted[0], exact, atol=1e-4)


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K", "Q3_K"])
def test_one_launch_gives_the_bits_of_products_one_by_one(kind, compute, rng, monkeypatch):
    """For experts with no row, one, few and many, in one wave of rows and in several."""
    joined = []
    reserve = experts.at_once
    monkeypatch.setattr(experts, "at_once", lambda *of: joined.append(reserve(*of)) or joined[-1])
    n_expert, n, k, n_used = 12, 40, 256, 5
    w = rng.standard_normal((n_expert, n, k)).astype(np.float32)
    w = leaf(w if kind == "F32" else quantize(w, kind), "w", DTYPES[kind])

    def results(n_tokens):
        rng = np.random.default_rng(n_tokens)
        ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n_tokens)])
        ids[: n_tokens // 2, 0] = 7  # some tokens name an expert twice
        ids, dy = leaf(ids.astype(np.int32)), filled(n_tokens, n_used, n, seed=1)
        for same in (1, n_used):
            x = filled(n_tokens, same, k, seed=2)
            for node in (
                mul_mat_id(w, x, ids),
                mul_mat_id_back(w, dy, ids),
                out_prod_id(x, dy, ids, n_expert),
            ):
                program = bind(schedule(Graph.of(node), Devices([CPU(compute)])))
                program()
                yield program.read(node)

    together = [*map(list, map(results, (1, 3, 90)))]
    assert joined and all(joined) == JIT
    with monkeypatch.context() as patch:
        patch.setattr(experts, "at_once", lambda *of: None)
        alone = [*map(list, map(results, (1, 3, 90)))]
    for some, others in zip(together, alone, strict=True):
        for found, wanted in zip(some, others, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_rounded_products_are_near(rng):
    raw = quantize(rng.standard_normal((4, 6, 256)), "Q8_0")
    ids = leaf(np.tile(IDS, (5, 1)))  # so many rows that an expert's are not done one by one
    y = mul_mat_id(leaf(raw, "w", DTYPES["Q8_0"]), filled(15, 1, 256, seed=1), ids)
    (exact,) = run(y)
    bind(schedule(Graph.of(y), Devices([CPU("bf16")])))()
    assert 0 < np.abs(y.data - exact).max() < 2e-2 * np.abs(exact).max()


@pytest.mark.parametrize("wrong", [-1, 4])
@pytest.mark.parametrize(
    "node",
    [
        lambda ids: mul_mat_id(filled(4, 5, 7), filled(3, 1, 7), ids),
        lambda ids: mul_mat_id_back(filled(4, 5, 7), filled(3, 2, 5), ids),
        lambda ids: out_prod_id(filled(3, 2, 7), filled(3, 2, 5), ids, 4),
        lambda ids: add_id(filled(3, 2, 5), filled(4, 5), ids),
    ],
)
def test_an_id_of_no_expert_is_refused_before_anything_is_read(node, wrong):
    ids = IDS.copy()
    ids[1, 1] = wrong
    with pytest.raises(PyggmlError, match=rf"_id\w*: id {wrong} is none of the 4 rows"):
        run(node(leaf(ids)))


REFUSED = [
    (lambda ids: mul_mat_id(filled(4, 5, 8), filled(3, 1, 7), ids), "rows of 7 numbers do not fit"),
    (lambda ids: mul_mat_id(filled(4, 5), filled(3, 1, 7), ids), "wanted 3 axes"),
    (lambda ids: mul_mat_id(filled(4, 5, 7), filled(3, 3, 7), ids), r"wanted F32\[3, 2, 7\]"),
    (lambda ids: mul_mat_id(filled(4, 5, 7), filled(2, 1, 7), ids), r"wanted F32\[3, 1, 7\]"),
    (lambda ids: mul_mat_id(filled(4, 5, 7), filled(3, 1, 7), filled(3, 2)), "wanted I32"),
    (lambda ids: mul_mat_id(ids, filled(3, 1, 7), ids), "w is .* wanted 3 axes"),
    (lambda ids: mul_mat_id_back(filled(4, 5, 7), filled(3, 2, 7), ids), "rows of 7 numbers"),
    (lambda ids: out_prod_id(filled(3, 2, 7), filled(3, 1, 5), ids, 4), r"wanted F32\[3, 2, 5\]"),
    (lambda ids: add_id(filled(3, 2, 5), filled(4, 6), ids), r"wanted F32\[3, 2, 6\]"),
    (lambda ids: add_id(filled(3, 1, 5), filled(4, 5), ids), r"wanted F32\[3, 2, 5\]"),
    (lambda ids: top_k(filled(3, 5), 6), "k is 6, wanted 1 to the 5 numbers"),
    (lambda ids: top_k(filled(3, 5), 0), "k is 0, wanted 1"),
    (lambda ids: argsort(ids), "wanted F32"),
]


@pytest.mark.parametrize("node, message", REFUSED)
def test_what_does_not_fit_is_refused(node, message):
    with pytest.raises(ShapeError, match=message):
        node(leaf(IDS))


def test_numbers_that_are_none_still_give_positions():
    """A router that has gone astray must not send the kernels outside of the weights."""
    x = filled(40, 9)
    x.data[np.random.default_rng(1).random(x.shape) < 0.4] = np.nan
    x.data[3] = np.nan
    chosen, order = run(top_k(x, 4), argsort(x))
    for rows, n in ((chosen, 4), (order, 9)):
        assert rows.min() >= 0 and rows.max() < 9
        assert all(len(set(row)) == n for row in rows.tolist())
