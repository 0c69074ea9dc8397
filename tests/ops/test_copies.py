"""Copies of every type that can be written, and into tensors that are there, with gaps or none."""

import numpy as np
import pytest
from cases import cases

from pyggml import ops
from pyggml.errors import PyggmlError, QuantError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F16, F32, I8, I32, dtype
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import check_gradient
from pyggml.quants import QUANTS, NoPack, dequantize, quantize
from pyggml.runtime import bind, run, schedule

TYPES = [n for n, q in QUANTS.items() if q.dtype.quantised]
WRITTEN = [n for n in TYPES if not isinstance(QUANTS[n].pack, NoPack)]


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("of", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", cases(WRITTEN, ["Q8_0"]))
def test_rows_are_quantised_with_the_bytes_of_quantize(name, of):
    """From halves by way of F32, which holds them exactly."""
    x = ops.cpy(leaf(floats(3, 2, 256)), of)
    wide, packed = run(ops.cpy(x, F32), ops.cpy(x, dtype(name)))
    np.testing.assert_array_equal(packed, quantize(wide, name))


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_unpacked_as_by_dequantize(name, rng, some_weight):
    packed = some_weight(rng, (4, 3, 256), name)
    x = leaf(packed, dtype=dtype(name))
    wide, half, turned = run(
        ops.cpy(x, F32), ops.cpy(x, F16), ops.cpy(ops.permute(x, (1, 0, 2)), F32)
    )
    wanted = dequantize(packed, name)
    np.testing.assert_array_equal(wide, wanted)
    np.testing.assert_array_equal(half, wanted.astype(np.float16))
    np.testing.assert_array_equal(turned, wanted.swapaxes(0, 1))


def test_a_quantised_tensor_becomes_another_by_way_of_f32():
    x = leaf(quantize(floats(3, 64), "Q4_0"), dtype=dtype("Q4_0"))
    same, other = run(ops.cpy(x, x.dtype), ops.cpy(x, dtype("Q8_0")))
    np.testing.assert_array_equal(same, x.data)
    np.testing.assert_array_equal(other, quantize(dequantize(x.data, "Q4_0"), "Q8_0"))


def test_whole_numbers_and_floats():
    x = np.array([[-2.9, -0.5, 0.0, 3.99], [2147483520.0, -2147483520.0, 16777217, 7]], np.float32)
    whole, back, half = run(
        ops.cpy(leaf(x), I32), ops.cpy(leaf(np.int32([2**24 + 1, -5])), F32),
        ops.cpy(leaf(np.int32([2049, -5])), F16),
    )  # fmt: skip
    np.testing.assert_array_equal(whole, np.trunc(x).astype(np.int32))
    np.testing.assert_array_equal(back, np.float32([2**24, -5]))
    np.testing.assert_array_equal(half, np.float16([2048, -5]))


@pytest.mark.parametrize("value", [2.0**31, -np.inf, np.nan])
def test_what_no_whole_number_holds_is_an_error(value):
    with pytest.raises(PyggmlError, match=r"no whole number of 32 bits"):
        run(ops.cpy(leaf(np.float32([1, value])), I32))


def test_what_no_block_holds_is_an_error():
    with pytest.raises(QuantError, match=r"nan at \(3,\)"):
        run(
            ops.cpy(leaf(np.where(np.arange(32) == 3, np.nan, 1).astype(np.float32)), dtype("Q8_0"))
        )


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "IQ4_NL"])
def test_a_part_of_a_cache_is_written_and_the_rest_stays(name):
    """Some heads of all rows: a view with gaps; as many elements in other axes."""
    kind, x = dtype(name), floats(5, 64)
    before = quantize(floats(5, 4, 32, seed=1), name)
    cache = leaf(before.view(kind.numpy).copy(), "cache", kind)
    (part,) = run(ops.cpy(leaf(x), ops.narrow(cache, 1, 1, 2)))
    wanted = before.copy()
    wanted[:, 1:3] = quantize(x.reshape(5, 2, 32), name)
    np.testing.assert_array_equal(cache.data.view(np.uint8), wanted)
    np.testing.assert_array_equal(part.view(np.uint8), wanted[:, 1:3])


def test_a_reader_of_the_result_runs_after_the_copy():
    cache = zeros((2, 3), F32, "cache")
    written = ops.cpy(leaf(np.ones((2, 3), np.float32)), cache)
    program = bind(schedule(Graph.of(ops.scale(written, 2.0))))
    program()
    np.testing.assert_array_equal(cache.data, np.ones((2, 3)))
    np.testing.assert_array_equal(program.read(program.schedule.graph.outputs[0]), 2 * cache.data)


def test_the_gradient_is_that_of_the_unrounded_numbers():
    """dx = the later gradient, and none of what was in the tensor before."""
    x = floats(3, 32)

    def doubled(x):
        return ops.scale(ops.cpy(ops.cpy(x, dtype("Q4_0")), F32), 2.0)

    def into(dst, x):
        return ops.mul(ops.cpy(x, ops.scale(dst, 1.0)), x)

    for build, arrays in ((doubled, [x]), (into, [floats(3, 32, seed=2), x])):
        slopes = check_gradient(build, arrays, np.random.default_rng(1))
        if build is doubled:
            assert slopes[0].error < 1e-5
        else:
            before, own = slopes
            assert before.gradient == before.reference == 0
            assert own.error < 1e-5


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ops.cpy(leaf(floats(2, 31)), dtype("Q8_0")), r"Q8_0's 32"),
        (lambda: ops.cpy(leaf(floats(2, 256)), dtype("IQ2_XXS")), r"importance"),
        (lambda: ops.cpy(leaf(floats(2, 3)), I8), r"wanted F32"),
        (lambda: ops.cpy(leaf(floats(2, 3)), zeros((7,))), r"as many elements"),
    ],
)
def test_what_does_not_fit_is_refused(build, words):
    with pytest.raises(ShapeError, match=words):
        build()
