"""Attention of few queries against the plain loop, around the edges of its blocks of keys."""

import numpy as np
import pytest

from pyggml import threads
from pyggml._jit import kernel
from pyggml.attention import decode, plain
from pyggml.attention.decode_tile import as_float
from pyggml.gemm import CHOSEN

pytestmark = pytest.mark.skipif(
    CHOSEN.name == "numpy", reason="PYGGML_ISA=numpy runs the plain loop itself"
)


def case(rng, n_queries, n_keys, span, heads=(6, 2), d=40):
    """Arguments of both, with results that nothing may be left of."""
    n_heads, n_key_heads = heads
    shapes = (n_queries, n_heads, d), (n_keys, n_key_heads, d), (n_keys, n_key_heads, d)
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in shapes)
    out, lse = np.full_like(q, np.nan), np.full((n_heads, n_queries), np.nan, np.float32)
    return out, lse, q, k, v, np.array(span, np.int32), np.float32(0.4)


def decoded(out, lse, q, k, v, span, scale):
    parts = np.full(decode.parts_shape(q.shape, k.shape), np.nan, np.float32)
    decode.forward(out, lse, q, k, v, span, scale, parts)()
    return out.copy(), lse.copy()


@pytest.mark.parametrize(
    "n_keys, span",
    [
        (1, [(0, 1)]),
        (63, [(0, 63), (5, 6)]),
        (64, [(0, 64), (1, 64), (60, 64)]),
        (130, [(0, 129), (3, 130), (65, 65), (0, 66)]),
        (64 * 32 + 5, [(0, 64 * 32 + 5), (100, 64 * 32), (7, 7)]),
    ],
)
def test_as_the_plain_loop_has_it(n_keys, span, rng):
    arguments = case(rng, len(span), n_keys, span)
    out, lse = decoded(*arguments)
    plain.forward(*arguments)
    np.testing.assert_allclose(out, arguments[0], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(lse, arguments[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("d", [3, 20, 64, 72])
def test_halves_are_the_floats_that_they_are(heads, d, rng):
    """Heads by two and one; rows of whole vectors, of others, and shorter than any."""
    n_keys, span = 70, [(0, 70), (3, 4), (9, 9), (1, 67)]
    out, lse, q, k, v, *rest = case(rng, len(span), n_keys, span, heads, d)
    k, v = k.astype(np.float16), v.astype(np.float16)
    found = decoded(out, lse, q, k, v, *rest)
    plain.forward(out, lse, q, k.astype(np.float32), v.astype(np.float32), *rest)
    for a, b in zip(found, (out, lse), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@kernel
def read_all(out, bits):
    for i in range(out.size):
        out[i] = as_float(bits[i])


def test_every_half_is_read_right():
    """One by one; and the finite ones as a value that is all there is to see."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    halves, found = bits.view(np.float16), np.empty(1 << 16, np.float32)
    read_all(found, bits)
    np.testing.assert_array_equal(found, halves.astype(np.float32))
    v = halves[np.isfinite(halves)][None, None, 3:]  # vectors, and some after them
    q = np.zeros(v.shape, np.float32)
    none = np.full_like(q, np.nan), np.zeros((1, 1), np.float32)
    out, _ = decoded(*none, q, v, v, np.array([[0, 1]], np.int32), np.float32(1))
    np.testing.assert_array_equal(out, v.astype(np.float32))


def test_keys_that_no_query_sees_are_not_read(rng):
    """NaN before and after what is seen, within its tiles too."""
    out, lse, q, k, v, span, scale = case(rng, 2, 300, [(66, 200), (70, 199)], (4, 2), 64)
    wanted = decoded(out, lse, q, k, v, span, scale)
    for side in (k, v):
        side[:66], side[200:] = np.nan, np.nan
    for kind, exact in ((np.float32, True), (np.float16, False)):
        found = decoded(out, lse, q, k.astype(kind), v.astype(kind), span, scale)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-2, atol=0 if exact else 1e-2)


def test_scores_far_apart_do_not_overflow(rng):
    arguments = case(rng, 1, 200, [(0, 200)])
    arguments[2][:] *= 1e3  # scores of thousands: one key takes all
    out, lse = decoded(*arguments)
    plain.forward(*arguments)
    np.testing.assert_allclose(out, arguments[0], rtol=1e-3, atol=1e-4)
    assert np.isfinite(lse).all()


def test_threads_change_no_bit(rng):
    arguments, before = case(rng, 3, 700, [(0, 700), (10, 400), (0, 1)]), threads.get()
    out, lse = decoded(*arguments)
    try:
        for n in range(1, threads.most() + 1):
            threads.set(n)
            again = decoded(*arguments)
            np.testing.assert_array_equal(again[0], out)
            np.testing.assert_array_equal(again[1], lse)
    finally:
        threads.set(before)
