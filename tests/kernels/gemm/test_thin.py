"""Products with a thin matrix: packed or as it lies, and beside the exact product."""

import numpy as np
import pytest
from normals import normal

from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import F32
from pyggml.kernels import gemm
from pyggml.kernels.gemm import CHOSEN
from pyggml.kernels.gemm.thin import MR, OUTER_MR, WIDEST

RANKS = sorted({1, 5, MR, OUTER_MR, WIDEST})


def with_gaps(a):
    """The same numbers in rows that lie apart."""
    wide = np.full((len(a), a.shape[1] + 3), np.nan, np.float32)
    wide[:, : a.shape[1]] = a
    return wide[:, : a.shape[1]]


def gradient(s, x, transposed, start):
    """(call, result) of start + sᵀ·x, or of its transpose."""
    factors = (x, s) if transposed else (s, x)
    a, b = (m.T[None] for m in factors)
    c = np.full((1, a.shape[1], b.shape[1]), start, np.float32)
    scratch = CPU().alloc(gemm.scratch_bytes(gemm.strided_problem(c, a, b)))
    scratch[:] = 255  # NaN
    call = gemm.strided(c, a, b, scratch, start != 0)
    call()
    return call, c[0]


def dots(x, thin, form):
    """(call, result) of x · thinᵀ, or of x · thin."""
    n = len(thin) if form == "mul_mat" else thin.shape[1]
    y = np.empty((len(x), n), np.float32)
    p = gemm.Problem(form, len(x), n, x.shape[1], F32)
    scratch = CPU().alloc(gemm.scratch_bytes(p))
    scratch[:] = 255
    call = getattr(gemm, form)(y, x, gemm.Weight(thin, F32, "f32"), scratch, False)
    call()
    return call, y


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("n_tokens", "n"), [(5, 70), (100, 300), (33, 1024)])
def test_gradients(n_tokens, n, rank, transposed, start, rng):
    s, x = normal(rng, n_tokens, rank), normal(rng, n_tokens, n)
    as_it_lies, ds = gradient(s, x, transposed, start)
    packed, same = gradient(with_gaps(s), x, transposed, start)
    np.testing.assert_array_equal(ds, same)
    wanted = start + s.astype(np.float64).T @ x
    np.testing.assert_allclose(ds, wanted.T if transposed else wanted, rtol=1e-4, atol=1e-4)
    if CHOSEN.compiled and rank == OUTER_MR:
        assert len(as_it_lies.arguments) + 1 == len(packed.arguments)


@pytest.mark.parametrize("form", ["mul_mat", "out_prod"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("n_tokens", "depth"), [(5, 70), (40, 1100)])
def test_dots(n_tokens, depth, rank, form, rng):
    x = normal(rng, n_tokens, depth)
    thin = normal(rng, *((rank, depth) if form == "mul_mat" else (depth, rank)))
    as_it_lies, y = dots(x, thin, form)
    packed, same = dots(x, with_gaps(thin), form)
    np.testing.assert_array_equal(y, same)
    wanted = x.astype(np.float64) @ (thin.T if form == "mul_mat" else thin)
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-3)
    if CHOSEN.compiled and rank == MR and form == "mul_mat":
        assert len(as_it_lies.arguments) + 1 == len(packed.arguments)
