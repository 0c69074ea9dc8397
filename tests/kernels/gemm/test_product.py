"""The products against float64 and against the reference, around the edges of every tile."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import BF16, F32, dtype
from pyggml.kernels import gemm
from pyggml.kernels.gemm import CHOSEN, FLOAT_TILE, FLOATS, dots, paths, reference
from pyggml.kernels.gemm.amx import product as tiles
from pyggml.kernels.gemm.few import FEW, TASK_ROWS
from pyggml.kernels.gemm.frames import BACKWARD_COLUMNS, FORWARD_COLUMNS, task_columns
from pyggml.kernels.gemm.product import BACKWARD_DEPTH, FORWARD_DEPTH
from pyggml.quants import QUANTS, dequantize, quantize

MR = FLOAT_TILE.mr
TOKENS = sorted({1, FEW, FEW + 1, max(MR - 1, 1), MR, MR + 1, 65})
OUT = [1, FORWARD_COLUMNS - 1, FORWARD_COLUMNS, FORWARD_COLUMNS + 1, BACKWARD_DEPTH + 1]
DEPTHS = [32, 96, BACKWARD_COLUMNS, 2 * FORWARD_DEPTH + 32]  # of floats three passes, of pairs two
GUARD = 64


def guarded(shape, rng, start=None):
    """An array between two guards; `check` says whether they are untouched."""
    n = int(np.prod(shape))
    memory = np.full(n + 2 * GUARD, 777, np.float32)
    out = memory[GUARD : GUARD + n].reshape(shape)
    out[...] = np.nan if start is None else start

    def check():
        assert (memory[:GUARD] == 777).all()
        assert (memory[GUARD + n :] == 777).all()

    return out, check


def scratch(n_bytes):
    """Just enough, and nothing in it that may be read before it is written."""
    memory = CPU().alloc(n_bytes)
    memory[:] = 255  # NaN
    return memory


def weight(w, kind, compute="f32"):
    w = w.view(np.float32) if kind == "F32" else w
    return gemm.Weight(w, dtype(kind), compute)


def forward(x, w, kind, start=None, compute="f32"):
    y, check = guarded((len(x), len(w)), None, start)
    p = gemm.Problem("mul_mat", len(x), len(w), x.shape[1], dtype(kind), compute)
    work = scratch(gemm.scratch_bytes(p))
    gemm.mul_mat(y, x, weight(w, kind, compute), work, start is not None)()
    check()
    return y


def backward(dy, w, kind, n_in, start=None, compute="f32"):
    dx, check = guarded((len(dy), n_in), None, start)
    p = gemm.Problem("out_prod", len(dy), n_in, dy.shape[1], dtype(kind), compute)
    work = scratch(gemm.scratch_bytes(p))
    gemm.out_prod(dx, dy, weight(w, kind, compute), work, start is not None)()
    check()
    return dx


def strided(a, b, n_batches, start=None):
    c, check = guarded((n_batches, a.shape[1], b.shape[1]), None, start)
    work = scratch(gemm.scratch_bytes(gemm.strided_problem(c, a, b)))
    gemm.strided(c, a, b, work, start is not None)()
    check()
    return c


def assert_close(found, a, b, base=0.0):
    """found = base + a·bᵀ, to rounding in float32: relative to the sum of magnitudes."""
    a, b = a.astype(np.float64), b.astype(np.float64).swapaxes(-1, -2)
    bound = 1e-6 * (np.abs(a) @ np.abs(b) + np.abs(base)) + 1e-30
    assert (np.abs(found - (base + a @ b)) <= bound).all()


def numbers(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# -- shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_in", DEPTHS)
@pytest.mark.parametrize("n_tokens", TOKENS)
def test_forward_and_backward_at_the_edges_of_tiles(n_tokens, n_in, rng):
    for n_out in OUT:
        x, w, dy = (numbers(rng, *s) for s in ((n_tokens, n_in), (n_out, n_in), (n_tokens, n_out)))
        assert_close(forward(x, w, "F32"), x, w)
        assert_close(backward(dy, w, "F32", n_in), dy, w.T)


@pytest.mark.parametrize("n_in", [1, 7, 33, FORWARD_DEPTH - 1, FORWARD_DEPTH + 1])
def test_rows_that_are_no_whole_vectors(n_in, rng):
    for n_tokens in (1, MR + 1):
        x, w, dy = (numbers(rng, *s) for s in ((n_tokens, n_in), (40, n_in), (n_tokens, 40)))
        assert_close(forward(x, w, "F32"), x, w)
        assert_close(backward(dy, w, "F32", n_in), dy, w.T)


@pytest.mark.parametrize("n_tokens", sorted({1, FEW, MR + 1}))
def test_accumulating_adds_to_what_is_there(n_tokens, rng):
    n_out, n_in = FORWARD_COLUMNS + 1, FORWARD_DEPTH + 32
    x, w, dy = (numbers(rng, *s) for s in ((n_tokens, n_in), (n_out, n_in), (n_tokens, n_out)))
    y, dx = numbers(rng, n_tokens, n_out), numbers(rng, n_tokens, n_in)
    assert_close(forward(x, w, "F32", y), x, w, y)
    assert_close(backward(dy, w, "F32", n_in, dx), dy, w.T, dx)


@pytest.mark.parametrize("n_tokens", sorted({1, FEW, MR + 1}))
def test_rows_may_lie_apart(n_tokens, rng):
    """Activations that are columns of a wider matrix, weights whose rows are padded."""
    wide_x, wide_w = numbers(rng, n_tokens, 300), numbers(rng, 2 * FORWARD_COLUMNS, 128)
    x, w = wide_x[:, 100:196], wide_w[::2, :96]
    assert_close(forward(x, w, "F32"), x, w)
    dy = wide_x[:, 8 : 8 + FORWARD_COLUMNS]
    assert_close(backward(dy, w, "F32", 96), dy, w.T)


# -- weight types -------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("kind", list(QUANTS))
def test_a_packed_weight_multiplies_as_its_float32_self(kind, rng, some_weight):
    block = max(dtype(kind).block, 32)
    for n_tokens, n_out, n_in in (
        (1, 5, block),
        (MR + 1, FORWARD_COLUMNS + 1, 3 * 256),
        (FEW + 1, 17, 256),
    ):  # none is thin
        raw = some_weight(rng, (n_out, n_in), kind)
        plain = dequantize(raw, kind)
        x, dy = numbers(rng, n_tokens, n_in), numbers(rng, n_tokens, n_out)
        y, dx = forward(x, raw, kind), backward(dy, raw, kind, n_in)
        if n_tokens > FEW:  # few tokens multiply without unpacking, in another order
            np.testing.assert_array_equal(y, forward(x, plain, "F32"))
        np.testing.assert_array_equal(dx, backward(dy, plain, "F32", n_in))
        assert_close(y, x, plain)
        assert_close(dx, dy, plain.T)


@pytest.mark.parametrize("n_tokens", range(1, FEW + 1))
@pytest.mark.parametrize("kind", list(QUANTS))
def test_few_tokens_meet_packed_rows(kind, n_tokens, rng, some_weight):
    """Rows of one or several steps, apart or not; with and without something to add to."""
    step = dots.step(dtype(kind))
    for n_out, n_in in ((1, step), (TASK_ROWS + 3, 5 * step)):
        whole = some_weight(rng, (2 * n_out, n_in), kind)
        x, y = numbers(rng, n_tokens, n_in + 8)[:, :n_in], numbers(rng, n_tokens, n_out)
        for raw in (whole[:n_out], whole[::2]):
            plain = dequantize(np.ascontiguousarray(raw), kind)
            assert_close(forward(x, raw, kind), x, plain)
            assert_close(forward(x, raw, kind, y), x, plain, y)


def test_the_types_that_people_use_are_multiplied_packed():
    names = {n for n in QUANTS if dots.kind_of_rows(dtype(n), 256) >= 0}
    assert names >= {
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q5_0",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_XS",
        "MXFP4",
    }
    assert dots.kind_of_rows(dtype("Q8_0"), 2 * dots.LONGEST) < 0, "the sums of x would not fit"
    assert dots.kind_of_rows(dtype("F16"), 40) < 0, "half a step is left"


@pytest.mark.parametrize("kind", [n for n, q in QUANTS.items() if q.dtype.block < BACKWARD_COLUMNS])
def test_rows_of_an_odd_number_of_small_blocks(kind, rng, some_weight):
    block = max(dtype(kind).block, 32)
    for n_in in sorted({block, 3 * block, BACKWARD_COLUMNS + block, FORWARD_DEPTH + block}):
        raw = some_weight(rng, (9, n_in), kind)
        plain = dequantize(raw, kind)
        x, dy = numbers(rng, MR + 1, n_in), numbers(rng, MR + 1, 9)
        assert_close(forward(x, raw, kind), x, plain)
        assert_close(backward(dy, raw, kind, n_in), dy, plain.T)


def test_rows_of_blocks_may_be_taken_from_the_middle(rng, some_weight):
    """How the fused loss walks a large output matrix."""
    raw = some_weight(rng, (100, 256), "Q4_K")
    plain = dequantize(raw, "Q4_K")
    x, dy = numbers(rng, MR + 1, 256), numbers(rng, MR + 1, 100)
    some = slice(30, 95)
    assert_close(forward(x, raw[some], "Q4_K"), x, plain[some])
    assert_close(backward(dy[:, some], raw[some], "Q4_K", 256), dy[:, some], plain[some].T)


# -- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "F16"])
@pytest.mark.parametrize("shape", [(15, 70, 256), (50, 203, 768), (4, 1, 256), (131, 257, 512)])
def test_it_is_the_reference(shape, kind, accumulate, compute, rng, some_weight):
    n_tokens, n_out, depth = shape
    raw = some_weight(rng, (n_out, depth), kind)
    x, dy = numbers(rng, n_tokens, depth), numbers(rng, n_tokens, n_out)
    y, dx = numbers(rng, n_tokens, n_out), numbers(rng, n_tokens, depth)
    wanted_y, wanted_dx = y.copy(), dx.copy()
    pairs = compute == "bf16"
    reference.forward(wanted_y, x, raw, dtype(kind), accumulate, pairs)
    reference.backward(wanted_dx, dy, raw, dtype(kind), accumulate, pairs)
    start_y, start_dx = (y, dx) if accumulate else (None, None)
    found = forward(x, raw, kind, start_y, compute)
    np.testing.assert_allclose(found, wanted_y, rtol=1e-5, atol=1e-6 * depth)
    found = backward(dy, raw, kind, depth, start_dx, compute)
    np.testing.assert_allclose(found, wanted_dx, rtol=1e-5, atol=1e-6 * max(n_out, 100))


@pytest.mark.parametrize("depth", [1, 31, 33, 257])
def test_pairs_of_an_odd_depth(depth, rng, some_weight):
    raw = some_weight(rng, (35, depth), "F16")
    x, y = numbers(rng, 9, depth), np.empty((9, 35), np.float32)
    reference.forward(y, x, raw, dtype("F16"), False, True)
    np.testing.assert_allclose(forward(x, raw, "F16", None, "bf16"), y, rtol=1e-5, atol=1e-4)
    dy, dx = numbers(rng, 9, 35), np.empty((9, depth), np.float32)
    reference.backward(dx, dy, raw, dtype("F16"), False, True)
    found = backward(dy, raw, "F16", depth, None, "bf16")
    np.testing.assert_allclose(found, dx, rtol=1e-5, atol=1e-4)


def test_pairs_keep_what_is_not_finite_and_round_to_even(rng):
    """1 + 2⁻⁸ is half way between two bfloat16, as is 1 + 3·2⁻⁸; NaN's bits must not round up."""
    raw = np.eye(32, dtype=np.float16)
    x = np.ones((4, 32), np.float32)
    x[0, :4] = 1 + 2**-8, 1 + 3 * 2**-8, np.inf, 3.4e38
    x[1, 5] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):  # of the path that is NumPy's
        y = forward(x, raw, "F16", None, "bf16")
    assert np.isnan(y[1]).all()
    x[0, 2:4] = 1
    y = forward(np.repeat(x[:1], FEW + 1, axis=0), raw, "F16", None, "bf16")
    assert y[0, 0] == 1
    assert y[0, 1] == 1 + 2**-6


def test_float32_weights_are_never_rounded(rng):
    w, x = numbers(rng, 20, 40), numbers(rng, 9, 40)
    np.testing.assert_array_equal(forward(x, w, "F32", None, "bf16"), forward(x, w, "F32"))


# -- thin sides: as an adapter's A and B are -----------------------------------------------------


@given(
    n_tokens=st.integers(1, 70),
    rank=st.integers(1, 20),
    depth=st.integers(1, 1100),
    accumulate=st.booleans(),
)
@settings(max_examples=60)
def test_products_with_a_thin_side(n_tokens, rank, depth, accumulate):
    """A x, dy·B, and the gradients of A and B; ranks on both sides of what counts as thin."""
    rng = np.random.default_rng(0)
    a, x = numbers(rng, rank, depth), numbers(rng, n_tokens, depth)
    u = numbers(rng, n_tokens, rank)
    old_u, old_a = (u, a) if accumulate else (None, None)
    assert_close(forward(x, a, "F32", old_u), x, a, u if accumulate else 0)
    assert_close(backward(x, a.T.copy(), "F32", rank, old_u), x, a, u if accumulate else 0)
    left, right = u.T[None], x.T[None]
    found = strided(left, right, 1, None if old_a is None else old_a[None])
    assert_close(found, left, right, a[None] if accumulate else 0)
    found = strided(right, left, 1, None if old_a is None else a.T.copy()[None])
    assert_close(found, right, left, a.T[None] if accumulate else 0)


# -- strided ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_strided_product_is_the_reference(accumulate, rng):
    a, b, c = numbers(rng, 2, 13, 40), numbers(rng, 1, 17, 40), numbers(rng, 4, 13, 17)
    wanted = c.copy()
    reference.strided(wanted, a, b, accumulate)
    found = strided(a, b, 4, c if accumulate else None)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def laid_out(rng, shape, order):
    """An array of this shape whose axes lie in memory in another order, with gaps at the end."""
    inner = numbers(rng, *(shape[i] + (i == order[-1]) for i in order))
    back = np.argsort(order)
    return inner.transpose(back)[tuple(slice(0, n) for n in shape)]


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)]
SIZES = st.sampled_from([1, 2, 3, MR, MR + 1, 31, FORWARD_COLUMNS, FORWARD_COLUMNS + 1])


@given(
    st.tuples(SIZES, SIZES, st.sampled_from([1, 5, 32, 70, FORWARD_DEPTH + 1])),
    st.sampled_from([(1, 1, 1), (2, 2, 2), (2, 1, 2), (2, 3, 6), (4, 2, 4), (1, 3, 3)]),
    st.sampled_from(ORDERS),
    st.sampled_from(ORDERS),
    st.booleans(),
)
@settings(max_examples=60)
def test_strides_and_batches(sizes, batches, order_a, order_b, accumulate):
    (n_rows, n_out, depth), (n_a, n_b, n_c) = sizes, batches
    rng = np.random.default_rng(0)
    a = laid_out(rng, (n_a, n_rows, depth), order_a)
    b = laid_out(rng, (n_b, n_out, depth), order_b)
    base = numbers(rng, n_c, n_rows, n_out) if accumulate else None
    wide_a, wide_b = np.repeat(a, n_c // n_a, axis=0), np.repeat(b, n_c // n_b, axis=0)
    found = strided(a, b, n_c, base)
    assert_close(found, wide_a, wide_b, base if accumulate else 0.0)


# -- threads ------------------------------------------------------------------------------------


def product(path, form, a, w, **flags):
    """a times a matrix w of bfloat16 or float32, by a path or by that of the table."""
    m, k = a.shape
    n, kind = w.shape[form == "out_prod"], BF16 if w.dtype == np.uint16 else F32
    in_columns = a.strides[0] == a.itemsize
    p = gemm.Problem(form, m, n, k, kind, "bf16", a_in_columns=in_columns, **flags)
    path, c = path or gemm.path_of(p), np.zeros((m, n), np.float32)
    path.call(p, gemm.Operands(c, a, w, scratch(path.layout(p).n_bytes), False))()
    return c.tobytes()


# Tiles are emulated where the CPU has none. Each way to pack A, and each to pack W.
PATHS = [None, tiles.SOME] if FLOATS == "bf16" else [tiles.SOME]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form, in_columns", [("mul_mat", 0), ("out_prod", 1)])
@pytest.mark.parametrize("m, n, k", [(98, 96, 1056), (50, 32, 66)])
def test_rows_of_bfloat16_and_matrices_of_float32(path, form, in_columns, m, n, k, rng):
    def rounded(x):
        return quantize(x, "BF16").view(np.uint16)

    def rows(x):
        return x.T if in_columns else x

    a = rng.standard_normal((k, m) if in_columns else (m, k), np.float32)
    w = rng.standard_normal((n, k) if form == "mul_mat" else (k, n), np.float32)
    wanted = product(path, form, rows(a), rounded(w))
    assert product(path, form, rows(rounded(a)), rounded(w), a_is_narrow=True) == wanted
    if k % 32 == 0:
        assert product(path, form, rows(a), w, rounds_w=True) == wanted


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("in_columns", [False, True])
def test_a_large_product_has_the_same_bits_in_parts(in_columns, compute, rng, monkeypatch):
    m, n, k = 202, 70, 6200
    a = rng.standard_normal((k, m) if in_columns else (m, k), np.float32)
    a = a.T if in_columns else a
    w = rng.integers(0x3C00, 0x3F80, (k, n)).astype(np.uint16)
    found = []
    for most in (1 << 21, 1):
        monkeypatch.setattr(paths, "_PACKED", most)
        paths._parts.cache_clear()
        paths.scratch_bytes.cache_clear()
        p = gemm.Problem("out_prod", m, n, k, BF16, compute, a_in_columns=in_columns)
        c = np.zeros((m, n), np.float32)
        scratch = CPU().alloc(gemm.scratch_bytes(p))
        gemm.call_of(p, gemm.Operands(c, a, w, scratch, False))()
        found.append((c.tobytes(), len(paths._parts(p))))
    paths._parts.cache_clear()
    (whole, one), (in_parts, several) = found
    # Where so few rows take another path, as on tiles, the last ten go with those before.
    goes_alone = gemm.path_of(replace(p, m=m % 96)) is gemm.path_of(p) or not in_columns
    assert one == 1 and several == (3 if goes_alone else 2) and in_parts == whole


@pytest.mark.skipif(threads.most() < 2, reason="this process has one thread")
@pytest.mark.parametrize("n_tokens", [1, 2 * MR + 1, 70])
def test_results_do_not_depend_on_the_threads(n_tokens, rng, some_weight):
    raw = some_weight(rng, (2 * BACKWARD_DEPTH + 3, 768), "Q4_K")
    x, dy = numbers(rng, n_tokens, 768), numbers(rng, n_tokens, 2 * BACKWARD_DEPTH + 3)
    a, b = numbers(rng, 3, n_tokens, 90), numbers(rng, 1, 130, 90)
    before, found = threads.get(), []
    try:
        for n in (1, 2):
            threads.set(n)
            y, dx = forward(x, raw, "Q4_K"), backward(dy, raw, "Q4_K", 768)
            found.append((y, dx, strided(a, b, 3)))
    finally:
        threads.set(before)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.skipif(not CHOSEN.compiled, reason="the order of BLAS's sums is its own")
def test_a_result_does_not_depend_on_the_other_tokens(rng):
    """Each token's sums run in one order, wherever the token stands among others."""
    w, x = numbers(rng, 70, 96), numbers(rng, 40, 96)
    whole = forward(x, w, "F32")
    for first in (1, MR, 17):
        part = forward(x[first : first + MR + 2], w, "F32")
        np.testing.assert_array_equal(part, whole[first : first + MR + 2])
    assert w.dtype == F32.numpy


@pytest.mark.parametrize("kind, wanted", [("F32", 192), ("Q8_0", 192), ("Q4_K", 256)])
def test_columns_are_shared_out_evenly_where_blocks_of_weights_allow_it(kind, wanted):
    backward = gemm.Problem("out_prod", 9, 384, 64, dtype(kind))
    assert task_columns(backward, 64) == wanted
    assert task_columns(gemm.Problem("mul_mat", 9, 384, 64, dtype(kind)), 64) == 128
