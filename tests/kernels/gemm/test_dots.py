"""Dot products of four rows at once, which some CPUs alone take: here on every one."""

import numpy as np
import pytest

from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
from pyggml.jit import JIT
from pyggml.jit.decorators import OPTIONS
from pyggml.kernels.gemm import Problem, dots, few
from pyggml.kernels.gemm.path import Operands

pytestmark = pytest.mark.skipif(not JIT, reason="tasks need the JIT")


@pytest.fixture
def multiply(monkeypatch):
    """multiply(x, w, kind, together, start): start + x · Wᵀ, `together` rows at once.

    The code is not kept: a later process would take it for that of this CPU.
    """
    monkeypatch.setitem(OPTIONS, "cache", False)

    def product(x, w, kind, together, start):
        for module in (dots, few):
            monkeypatch.setattr(module, "TOGETHER", together)
        p = Problem("mul_mat", len(x), len(w), x.shape[1], dtype(kind), "f32")
        layout, c = few.FLOATS.layout(p), start.copy()
        memory = CPU().alloc(layout.n_bytes)
        memory[:] = 255  # NaN
        code = few._few_tasks(dots.kind_of_rows(p.weight_type, p.k))
        few._call(p, Operands(c, x, w, memory, True), layout.cut(memory), code, 0)()
        return c

    return product


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_four_rows_at_once_are_each_as_alone(kind, multiply, rng, some_weight):
    """One row, rows that fill no four, more than one task has; they lie apart."""
    k = 3 * dots.step(dtype(kind))
    for n in (1, 6, few.TASK_ROWS + 7):
        w, x = some_weight(rng, (2 * n, k), kind)[::2], rng.standard_normal((2, k)).astype("f4")
        start = rng.standard_normal((2, n)).astype(np.float32)
        alone, at_once = (multiply(x, w, kind, rows, start) for rows in (1, 4))
        assert np.isfinite(alone).all() and (alone != start).all()
        np.testing.assert_array_equal(at_once, alone)
