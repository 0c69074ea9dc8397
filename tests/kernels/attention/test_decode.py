"""Attention of few queries against the plain loop, around the edges of its splits."""

from dataclasses import replace

import numpy as np
import pytest

from pyggml import threads
from pyggml.jit import kernel
from pyggml.kernels.attention import decode, plain
from pyggml.kernels.attention.decode_tile import number_at
from pyggml.kernels.gemm import CHOSEN

from attending import arrays, in_float16, problem_of, run_exactly

pytestmark = pytest.mark.skipif(
    not CHOSEN.compiled, reason="PYGGML_ISA=numpy runs the plain loop itself"
)


def attended(path, a):
    """o and lse, in memory of their own."""
    run_exactly(path, problem_of(a), a)
    return a.o.copy(), a.lse.copy()


def decoded(a):
    return attended(decode.FORWARD, a)


def looped(a):
    return attended(plain.FORWARD, a)


def in_float32(a):
    return replace(a, k=a.k.astype(np.float32), v=a.v.astype(np.float32))


@pytest.mark.quick
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
    a = arrays(rng, len(span), n_keys, span)
    for found, wanted in zip(decoded(a), looped(a), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (3, 3), (8, 1)])
@pytest.mark.parametrize("d", [3, 20, 64, 72])
def test_float16_is_read_as_the_floats_that_it_is(heads, d, rng):
    """Heads by two and one; rows of whole vectors, of others, and shorter than any."""
    a = in_float16(arrays(rng, 4, 70, [(0, 70), (3, 4), (9, 9), (1, 67)], heads, d))
    for found, wanted in zip(decoded(a), looped(in_float32(a)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@kernel
def read_all(out, bits):
    for i in range(out.size):
        out[i] = number_at(bits, i)


def test_every_float16_is_read_right(rng):
    """One by one; and the finite ones as a value that is all there is to see."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers, found = bits.view(np.float16), np.empty(1 << 16, np.float32)
    read_all(found, bits)
    with np.errstate(invalid="ignore"):  # of NaN that signal, which NumPy tells of on some CPUs
        wanted = numbers.astype(np.float32)
    np.testing.assert_array_equal(found, wanted)
    v = numbers[np.isfinite(numbers)][None, None, 3:]  # vectors, and some after them
    a = arrays(rng, 1, 1, [(0, 1)], (1, 1), v.size)
    o, _ = decoded(replace(a, q=np.zeros_like(a.q), k=v, v=v, scale=np.float32(1)))
    np.testing.assert_array_equal(o, v.astype(np.float32))


def test_keys_that_no_query_sees_are_not_read(rng):
    """NaN before and after what is seen, within its tiles too."""
    a = arrays(rng, 2, 300, [(66, 200), (70, 199)], (4, 2), 64)
    wanted = decoded(a)
    for x in (a.k, a.v):
        x[:66], x[200:] = np.nan, np.nan
    for b, exact in ((a, True), (in_float16(a), False)):
        for found, clean in zip(decoded(b), wanted, strict=True):
            np.testing.assert_allclose(
                found, clean, rtol=0 if exact else 1e-2, atol=1e-2 * (not exact)
            )


def test_scores_far_apart_do_not_overflow(rng):
    a = arrays(rng, 1, 200, [(0, 200)])
    a.q[:] *= 1e3  # scores of thousands: one key takes all
    (found, lse), (wanted, _) = decoded(a), looped(a)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("span", [[(0, 50)], [(9, 9), (0, 64)], [(0, 700), (10, 400), (0, 1)]])
@pytest.mark.parametrize("heads", [(12, 3), (5, 5)])
def test_heads_are_shared_out_to_many_threads_with_the_same_bits(heads, span, rng, monkeypatch):
    a = in_float16(arrays(rng, len(span), 700, span, heads))
    results = []
    for n in (1, 2, 3, 64):
        monkeypatch.setattr(decode, "_TASKS", n)
        monkeypatch.setattr(decode, "n_cores", lambda: 1)
        results.append(decoded(a))
    for o, lse in results[1:]:
        np.testing.assert_array_equal(o, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


def test_threads_change_no_bit(rng):
    a, before = arrays(rng, 3, 700, [(0, 700), (10, 400), (0, 1)]), threads.get()
    wanted = decoded(a)
    try:
        for n in range(1, threads.most() + 1):
            threads.set(n)
            for found, same in zip(decoded(a), wanted, strict=True):
                np.testing.assert_array_equal(found, same)
    finally:
        threads.set(before)
