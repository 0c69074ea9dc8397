"""Kernels of generation and of training, thread by thread, where there is no card."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from extras import reason
from processes import python

from pyggml.graph.dtypes import DTYPES
from pyggml.graph.tensor import Tensor, zeros
from pyggml.ops import mul_mat

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))


@pytest.mark.parametrize(
    ("script", "n_results", "allowed"),
    [
        ("few_rows_by_thread.py", 28, 2e-4),
        ("attention_by_thread.py", 17, 5e-4),
        ("packed_tiles_by_thread.py", 5, 3e-3),
        ("training_by_thread.py", 28, 3e-3),
    ],
)
def test_a_kernel_thread_by_thread_agrees_with_numpy(script, n_results, allowed):
    ran = python(Path(__file__).with_name(script))
    assert ran.returncode == 0, ran.stderr
    errors = dict(line.rsplit(" ", 1) for line in ran.stdout.splitlines())
    assert len(errors) == n_results
    assert {what for what, error in errors.items() if not float(error) < allowed} == set()


@pytest.mark.parametrize("limit", [99 << 10, 163 << 10, 227 << 10])
def test_a_block_asks_for_no_more_shared_memory_than_there_is(monkeypatch, limit):
    from pyggml.backends.cuda.gemm import few_rows

    monkeypatch.setattr(few_rows, "shared_bytes", lambda: min(limit, 200 << 10))
    sizes = product([(4096, 1000), (2560, 262144), (4096, 151936), (9728, 2560)], [1, 2, 4])
    for ((k, n), rows), is_gated in product(sizes, [False, True]):
        for kinds in (["Q8_0"], ["IQ1_M"], ["Q2_K"], ["IQ3_S", "Q2_K", "IQ2_S"]):
            served = all(few_rows.serves(DTYPES[kind], rows, k) for kind in kinds)
            assert served or limit == 99 << 10
            if served and not (is_gated and len(kinds) > 1):
                parts = [part_of(kind, rows, n, k, is_gated) for kind in kinds]
                call = few_rows.products(parts, np.empty(rows * k, np.float32), rows, k, None)
                _, (_, _, _, n_bytes), _, _ = call.arguments
                assert n_bytes <= min(limit, 200 << 10)


@pytest.mark.parametrize(("limit", "most_rows"), [(99 << 10, 8), (163 << 10, 16), (227 << 10, 32)])
def test_tiles_of_few_rows_fit_a_block(monkeypatch, limit, most_rows):
    from pyggml.backends.cuda.gemm import packed_tiles
    from pyggml.backends.cuda.gemm.packed_tiles import plan

    monkeypatch.setattr(packed_tiles, "has_clusters", lambda: limit > 200 << 10)
    plan.cache_clear()
    sizes = product([(4096, 1024), (2048, 151936), (12288, 4096)], [8, 16, 32], [False, True])
    for ((k, n), rows, is_gated), kind in product(sizes, ["Q8_0", "IQ1_M", "Q2_K"]):
        made = plan(((DTYPES[kind], n),), rows, k, is_gated, True, True, limit)
        assert (made is None or made.n_bytes <= limit) and (made or rows > most_rows)


def part_of(kind, rows, n, k, is_gated):
    from pyggml.backends.cuda.gemm import few_rows

    w, out = np.empty(n * DTYPES[kind].row_bytes(k), np.uint8), np.empty(rows * n, np.float32)
    return few_rows.FewRowsProduct(out, w, DTYPES[kind], n, up=w if is_gated else None)


def test_rows_of_w_that_begin_within_16_bytes_are_read_by_others(monkeypatch):
    """A card copies 16 bytes at a time from multiples of 16 only; a row here has 306."""
    from pyggml.backends.cuda.gemm import few_rows, path_of
    from pyggml.backends.cuda.ops.products import problem_of

    monkeypatch.setattr(few_rows, "shared_bytes", lambda: 200 << 10)
    whole, x = zeros((9, 288), DTYPES["Q8_0"]), zeros((1, 288))
    for row in range(9):
        w = Tensor((1, 288), whole.dtype, base=whole, offset=row * 306)
        path = path_of(problem_of(mul_mat(w, x), "bf16"))
        assert (path is few_rows.FEW_ROWS) == (row in (0, 8)), row
