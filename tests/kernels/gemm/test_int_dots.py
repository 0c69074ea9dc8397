"""Rows of every quantised type, as they lie, times x in bytes: orders, products, and their twin."""

from functools import cache

import numpy as np
import pytest

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
from pyggml.jit.llvm import MOST_UNSIGNED
from pyggml.kernels import gemm
from pyggml.kernels.gemm import CHOSEN, by_rows, reference, row_plan
from pyggml.kernels.gemm.int_pack import packed_bytes
from pyggml.quants import dequantize
from pyggml.quants.readers.pieces import span
from pyggml.quants.unpack import WHOLE_TYPES

from measures import nmse

pytestmark = pytest.mark.skipif(not CHOSEN.compiled, reason="tasks need the JIT")
WIDTHS = (256, 1024, 4096, 14336)


def form(kind):
    """What of a type's order its code for several tokens depends on."""
    p = row_plan.plan(kind, max(1, row_plan.UNIT // dtype(kind).block))
    return p.signed, p.zero > 0, p.n_minima > 0, p.of_group, len(p.sums) < len(p.vectors)


@cache
def of_each_form():
    """A type of each form: for each number of tokens that are multiplied at once a type has code of
    its own, which compiles for half a second."""
    return {form(kind): kind for kind in WHOLE_TYPES}.values()


def multiplied(x, w, kind, path=by_rows.INT8):
    """x · wᵀ on the path for few rows; scratch holds NaN before."""
    p = gemm.Problem("mul_mat", len(x), len(w), x.shape[1], dtype(kind), "int8")
    assert path.takes(p)
    y, work = np.full((p.m, p.n), np.nan, np.float32), CPU().alloc(path.layout(p).n_bytes)
    work[:] = 255
    path.call(p, gemm.path.Operands(y, x, w, work, False))()
    return y


def as_the_reference(x, w, kind):
    y = np.zeros((len(x), len(w)), np.float32)
    reference.forward(y, x, np.ascontiguousarray(w), dtype(kind), False, False, True)
    return y


def twin(x, w, kind):
    """The products in float64, as the module's docstring says them: bytes of x and whole numbers of
    the weights, with one scale for 32 of x."""
    weights, found = dequantize(w, kind).astype(np.float64), np.zeros((len(x), len(w)))
    for t, token in enumerate(x.reshape(len(x), -1, 32)):
        for block, numbers in enumerate(token):
            scale = np.float32(np.abs(numbers).max() / np.float32(127))
            q = np.rint(numbers * np.float32(1 / scale)) if scale else np.zeros(32)
            found[t] += float(scale) * (weights[:, 32 * block : 32 * block + 32] @ q)
    return found


@pytest.mark.parametrize("kind", WHOLE_TYPES)
def test_rows_of_every_type_and_width(kind, rng, some_weight):
    """One row of x and, of a type of each form, several; rows of W that lie apart; more of them
    than one task has."""
    for width in WIDTHS:
        n = by_rows.TASK_ROWS + 3 if width == 256 else 5
        w = some_weight(rng, (2 * n, width), kind)[::2]
        x = rng.standard_normal((by_rows.MOST, width + 8)).astype(np.float32)[:, 4:-4]
        wanted = as_the_reference(x, w, kind)
        for m in (1, 5) if kind in of_each_form() else (1,):
            assert nmse(multiplied(x[:m], w, kind), wanted[:m]) < 1e-11


@pytest.mark.quick
@pytest.mark.parametrize("kind", WHOLE_TYPES)
def test_units_of_one_block_end_a_row(kind, rng, some_weight):
    """Rows of every number of blocks up to two units and one block."""
    block = dtype(kind).block
    for n in range(1, 2 * max(1, row_plan.UNIT // block) + 2):
        w = some_weight(rng, (3, n * block), kind)
        x = rng.standard_normal((1, n * block)).astype(np.float32)
        assert nmse(multiplied(x, w, kind), twin(x, w, kind)) < 2e-11


@pytest.mark.parametrize("kind", WHOLE_TYPES)
def test_an_order_has_each_weight_once(kind):
    for n_blocks in {1, max(1, row_plan.UNIT // dtype(kind).block)}:
        p = row_plan.plan(kind, n_blocks)
        places = sorted(piece for vector in p.vectors for piece in vector)
        assert places == [*range(n_blocks * dtype(kind).block // p.size)]
        assert sorted(p.within) == [*range(32)]
        assert sorted(i for some in p.sums for i in some) == [*range(len(p.vectors))]


@pytest.mark.parametrize("kind", WHOLE_TYPES)
def test_unsigned_weights_are_small_enough_in_every_order(kind):
    """Also where their fields are moved to the left."""
    for p in row_plan._plans(kind, 1):
        largest = max(span(node)[1] for _, node in p.pieces)
        assert p.signed or largest <= MOST_UNSIGNED


def test_a_token_has_the_same_product_beside_others(rng, some_weight):
    """To the bit, whatever the number of tokens."""
    w = some_weight(rng, (70, 1024), "Q4_K")
    x = rng.standard_normal((by_rows.MOST, 1024)).astype(np.float32)
    together = multiplied(x, w, "Q4_K")
    for t in range(by_rows.MOST):
        np.testing.assert_array_equal(multiplied(x[t : t + 1], w, "Q4_K")[0], together[t])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "IQ2_XXS"])
def test_threads_do_not_change_a_bit(kind, rng, some_weight):
    before, w = threads.get(), some_weight(rng, (300, 512), kind)
    x = rng.standard_normal((2, 512)).astype(np.float32)
    try:
        found = []
        for n in range(1, threads.most() + 1):
            threads.set(n)
            found.append(multiplied(x, w, kind))
    finally:
        threads.set(before)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "IQ3_S"])
def test_extreme_weights_fit_their_sums(kind, rng, some_weight):
    """Every byte 0, 127, 128 or 255, and x at the ends of its range: no sum wraps around."""
    w = some_weight(rng, (4, 512), kind)
    raw, block_bytes = w.reshape(4, -1, dtype(kind).block_bytes), dtype(kind).block_bytes
    scale = {"Q8_0": (0, 2), "Q6_K": (208, 210), "IQ3_S": (0, 2)}[kind]
    for row, byte in zip(raw, (0, 127, 128, 255), strict=True):
        where = [i for i in range(block_bytes) if not scale[0] <= i < scale[1]]
        row[:, where] = byte
    x = np.where(rng.random((2, 512)) < 0.5, -1, 1).astype(np.float32)
    x[1] = 1
    assert nmse(multiplied(x, w, kind), twin(x, w, kind)) < 1e-11


def test_packed_x_is_as_long_as_it_says():
    """Bytes, scales, and zero points or minima, for 256 weights and for a block at the end."""
    assert packed_bytes("Q8_0", 256) == 256 + 64  # 8 scales and zero points
    assert packed_bytes("Q8_0", 256 + 64) == 320 + 2 * 64
    assert packed_bytes("Q6_K", 512) == 2 * (256 + 64 + 64)  # 16 of both
    assert packed_bytes("Q2_K", 256) == 256 + 64 + 64
