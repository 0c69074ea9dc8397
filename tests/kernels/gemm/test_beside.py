"""What LoRA adds beside a product: the bits of products one after the other, on every path."""

from dataclasses import replace

import numpy as np
import pytest
from normals import normal

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import F32, dtype
from pyggml.kernels import gemm
from pyggml.kernels.gemm import LowRank, Problem, reference
from pyggml.kernels.gemm.amx import product as tiles
from pyggml.kernels.gemm.beside import MOST
from pyggml.kernels.gemm.path import Operands, layout_of
from pyggml.kernels.gemm.paths import call_of, path_of
from pyggml.kernels.gemm.thin import WIDEST

from measures import nmse

FORMS = ["mul_mat", "out_prod"]
# T, N, K: few and several tokens, edges of tiles and of tasks, sums over several passes.
SIZES = [(2, 40, 256), (7, 130, 512), (13, 300, 256), (50, 257, 1024), (33, 64, 3328)]


def bits(x):
    """x rounded to bfloat16, as uint16."""
    whole = np.ascontiguousarray(x).view(np.uint32)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


class Case:
    """A product with a weight, and one of rank R that is added to it or that it is added to."""

    def __init__(self, rng, some_weight, form, sizes, kind, compute, rank):
        m, n_out, n_in = sizes
        n, k = (n_out, n_in) if form == "mul_mat" else (n_in, n_out)
        self.p = Problem(form, m, n, k, dtype(kind), compute)
        self.rows, self.w = normal(rng, m, k), some_weight(rng, (n_out, n_in), kind)
        self.d = normal(rng, m, rank)
        self.thin = normal(rng, *((n, rank) if form == "mul_mat" else (rank, n)))
        self.start = normal(rng, m, n)

    def joint(self, accumulate, path=None):
        """C, and its rounded copy in the forward pass."""
        c, forward = self.start.copy(), self.p.form == "mul_mat"
        rounded = np.zeros(c.shape, np.uint16) if forward else None
        p = replace(self.p, rank=self.d.shape[1])
        self._run(p, c, self.rows, self.w, accumulate, path, LowRank(self.d, self.thin, rounded))
        return c, rounded

    def apart(self, accumulate, path=None):
        c, forward = self.start.copy(), self.p.form == "mul_mat"
        thin = Problem(self.p.form, *c.shape, self.d.shape[1])
        if not forward:
            self._run(thin, c, self.d, self.thin, accumulate)
        self._run(self.p, c, self.rows, self.w, accumulate or not forward, path)
        if forward:
            self._run(thin, c, self.d, self.thin, True)
        return c

    def _run(self, p, c, rows, w, accumulate, path=None, beside=None):
        """The scratch is NaN before."""
        memory = CPU().alloc(layout_of(path, p).n_bytes if path else gemm.scratch_bytes(p))
        memory[:] = 255
        o = Operands(c, rows, w, memory, accumulate, beside=beside)
        (path.call(p, o) if path else call_of(p, o))()

    def exact(self, accumulate):
        """In float64, with the factors of the weight's product rounded as its compute type says."""
        c = self.start * np.float32(accumulate)
        two = reference.forward if self.p.form == "mul_mat" else reference.backward
        two(c, self.rows, self.w, self.p.weight_type, True, self.p.rounds, self.p.compute == "int8")
        thin = self.thin.T if self.p.form == "mul_mat" else self.thin
        return c + self.d.astype(np.float64) @ thin


def check(case, accumulate, path=None):
    found, rounded = case.joint(accumulate, path)
    np.testing.assert_array_equal(found, case.apart(accumulate, path))
    assert rounded is None or (rounded == bits(found)).all()
    return found


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_are_those_of_products_apart(form, kind, compute, accumulate, rng, some_weight):
    paths = set()
    for sizes in SIZES:
        for rank in (1, 8, 17, MOST):
            case = Case(rng, some_weight, form, sizes, kind, compute, rank)
            check(case, accumulate)
            paths.add(path_of(case.p).joins)
    assert paths == ({False} if not gemm.CHOSEN.compiled else {True, *paths})


@pytest.mark.skipif(not gemm.CHOSEN.compiled, reason="the order of BLAS's sums is its own")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_bits_on_tiles(form, accumulate, rng, some_weight):
    for sizes in ((33, 70, 96), (32, 161, 288), (70, 1600, 32), (5, 40, 3200)):
        for rank in (1, 8):
            case = Case(rng, some_weight, form, sizes, "Q8_0", "bf16", rank)
            check(case, accumulate, tiles.SOME)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_reference(form, compute, rng, some_weight):
    case = Case(rng, some_weight, form, (50, 257, 512), "Q8_0", compute, 8)
    for accumulate in (False, True):
        assert nmse(case.joint(accumulate)[0], case.exact(accumulate)) < 1e-11


@pytest.mark.skipif(threads.most() < 2, reason="this process has one thread")
@pytest.mark.parametrize("form", FORMS)
def test_threads_change_nothing(form, rng, some_weight):
    case = Case(rng, some_weight, form, (70, 300, 512), "Q4_K", "f32", 8)
    before, found = threads.get(), []
    try:
        for n in (1, before):
            threads.set(n)
            found.append(case.joint(accumulate=False)[0].tobytes())
    finally:
        threads.set(before)
    assert found[0] == found[1]


def test_what_is_not_finite_stays_in_its_row(rng, some_weight):
    case = Case(rng, some_weight, "mul_mat", (7, 40, 64), "Q8_0", "f32", 3)
    case.d[1, 2], case.d[3, 0] = np.nan, np.inf
    found, rounded = case.joint(accumulate=False)
    assert np.isnan(found[1]).all() and not np.isfinite(found[3]).any()
    assert np.isfinite(np.delete(found, (1, 3), axis=0)).all()
    as_floats = (rounded.astype(np.uint32) << 16).view(np.float32)
    assert (np.isnan(as_floats) == np.isnan(found)).all()


def test_a_thin_matrix_of_few_columns_is_added_by_its_own_path():
    """Its sums run in lanes, so graphs do not join it."""
    assert gemm.path_of(Problem("mul_mat", 40, WIDEST, 8, F32)).name in ("thin", "numpy")
