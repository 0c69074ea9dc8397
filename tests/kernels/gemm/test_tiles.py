"""Products on tiles (AMX). Where the CPU has none, vector code stands in for their instructions."""

import numpy as np
import pytest
from normals import normal

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
from pyggml.graph.tensor import leaf
from pyggml.jit import JIT, exact
from pyggml.kernels.gemm import reference
from pyggml.kernels.gemm.amx import gated, product, tiles
from pyggml.kernels.gemm.amx.product import (
    BACKWARD_COLUMNS,
    BACKWARD_DEPTH,
    FORWARD_COLUMNS,
    FORWARD_DEPTH,
)
from pyggml.kernels.gemm.amx.tiles import SIDE, STEP
from pyggml.kernels.gemm.path import Operands, Problem
from pyggml.ops.activation.glu import SWIGLU, swiglu
from pyggml.quants import QUANTS, quantize
from pyggml.runtime import run

from measures import nmse

pytestmark = pytest.mark.skipif(not JIT, reason="tasks need the JIT")

TYPES = sorted(QUANTS.keys() - {"F32"})


def bits(x):
    """x rounded to bfloat16, as uint16."""
    whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


def multiply(form, a, w, kind, n, start=None):
    """a (m, k) times w, `mul_mat` or `out_prod`; n columns come out. The scratch is NaN before."""
    in_columns = a.shape[1] > 1 and a.strides[0] == 4
    p = Problem(form, *(len(a), n, a.shape[1]), dtype(kind), "bf16", a_in_columns=in_columns)
    c = np.full((len(a), n), np.nan if start is None else start, np.float32)
    memory = CPU().alloc(product.SOME.layout(p).n_bytes)
    memory[:] = 255
    product.SOME.call(p, Operands(c, a, w, memory, start is not None))()
    return c


def doubled(form, a, w, kind, n, start=0.0):
    """The same by NumPy, with both factors rounded to bfloat16."""
    c = np.full((len(a), n), start, np.float32)
    two = reference.forward if form == "mul_mat" else reference.backward
    two(c, a, np.ascontiguousarray(w), dtype(kind), True, True)
    return c


# -- the micro-kernel -----------------------------------------------------------------------------


@exact
def _square(a, b, c, k, accumulate):
    tiles.configure()
    tiles.micro_product(tiles.rows_of(c), tiles.rows_of(a), b.ctypes.data, k, accumulate)
    tiles.release()


def in_pairs(b):
    """B (k, SIDE) as tiles (k / STEP, 2, STEP / 2, 16, 2)."""
    return np.ascontiguousarray(bits(b).reshape(-1, STEP // 2, 2, 2, 16).transpose(0, 3, 1, 4, 2))


def as_floats(numbers):
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def as_the_manual_says(a, b, c):
    """TDPBF16PS for each step: the even and the odd numbers of its k are summed apart."""
    a, b, c = as_floats(bits(a)), as_floats(bits(b)), c.copy()
    for k in range(0, a.shape[1], STEP):
        even, odd = np.zeros_like(c), np.zeros_like(c)
        for i in range(k, k + STEP, 2):
            even += a[:, i, None] * b[i]  # products of bfloat16 are exact
            odd += a[:, i + 1, None] * b[i + 1]
        c += even + odd
    return c


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_micro_kernel_does_what_the_manual_says(steps, accumulate, rng):
    a, b = normal(rng, SIDE, steps * STEP), normal(rng, steps * STEP, SIDE)
    wide = np.zeros((SIDE, steps * STEP + 32), np.uint16)
    wide[:, : steps * STEP] = bits(a)
    c = normal(rng, SIDE, SIDE + 8)
    wanted = c.copy()
    wanted[:, :SIDE] = as_the_manual_says(a, b, c[:, :SIDE] * accumulate)
    _square(wide, in_pairs(b), c, steps, accumulate)
    np.testing.assert_array_equal(c, wanted)


def test_the_configuration():
    """Eight tiles of palette 1: 16 rows of 64 bytes."""
    given = np.frombuffer(tiles.CONFIGURATION, np.uint8)
    assert given.size == 64 and given[0] == 1
    assert given[16:32].view(np.uint16).tolist() == [64] * 8
    assert given[48:56].tolist() == [16] * 8
    assert not given[1:16].any() and not given[32:48].any() and not given[56:].any()


# -- products with weights ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_every_weight_type(kind, rng, some_weight):
    """Tokens, rows and columns around the edges of squares, tiles and passes; sides lie apart."""
    block = dtype(kind).block
    for m, n, units in ((1, 3, 1), (SIDE + 1, 40, 2), (2, FORWARD_COLUMNS + 9, 1)):
        k = units * block if block > 1 else units * STEP
        w = some_weight(rng, (2 * n, k), kind)[::2]
        x, dy = normal(rng, m, k + 8)[:, 4:-4], normal(rng, m, n + 8)[:, 4:-4]
        for form, a, wide in (("mul_mat", x, n), ("out_prod", dy, k)):
            assert nmse(multiply(form, a, w, kind, wide), doubled(form, a, w, kind, wide)) < 2e-7
            found = multiply(form, a, w, kind, wide, start=0.5)
            assert nmse(found, doubled(form, a, w, kind, wide, 0.5)) < 2e-7


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q2_K", "BF16"])
def test_sums_over_several_passes(kind, rng, some_weight):
    n, k = BACKWARD_DEPTH + 32, FORWARD_DEPTH + BACKWARD_COLUMNS
    w, x, dy = some_weight(rng, (n, k), kind), normal(rng, 3, k), normal(rng, 3, n)
    for form, a, wide in (("mul_mat", x, n), ("out_prod", dy, k)):
        found = multiply(form, a, w, kind, wide, 0.5)
        assert nmse(found, doubled(form, a, w, kind, wide, 0.5)) < 2e-7


@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("k", [1, 31, 33, 70])
def test_rows_of_any_length(kind, k, rng, some_weight):
    w, x, dy = some_weight(rng, (21, k), kind), normal(rng, 5, k), normal(rng, 5, 21)
    for form, a, wide in (("mul_mat", x, 21), ("out_prod", dy, k)):
        assert nmse(multiply(form, a, w, kind, wide), doubled(form, a, w, kind, wide)) < 2e-7


@pytest.mark.parametrize("m", [1, 15, SIDE + 3, 2 * SIDE])
@pytest.mark.parametrize("k", [2, 31, 2 * STEP, BACKWARD_DEPTH + 5])
def test_columns_give_the_bits_of_rows(m, k, rng, some_weight):
    """Of a gradient dW = dyᵀ·x: dyᵀ is read in columns, which lie apart."""
    w, dy = some_weight(rng, (k, 40), "BF16"), normal(rng, k, m + 3)[:, 2 : m + 2]
    for start in (None, 0.5):
        wanted = multiply("out_prod", np.ascontiguousarray(dy.T), w, "BF16", 40, start)
        np.testing.assert_array_equal(multiply("out_prod", dy.T, w, "BF16", 40, start), wanted)


def test_how_far_from_exact(rng):
    """A tenth of what rounding x to bytes costs."""
    w, x = quantize(normal(rng, 96, 768), "Q8_0"), normal(rng, 40, 768)
    wanted = x.astype(np.float64) @ reference.dequantize(w, "Q8_0").T.astype(np.float64)
    assert 1e-6 < nmse(multiply("mul_mat", x, w, "Q8_0", 96), wanted) < 8e-6


def test_threads_change_nothing(rng, monkeypatch):
    """Nor does the width of tasks."""
    w, before = quantize(normal(rng, 3 * FORWARD_COLUMNS, 512), "Q4_K"), threads.get()
    x, dy = normal(rng, 5 * SIDE, 512), normal(rng, 5 * SIDE, len(w))
    found = []
    try:
        for n in (1, before):
            threads.set(n)
            found.append(multiply("mul_mat", x, w, "Q4_K", len(w)).tobytes())
            found.append(multiply("out_prod", dy, w, "Q4_K", 512).tobytes())
    finally:
        threads.set(before)
    assert found[:2] == found[2:]
    monkeypatch.setattr(threads, "most", lambda: 16)
    assert product._cut(Problem("mul_mat", SIDE, len(w), 512, dtype("Q4_K"), "bf16"))[0] == 64
    assert found[0].startswith(multiply("mul_mat", x[:SIDE], w, "Q4_K", len(w)).tobytes())


def test_what_is_not_finite_stays_in_its_row(rng):
    w, x = quantize(normal(rng, 40, 64), "Q8_0"), normal(rng, 5, 64)
    x[1, 7], x[3, 9] = np.nan, np.inf
    found = multiply("mul_mat", x, w, "Q8_0", 40)
    assert np.isnan(found[1]).all() and not np.isfinite(found[3]).any()
    assert np.isfinite(found[[0, 2, 4]]).all()


# -- gate and up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "kind"), [(5, 40, 64, "Q8_0"), (70, 200, 3072, "Q4_K"), (33, 320, 96, "F16")]
)
def test_the_unit_of_gate_and_up_has_the_bits_of_both_apart(m, n, k, kind, is_narrow, rng):
    a, weights = normal(rng, m, k), [quantize(normal(rng, n, k) / 8, kind) for _ in range(2)]
    gate, up = (multiply("mul_mat", a, w, kind, n) for w in weights)
    (wanted,) = run(swiglu(leaf(gate), leaf(up)))
    p = Problem("mul_mat", m, n, k, dtype(kind), "bf16")
    memory = CPU().alloc(gated.layout(p).n_bytes)
    memory[:] = 255
    c = np.full((m, n), 0xFFFF, np.uint16) if is_narrow else np.full((m, n), np.nan, np.float32)
    o = Operands(c, a, weights[0], memory, False)
    assert gated.takes(p) and SWIGLU.formula is not None
    gated.call_of(p, o, weights[1], SWIGLU.formula)()
    np.testing.assert_array_equal(c, bits(wanted) if is_narrow else wanted)


def test_rows_that_are_too_long_for_panels_of_both_are_not_taken():
    assert not gated.takes(Problem("mul_mat", 64, 64, 8192, dtype("Q8_0"), "bf16"))
    assert not gated.takes(Problem("mul_mat", 64, 64, 256, dtype("Q8_0"), "f32"))
