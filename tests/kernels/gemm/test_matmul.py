"""The product ops: batches as in ggml, sources with gaps, sums in place, refusals."""

import numpy as np
import pytest

from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import I32, dtype
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import (
    OPS,
    mul_mat,
    mul_mat_add,
    narrow,
    out_prod,
    out_prod_add,
    permute,
    scale,
    transpose,
)
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, run


def numbers(rng, *shape):
    return leaf(rng.standard_normal(shape).astype(np.float32))


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("w", "x"),
    [
        ((5, 7), (3, 7)),
        ((5, 7), (2, 6, 3, 7)),
        ((3, 5, 7), (6, 3, 7)),
        ((1, 2, 5, 7), (3, 2, 4, 7)),
        ((2, 5, 7), (3, 2, 4, 7)),
        ((3, 2, 5, 7), (3, 4, 4, 7)),
        ((2, 2, 5, 7), (4, 6, 3, 7)),
        ((2, 1, 5, 7), (4, 6, 3, 7)),
    ],
)
def test_every_axis_of_batches_is_repeated(w, x, rng):
    """As ggml: index i of x takes index i // r of w, axis by axis."""
    w, x = numbers(rng, *w), numbers(rng, *x)
    many = w.data.reshape((1,) * (x.data.ndim - w.data.ndim) + w.data.shape)
    for axis in range(x.data.ndim - 2):
        many = np.repeat(many, x.data.shape[axis] // many.shape[axis], axis)
    y = x.data @ many.swapaxes(-1, -2)
    found, back = run(mul_mat(w, x), out_prod(w, transpose(leaf(y))))
    assert_close(found, y)
    assert_close(back, y @ many)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_activations_with_gaps(kind, rng):
    """Transposed, cut and permuted ones, beside any type of weight."""
    raw = quantize(rng.standard_normal((6, 32)).astype(np.float32), kind).view(dtype(kind).numpy)
    w, plain = leaf(raw, "w", dtype(kind)), dequantize(raw, kind)
    x, wide, deep = numbers(rng, 32, 5), numbers(rng, 5, 40), numbers(rng, 4, 2, 32)
    products = [transpose(x), narrow(wide, 1, 3, 32), permute(deep, (1, 0, 2))]
    arrays = [x.data.T, wide.data[:, 3:35], deep.data.swapaxes(0, 1)]
    for found, a in zip(run(*(mul_mat(w, t) for t in products)), arrays, strict=True):
        assert_close(found, a @ plain.T)
    y, d, cut = numbers(rng, 5, 6), numbers(rng, 6, 5), numbers(rng, 5, 9)
    (found,) = run(mul_mat_add(y, w, transpose(x)))
    assert_close(found, y.data + x.data.T @ plain.T)
    columns = transpose(narrow(cut, 1, 1, 6))  # (6, 5), from rows that lie apart
    for found, a in zip(run(out_prod(w, d), out_prod(w, columns)), (d, columns), strict=True):
        assert_close(found, a.data.T @ plain if a is d else cut.data[:, 1:7] @ plain)


@pytest.mark.parametrize("n_tokens", [1, 3, 16, 40])
def test_a_sum_whose_terms_share_a_tensor(n_tokens, rng):
    """y + y·wᵀ and y + x·yᵀ must not be added up over a factor that is still read."""
    a, w = numbers(rng, n_tokens, 40), numbers(rng, 40, 40)
    y = scale(a, 1.0)
    (found,) = run(mul_mat_add(y, w, y))
    assert_close(found, a.data + a.data @ w.data.T)
    square = scale(w, 1.0)
    x = numbers(rng, 40, 40)
    (found,) = run(mul_mat_add(square, square, x))
    assert_close(found, w.data + x.data @ w.data.T)
    (found,) = run(out_prod_add(square, square, x))
    assert_close(found, w.data + x.data.T @ w.data)
    (found,) = run(out_prod_add(square, x, square))
    assert_close(found, w.data + w.data.T @ x.data)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("n_tokens", [1, 5, 40])
@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
def test_a_gradient_is_added_to_a_sum(kind, n_tokens, compute, rng):
    """Of any type of weight, in place and where the sum is read afterwards."""
    raw = quantize(rng.standard_normal((96, 512)).astype(np.float32), kind)
    w, plain = leaf(raw.view(dtype(kind).numpy), "w", dtype(kind)), dequantize(raw, kind)
    c, dy = numbers(rng, n_tokens, 512), numbers(rng, n_tokens, 96)
    wanted, bound = c.data + dy.data @ plain, 1e-5 if compute == "f32" else 3e-2
    for keep in (False, True):
        total = scale(c, 1.0)
        outputs = [out_prod_add(total, w, transpose(dy)), *([scale(total, 2.0)] if keep else ())]
        found, *others = run(*outputs, devices=Devices([CPU(compute)]))
        assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()
        for other in others:
            assert_close(other, 2 * c.data)


def test_a_sum_is_added_up_in_place_of_its_first_term(rng):
    y, w, x = scale(numbers(rng, 3, 6), 1.0), numbers(rng, 6, 8), numbers(rng, 3, 8)
    total = mul_mat_add(y, w, x)
    assert plan(Graph.of(total), CPU()).reused == {total: y}
    (found, kept) = run(total, y)
    assert_close(found, kept + x.data @ w.data.T)


@pytest.mark.parametrize(
    ("w", "x", "said"),
    [
        ((5, 7), (3, 8), r"differ in the axis they are summed over \(7 and 8\)"),
        ((2, 5, 7), (3, 3, 7), r"batches \(2,\) do not divide batches \(3,\)"),
        ((2, 5, 7), (3, 7), r"batches \(2,\) do not divide batches \(\)"),
        ((7,), (3, 7), "two axes or more"),
    ],
)
def test_misfits_are_refused(w, x, said):
    with pytest.raises(ShapeError, match=said):
        mul_mat(zeros(w, name="w"), zeros(x, name="x"))


def test_the_weight_is_named():
    with pytest.raises(ShapeError, match=r"mul_mat with blk\.0\.attn_q: \(5, 7\) and \(3, 8\)"):
        mul_mat(zeros((5, 7), name="blk.0.attn_q"), zeros((3, 8)))


def test_a_second_factor_of_halves_is_that_of_its_floats(rng):
    w, halves = numbers(rng, 5, 8), rng.standard_normal((3, 8)).astype(np.float16)
    found, wanted = run(mul_mat(w, leaf(halves)), mul_mat(w, leaf(halves.astype(np.float32))))
    np.testing.assert_array_equal(found, wanted)


def test_a_matrix_of_halves_has_batches(rng):
    w, x = rng.standard_normal((2, 5, 8)).astype(np.float16), numbers(rng, 2, 3, 8)
    (found,) = run(mul_mat(leaf(w), x))
    assert_close(found, x.data @ w.astype(np.float32).swapaxes(-1, -2))


def test_types_are_refused():
    halves = leaf(np.zeros((5, 8), np.float16), "halves")
    with pytest.raises(ShapeError, match="the second factor is I32, wanted F32"):
        mul_mat(zeros((5, 8)), zeros((3, 8), I32))
    with pytest.raises(ShapeError, match=r"the rows of .* have gaps"):
        mul_mat(transpose(halves), zeros((3, 5)))
    with pytest.raises(ShapeError, match=r"mul_mat_add: adds \(3, 5\) to \(3, 6\)"):
        mul_mat_add(zeros((3, 6)), halves, zeros((3, 8)))
    with pytest.raises(ShapeError, match=r"out_prod_add: adds \(3, 8\) to \(3, 5\)"):
        out_prod_add(zeros((3, 5)), zeros((4, 8)), zeros((4, 3)))


def test_batches_that_cannot_be_walked_as_one_axis(rng):
    """The op itself, without its builder's copy: no copy may be made that is gone when it runs."""
    a, stored = numbers(rng, 2, 1, 5, 7), numbers(rng, 4, 5, 7, 2)
    (found,) = run(OPS["out_prod"](a, permute(stored, (0, 2, 1, 3))))
    b = stored.data.swapaxes(1, 2).swapaxes(-1, -2)
    assert_close(found, b @ np.repeat(a.data, 2, axis=0))
