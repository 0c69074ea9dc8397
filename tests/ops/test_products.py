"""Batches of matrices to unpack: each product is that of its own two matrices."""

import numpy as np
import pytest
from cases import cases

from pyggml import ops
from pyggml.backends.cpu import CPU
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F16, F32, dtype
from pyggml.graph.tensor import leaf
from pyggml.kernels.gemm import FASTEST
from pyggml.look.check import check_gradient
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.runtime import Devices, bind, run, schedule

TYPES = [n for n in QUANTS if n != "F32"]
BATCHES = [((2,), (2,)), ((2,), (6,)), ((1,), (2, 3)), ((2, 1), (4, 3)), ((2, 2), (4, 6))]


def some(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def spread(w, batches):
    """Batch i of the result takes batch i // r of one with r times fewer."""
    w = w.reshape((1,) * (len(batches) + 2 - w.ndim) + w.shape)
    for axis, n in enumerate(batches):
        w = np.repeat(w, n // w.shape[axis], axis)
    return w


@pytest.mark.parametrize("compute", ["f32", FASTEST])
@pytest.mark.parametrize("name", cases(TYPES, ["Q8_0"]))
def test_every_type_with_batches(name, compute, rng, some_weight):
    """Products of x and of dy. Of most types rows of x come one by one: for each number of them a
    type has code of its own, which compiles for half a second."""
    n = 3 if name in ("Q8_0", "Q4_K", "IQ3_S") else 1
    for few, many in BATCHES:
        packed = some_weight(rng, (*few, 5, 256), name)
        w, wide = leaf(packed.view(dtype(name).numpy), "w", dtype(name)), dequantize(packed, name)
        x, dy = some(rng, *many, n, 256), some(rng, *many, n, 5)
        forward = ops.mul_mat(w, leaf(x))
        back = ops.out_prod(w, ops.transpose(leaf(dy)))
        program = bind(schedule(Graph.of(forward, back), Devices([CPU(compute)])))
        program()
        every = spread(wide, many)
        for node, wanted in ((forward, x @ every.swapaxes(-1, -2)), (back, dy @ every)):
            allowed = (1e-5 if compute == "f32" else 0.03) * np.abs(wanted).max()
            np.testing.assert_allclose(program.read(node), wanted, rtol=0, atol=allowed)


def test_a_batch_has_the_bits_of_its_matrix_alone(rng):
    packed = quantize(some(rng, 3, 40, 64), "Q4_0")
    x = some(rng, 3, 7, 64)
    (batched,) = run(ops.mul_mat(leaf(packed, dtype=dtype("Q4_0")), leaf(x)))
    for one, w, rows in zip(batched, packed, x, strict=True):
        (wanted,) = run(ops.mul_mat(leaf(w, dtype=dtype("Q4_0")), leaf(rows)))
        np.testing.assert_array_equal(one, wanted)


def test_sources_with_gaps(rng):
    """Weights by head out of a cache by token, and permuted rows."""
    packed = quantize(some(rng, 9, 2, 32), "Q8_0")
    w = ops.permute(leaf(packed, dtype=dtype("Q8_0")), (1, 0, 2))
    x = ops.permute(leaf(some(rng, 5, 4, 32)), (1, 0, 2))
    found, wide = run(ops.mul_mat(w, x), ops.mul_mat(ops.cpy(w, F32), x))
    np.testing.assert_allclose(found, wide, rtol=0, atol=1e-5 * np.abs(wide).max())


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_gradients_through_batches(name, rng):
    """Of the rows, of a weight made of float32, and of the gradient's own product."""
    packed = quantize(some(rng, 2, 5, 32), name)
    w = leaf(packed.view(dtype(name).numpy), "w", dtype(name))
    x, dy, wide = some(rng, 4, 3, 32), some(rng, 4, 5, 3), some(rng, 2, 5, 32)
    for build, arrays in (
        (lambda x: ops.mul_mat(w, x), [x]),
        (lambda w, x: ops.mul_mat(ops.cpy(w, dtype(name)), x), [wide, x]),
        (lambda dy: ops.out_prod(w, dy), [dy]),
        (lambda w, dy: ops.out_prod(ops.cpy(w, dtype(name)), dy), [wide, dy]),
    ):
        for s in check_gradient(build, arrays, rng):
            # the reference multiplies what was not rounded yet
            limit = 1e-5 if len(arrays) == 1 else 0.02
            assert s.error < limit, s


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("weight", ["F32", "F16", "Q8_0"])
def test_rows_of_half_width(kind, weight, rng):
    packed = quantize(some(rng, 2, 6, 32), weight)
    w = leaf(packed.view(dtype(weight).numpy), "w", dtype(weight))
    x = ops.cpy(leaf(some(rng, 2, 3, 32)), kind)
    b = ops.cpy(leaf(some(rng, 2, 6, 3)), kind)
    found, wanted = run(ops.mul_mat(w, x), ops.mul_mat(w, ops.cpy(x, F32)))
    np.testing.assert_array_equal(found, wanted)
    found, wanted = run(ops.out_prod(w, b), ops.out_prod(w, ops.cpy(b, F32)))
    np.testing.assert_array_equal(found, wanted)


def test_the_sum_with_a_product(rng):
    packed = quantize(some(rng, 2, 6, 32), "Q8_0")
    w = leaf(packed, "w", dtype("Q8_0"))
    x, y = leaf(some(rng, 4, 3, 32)), leaf(some(rng, 4, 3, 6))
    found, product = run(ops.mul_mat_add(y, w, x), ops.mul_mat(w, x))
    np.testing.assert_allclose(found, y.data + product, rtol=0, atol=1e-5)
