"""Tables of every type, ids that are no rows, and writing into a cache."""

import numpy as np
import pytest
from normals import floats

from pyggml.errors import PyggmlError, ShapeError
from pyggml.graph.dtypes import BF16, F16
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops.layout.layout import transpose
from pyggml.ops.layout.rows import get_rows, get_rows_back
from pyggml.ops.layout.set_rows import set_rows
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.runtime import run

PACKED = [n for n, q in QUANTS.items() if q.dtype.quantised]


def numbers(*ids: int) -> Tensor:
    return leaf(np.array(ids, np.int32), "ids")


@pytest.mark.parametrize("name", PACKED)
def test_quantised_rows_are_unpacked(name, rng, some_weight):
    kind = QUANTS[name].dtype
    packed = some_weight(rng, (5, 2 * kind.block), name)
    (y,) = run(get_rows(leaf(packed, "token_embd.weight", kind), numbers(4, 0, 4)))
    np.testing.assert_array_equal(y, dequantize(packed, name)[[4, 0, 4]])
    assert 0 < np.abs(y).mean() < 10


def test_half_precision_rows_are_widened():
    x = floats(4, 6)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    half, brain = run(
        get_rows(leaf(x.astype(np.float16)), numbers(3, 1)),
        get_rows(leaf(bits, dtype=BF16), numbers(3, 1)),
    )
    np.testing.assert_array_equal(half, x.astype(np.float16)[[3, 1]])
    np.testing.assert_array_equal(brain, (x.view(np.uint32) & 0xFFFF0000).view(np.float32)[[3, 1]])


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_row_is_refused_before_anything_is_touched(wrong):
    table, dy, cache = leaf(floats(4, 6)), leaf(floats(2, 6)), leaf(np.zeros((4, 6), np.float32))
    for result in (
        get_rows(table, numbers(0, wrong)),
        get_rows_back(dy, numbers(0, wrong), 4),
        set_rows(cache, dy, numbers(0, wrong)),
    ):
        with pytest.raises(PyggmlError, match=f"id {wrong} is none of the 4 rows"):
            run(result)
    assert not np.any(cache.data)


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_set_rows_writes_into_the_cache_itself(kind):
    cache = leaf(np.zeros((6, 2, 3), kind), "cache_k")
    new = floats(2, 2, 3)
    result = set_rows(cache, leaf(new), numbers(4, 1))
    (y,) = run(result)
    assert result.base is cache
    np.testing.assert_array_equal(cache.data[[4, 1]], new.astype(kind))
    np.testing.assert_array_equal(y, cache.data)
    assert not np.any(cache.data[[0, 2, 3, 5]])


def test_set_rows_rounds_to_halves_with_ties_to_even():
    tie = 2.0**-11
    edges = [1 + tie, 1 + 3 * tie, -1 - tie, 65519.99, 65520, -1e30, 6e-8, 2.9e-8, np.inf, -0.0]
    wanted = [1, 1 + 4 * tie, -1, 65504, np.inf, -np.inf, 2.0**-24, 0, np.inf, -0.0]
    cache = leaf(np.ones((3, len(edges)), np.float16))
    run(set_rows(cache, leaf(np.array([edges], np.float32)), numbers(1)))
    bits = np.array(wanted, np.float16).view(np.uint16)
    np.testing.assert_array_equal(cache.data[1].view(np.uint16), bits)
    assert (cache.data[[0, 2]] == 1).all()


def test_what_set_rows_cannot_do_is_refused():
    cache, new = leaf(np.zeros((4, 6), np.float32)), leaf(floats(2, 6))
    with pytest.raises(PyggmlError, match="id 3 is named twice"):
        run(set_rows(cache, new, numbers(3, 3)))
    with pytest.raises(ShapeError, match=r"dst is .* wanted one without gaps"):
        set_rows(transpose(leaf(np.zeros((6, 4), np.float32))), new, numbers(0, 1))
    with pytest.raises(ShapeError, match="I32.*wanted a type that is written"):
        set_rows(leaf(np.zeros((4, 6), np.int32)), new, numbers(0, 1))
    with pytest.raises(ShapeError, match=r"src is .* wanted F32\[2, 6\]"):
        set_rows(cache, leaf(floats(2, 5)), numbers(0, 1))
    with pytest.raises(ShapeError, match=r"ids is .* wanted I32"):
        get_rows(cache, leaf(floats(2)))
    with pytest.raises(ShapeError, match=r"table is .* wanted 2 or more axes"):
        get_rows(leaf(floats(4).astype(np.float16), dtype=F16), numbers(0))
    with pytest.raises(ShapeError, match=r"ids is .* do not divide \[3\]"):
        get_rows(leaf(floats(3, 4, 2)), leaf(np.zeros((2, 2), np.int32)))


def test_batches_have_tables_of_their_own():
    kind = QUANTS["Q8_0"].dtype
    x = floats(3, 2, 5, 32)
    packed = quantize(x, "Q8_0")
    ids = np.random.default_rng(0).integers(0, 5, (3, 1, 4)).astype(np.int64)
    (y,) = run(get_rows(leaf(packed, "experts", kind), leaf(ids)))
    wanted = np.take_along_axis(dequantize(packed, "Q8_0"), ids[..., None], axis=2)
    np.testing.assert_array_equal(y, wanted)
    with pytest.raises(PyggmlError, match="id 5 is none of the 5 rows"):
        run(get_rows(leaf(packed, "experts", kind), leaf(np.full((1, 1, 1), 5))))


def test_rows_of_integers_stay_integers():
    table = np.array([[1, -1], [2**31 - 1, -(2**31)], [0x7FC00001, 0]], np.int32)
    (y,) = run(get_rows(leaf(table), numbers(1, 2, 0)))
    assert y.dtype == np.int32
    np.testing.assert_array_equal(y, table[[1, 2, 0]])


def test_a_row_may_be_named_once_in_every_batch():
    dst, src = leaf(np.zeros((2, 3, 4), np.float32)), floats(2, 1, 4)
    run(set_rows(dst, leaf(src), leaf(np.array([[2], [2]], np.int64))))
    np.testing.assert_array_equal(dst.data[:, 2], src[:, 0])
    assert not np.any(dst.data[:, :2])
    twice = leaf(np.array([[0, 1], [1, 1]], np.int32))
    with pytest.raises(PyggmlError, match="id 1 is named twice"):
        run(set_rows(dst, leaf(floats(2, 2, 4)), twice))
