"""Products with x rounded to bytes, beside a reference that rounds alike and the exact product."""

import numpy as np
import pytest
from normals import normal
from scales_in_dy import with_scales_in_dy

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.generation.sampling import ALIKE
from pyggml.graph.dtypes import dtype
from pyggml.kernels import gemm
from pyggml.kernels.gemm import (
    BYTE_TILE,
    CHOSEN,
    by_rows,
    few,
    few_bits,
    int8,
    lane_dots,
    reference,
    several,
)
from pyggml.kernels.gemm.frames import BACKWARD_COLUMNS, FORWARD_COLUMNS
from pyggml.kernels.gemm.int8_tile import (
    BACKWARD_DEPTH,
    BLOCKS,
    FORWARD_DEPTH,
    KINDS,
    MOVED,
    ROW_WORDS,
    WORDS,
)
from pyggml.kernels.gemm.paths import PATHS
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.quants.readers.lanes import LANES

from measures import nmse

MR = BYTE_TILE.mr
NUMPY = not CHOSEN.compiled
FLOAT_GRADIENTS = not NUMPY and int8.INT8 not in PATHS  # and more than a few tokens
OF_SIXTEEN = ("Q2_K", "Q3_K", "Q6_K")  # weights with one scale


def forward(x, w, kind, start=None, compute="int8"):
    n_tokens, depth = x.shape
    y = np.full((n_tokens, len(w)), np.nan if start is None else start, np.float32)
    p = gemm.Problem("mul_mat", n_tokens, len(w), depth, dtype(kind), compute)
    work = CPU().alloc(gemm.scratch_bytes(p))
    work[:] = 255  # NaN
    weight = gemm.Weight(w, dtype(kind), compute)
    gemm.mul_mat(y, x, weight, work, start is not None)()
    return y


def doubled(x, w, kind, start=0.0):
    """The reference's product, which rounds x to the same bytes."""
    y = np.full((len(x), len(w)), start, np.float32)
    reference.forward(y, x, np.ascontiguousarray(w), dtype(kind), True, False, True)
    return y


def backward(dy, w, kind, n_in, start=None, compute="int8"):
    dx = np.full((len(dy), n_in), np.nan if start is None else start, np.float32)
    p = gemm.Problem("out_prod", len(dy), n_in, dy.shape[1], dtype(kind), compute)
    work = CPU().alloc(gemm.scratch_bytes(p))
    work[:] = 255
    weight = gemm.Weight(w, dtype(kind), compute)
    gemm.out_prod(dx, dy, weight, work, start is not None)()
    return dx


def rounded_to_bytes(dy, w, kind):
    """dy · w of bytes, each of 32 rows of w."""
    dx = np.zeros((len(dy), dequantize(w[:1], kind).shape[1]), np.float32)
    reference.backward(dx, dy, w, dtype(kind), False, False, True)
    return dx


def path(n_tokens, n_out, depth, kind):
    return gemm.path_of(gemm.Problem("mul_mat", n_tokens, n_out, depth, dtype(kind), "int8")).name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_meet_tokens_of_any_number(kind, rng, some_weight):
    """Around the edges of tiles and of passes; weights and tokens that lie apart."""
    step = max(dtype(kind).block, 32)
    for n_tokens, n_out, depth in (
        (1, 1, step),
        (1, few.TASK_ROWS + 3, 3 * step),
        (lane_dots.TOGETHER + 1, several.TASK_ROWS + LANES, 5 * step),
        (several.MOST, 2 * LANES - 1, FORWARD_DEPTH),
        (several.MOST + 1, FORWARD_COLUMNS - 1, FORWARD_DEPTH),
        (MR, FORWARD_COLUMNS, 5 * step),
        (2 * MR + 1, FORWARD_COLUMNS + 1, FORWARD_DEPTH + step),
    ):
        w = some_weight(rng, (2 * n_out, depth), kind)[::2]
        x = normal(rng, n_tokens, depth + 8)[:, 4:-4]
        found, wanted = forward(x, w, kind), doubled(x, w, kind)
        rounded = {"int8": 3e-5, few_bits.TWO_SCALES.name: 1e-7} if kind in OF_SIXTEEN else {}
        name = path(n_tokens, n_out, depth, kind)
        assert nmse(found, wanted) < rounded.get(name, 1e-11)
        assert nmse(forward(x, w, kind, 0.5), wanted + 0.5) < 3e-5


@pytest.mark.skipif(NUMPY, reason="one path for any number of tokens")
@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q6_K"])
def test_a_token_has_the_same_product_whatever_is_beside_it(kind, rng, some_weight):
    """To the bit, so that a text does not depend on how many others are written."""
    w, x = some_weight(rng, (several.TASK_ROWS + 5, 512), kind), normal(rng, several.MOST, 512)
    all_of_them = forward(x, w, kind)
    for n in (several.FEWEST, lane_dots.TOGETHER, several.MOST - 1):
        np.testing.assert_array_equal(forward(x[-n:], w, kind), all_of_them[-n:])


@pytest.mark.skipif(NUMPY, reason="without compiled products nothing makes bytes of weights")
@pytest.mark.quick
@pytest.mark.parametrize("kind", OF_SIXTEEN)
def test_weights_are_rounded_to_the_nearest_byte_of_one_scale(kind, rng):
    """Scales of either sign, zero, and far apart; q that is as large as it can be."""
    blocks = rng.integers(0, 256, (64, dtype(kind).block_bytes), np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}[kind]:  # d, and dmin
        blocks[:, at : at + 2] = np.float16(-0.25).view(np.uint16)[None].view(np.uint8)
        blocks[0, at : at + 2] = 0  # all scales of a block are 0
    row = np.empty(ROW_WORDS, np.float32)
    for block in blocks:
        int8._BYTES[kind](row, block, 1)
        q = row[: 256 // 4].view(np.uint8 if MOVED else np.int8).astype(np.float64) - MOVED
        scales = row[WORDS : WORDS + 8].repeat(32).astype(np.float64)
        minima = row[WORDS + BLOCKS :][:8].repeat(32) if kind == "Q2_K" else 0.0
        wanted = dequantize(block, kind).astype(np.float64)
        steps = abs(q * scales + minima - wanted) / np.where(scales == 0, 1, abs(scales))
        is_cut = (q == 127) & (wanted / np.where(scales == 0, 1, scales) > 127)
        assert steps[is_cut].max(initial=0) <= 1
        assert steps[~is_cut].max() < 0.54  # a 32nd of a step is not seen


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rows_in_any_number(kind, rng, some_weight):
    """Around the edges of tiles and of passes over W's rows; both sides lie apart."""
    for n_tokens, n_out, n_in in (
        (1, 32, 256),
        (MR, BACKWARD_DEPTH, 256 + BACKWARD_COLUMNS),
        (2 * MR + 1, BACKWARD_DEPTH + 96, 768),
    ):
        w = some_weight(rng, (2 * n_out, n_in), kind)[::2]
        dy = normal(rng, n_tokens, n_out + 8)[:, 4:-4]
        exact = dy.astype(np.float64) @ dequantize(np.ascontiguousarray(w), kind)
        for start in (None, 0.5):
            found = backward(dy, w, kind, n_in, start)
            if FLOAT_GRADIENTS:
                assert nmse(found, exact + (start or 0)) < 1e-11
                continue
            wanted = np.full_like(found, start or 0)
            rounded = with_scales_in_dy if kind in few_bits.KINDS else rounded_to_bytes
            wanted += rounded(dy, np.ascontiguousarray(w), kind)
            assert nmse(found, wanted) < 1e-6  # a tie may be rounded the other way
        if not FLOAT_GRADIENTS:
            assert 1e-5 < nmse(backward(dy, w, kind, n_in), exact) < 1e-4


def test_small_blocks_leave_columns_over(rng):
    """Rows of W that are no whole number of tiles long."""
    w, dy = quantize(normal(rng, 64, BACKWARD_COLUMNS + 96), "Q8_0"), normal(rng, 9, 64)
    wanted = dy @ dequantize(w, "Q8_0")
    assert nmse(backward(dy, w, "Q8_0", BACKWARD_COLUMNS + 96), wanted) < 1e-4


def test_gradients_over_an_odd_number_of_rows_are_made_of_floats(rng):
    w, dy = quantize(normal(rng, 40, 256), "Q8_0"), normal(rng, 9, 40)
    found, wanted = (backward(dy, w, "Q8_0", 256, None, c) for c in ("int8", gemm.FLOATS))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", [1, 5, 40])
def test_how_far_from_exact(kind, n_tokens, rng, some_weight):
    """The figure that int8's docstring states."""
    w, x = some_weight(rng, (300, 768), kind), normal(rng, n_tokens, 768)
    wanted = x.astype(np.float64) @ dequantize(w, kind).T.astype(np.float64)
    least = 0 if path(n_tokens, 300, 768, kind) == "f32" else 1e-5  # 512 bits, no VNNI
    assert least < nmse(forward(x, w, kind), wanted) < (6e-5 if kind in OF_SIXTEEN else 4e-5)


@pytest.mark.parametrize("n_tokens", [2, 5, 40])
def test_whole_numbers_are_multiplied_exactly(n_tokens, rng):
    """Where nothing is rounded: bytes as they are, with the largest of either sign."""
    x = rng.integers(-127, 128, (n_tokens, 256)).astype(np.float32)
    x.reshape(-1, 32)[:, 0] = 127
    w = rng.integers(-127, 128, (70, 256)).astype(np.float32)
    w.reshape(-1, 32)[:, 0] = -127
    found = forward(x, quantize(w, "Q8_0"), "Q8_0")
    np.testing.assert_array_equal(found, x @ dequantize(quantize(w, "Q8_0"), "Q8_0").T)


@pytest.mark.parametrize("n_tokens", [2, 5, 40])
@pytest.mark.parametrize("depth", [96, 544])  # blocks of x alone, and sixteen together
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(bad, depth, n_tokens, rng):
    x, w = normal(rng, n_tokens, depth), quantize(normal(rng, 70, depth), "Q8_0")
    wanted = forward(x, w, "Q8_0")
    x[1, 40] = bad
    with np.errstate(invalid="ignore"):  # of the path that is NumPy's
        found = forward(x, w, "Q8_0")
    assert not np.isfinite(found[1]).any()
    others = np.arange(n_tokens) != 1
    np.testing.assert_array_equal(found[others], wanted[others])


@pytest.mark.parametrize("n_tokens", [2, 5, 40])
@pytest.mark.parametrize("depth", [96, 544])
def test_nothing_comes_of_nothing(depth, n_tokens, rng):
    w = quantize(normal(rng, 70, depth), "Q8_0")
    for tiny in (0.0, 1e-38, 1e-45):
        y = forward(np.full((n_tokens, depth), tiny, np.float32), w, "Q8_0")
        assert (np.abs(y) < 1e-30).all()


@pytest.mark.parametrize("depth", [32 * 21, 32 * 36])  # some blocks of a row are left over
def test_a_block_is_rounded_as_if_it_were_alone(depth, rng):
    x, w = normal(rng, 40, depth), normal(rng, 70, depth)
    x.reshape(40, -1, 32)[:, ::3] *= rng.uniform(1e-12, 1e12, (40, 1, 1))
    for block in (slice(i, i + 32) for i in range(0, depth, 32)):
        others_zero = np.zeros_like(w)
        others_zero[:, block] = w[:, block]
        among_others = forward(x, quantize(others_zero, "Q8_0"), "Q8_0")
        alone = forward(x[:, block].copy(), quantize(w[:, block], "Q8_0"), "Q8_0")
        np.testing.assert_array_equal(among_others, alone)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_few_tokens_have_the_bits_of_each_alone(kind, rng):
    """Also where blocks are left over behind the units of a row: guessed tokens count on it."""
    x, w = normal(rng, ALIKE, 288), quantize(normal(rng, 70, 288), kind)
    alone = np.concatenate([forward(row[None].copy(), w, kind) for row in x])
    for n in range(2, ALIKE + 1):
        np.testing.assert_array_equal(forward(x[:n].copy(), w, kind), alone[:n])


def test_two_groups_of_q6_k_get_one_scale(rng):
    """Scales of opposite signs, equal ones, one that is zero, and both."""
    raw = quantize(normal(rng, 80, 256), "Q6_K")
    for pair in ((100, -100), (-7, 7), (-128, 127), (50, 50), (0, 90), (-90, 0), (0, 0)):
        raw[:, 192:208] = np.array(8 * pair, np.int8).view(np.uint8)
        x = normal(rng, 40, 256)
        found, wanted = forward(x, raw, "Q6_K"), doubled(x, raw, "Q6_K")
        assert ((found - wanted) ** 2).sum() <= 3e-4 * (wanted**2).sum()


def test_threads_do_not_change_a_bit(rng):
    before = threads.get()
    x, w = normal(rng, 50, 512), quantize(normal(rng, 160, 512), "Q4_K")
    try:
        found = []
        for n in range(1, threads.most() + 1):
            threads.set(n)
            found.append((forward(x, w, "Q4_K"), forward(x[:2], w, "Q4_K")))
            found[-1] += (
                forward(x[:9], w, "Q4_K"),
                backward(x[:, :160], w, "Q4_K", 512),
            )
    finally:
        threads.set(before)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_weights_that_are_no_whole_numbers_are_multiplied_as_floats(rng, some_weight):
    assert not int8.takes(gemm.Problem("mul_mat", 9, 9, 40, dtype("Q8_0"), "int8"))
    n = by_rows.MOST + 1  # too few for tiles (AMX), which would round them
    x = normal(rng, n, 256)
    for kind in set(QUANTS) - set(KINDS):
        w = some_weight(rng, (33, 256), kind)
        assert not int8.takes(gemm.Problem("mul_mat", n, 33, 256, dtype(kind), "int8"))
        np.testing.assert_array_equal(forward(x, w, kind), forward(x, w, kind, None, gemm.FLOATS))
        found, wanted = (
            backward(x[:, :32], w[:32], kind, 256, None, c) for c in ("int8", gemm.FLOATS)
        )
        np.testing.assert_array_equal(found, wanted)


def test_rows_of_any_length_are_rounded_alike(rng):
    x, w = normal(rng, 1, (1 << 17) + 32), normal(rng, 2, (1 << 17) + 32)
    packed = quantize(w, "Q8_0")
    assert nmse(forward(x, packed, "Q8_0"), doubled(x, packed, "Q8_0")) < 1e-9  # two numbers only
