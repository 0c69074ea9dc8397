"""Attention on tiles (AMX) against float64. Without them, vector code stands in for their
instructions."""

import numpy as np
import pytest
from normals import normal

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import F32
from pyggml.jit import JIT
from pyggml.kernels.attention.amx import BACKWARD, FORWARD
from pyggml.kernels.attention.amx_tile import BR
from pyggml.kernels.attention.path import AttentionProblem, Backward, Forward
from pyggml.kernels.attention.softmax import BC
from pyggml.kernels.attention.tiled_back import FEWEST_TASKS
from pyggml.kernels.gemm.amx.tiles import SIDE

from measures import nmse

pytestmark = pytest.mark.skipif(not JIT, reason="tasks need the JIT")


def causal(n_queries, n_keys):
    last = np.arange(n_keys - n_queries, n_keys) + 1
    return np.stack([np.zeros_like(last), last], axis=1).astype(np.int32)


def window(n_queries, n_keys, width):
    span = causal(n_queries, n_keys)
    span[:, 0] = np.maximum(span[:, 1] - width, 0)
    return span


def sequences(*lengths):
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    return np.stack([starts, np.arange(sum(lengths)) + 1], axis=1).astype(np.int32)


def exact(q, k, v, do, span, scale):
    """o, lse, dq, dk and dv in float64, head by head."""
    q, k, v, do = (x.astype(np.float64).swapaxes(0, 1) for x in (q, k, v, do))
    repeats, j = len(q) // len(k), np.arange(k.shape[1])
    k, v = np.repeat(k, repeats, 0), np.repeat(v, repeats, 0)
    seen = (span[:, :1] <= j) & (j < span[:, 1:])
    s = np.where(seen, scale * (q @ k.swapaxes(1, 2)), -1e30)
    top = s.max(-1, keepdims=True)
    e = np.where(seen, np.exp(s - top), 0)
    total = e.sum(-1, keepdims=True)
    p = e / np.maximum(total, 1e-300)
    o = p @ v
    ds = p * (do @ v.swapaxes(1, 2) - (do * o).sum(-1, keepdims=True))

    def by_key_head(x):
        return x.reshape(-1, repeats, *x.shape[1:]).sum(1).swapaxes(0, 1)

    dk, dv = by_key_head(scale * (ds.swapaxes(1, 2) @ q)), by_key_head(p.swapaxes(1, 2) @ do)
    lse = np.where(total > 0, top + np.log(np.maximum(total, 1e-300)), 1e30)
    return o.swapaxes(0, 1), lse[..., 0], scale * (ds @ k).swapaxes(0, 1), dk, dv


def run(path, problem, arrays):
    """The path's call; its scratch is NaN before."""
    memory = CPU().alloc(path.n_bytes(problem))
    memory[:] = 255
    path.call(problem, arrays, memory)()


def computed(q, k, v, do, span, scale):
    problem = AttentionProblem(
        n_queries=len(q), n_heads=q.shape[1], n_keys=len(k), n_key_heads=k.shape[1],
        head_size=q.shape[2],
        value_size=q.shape[2], key_type=F32, value_type=F32, has_extras=False, compute="bf16",
    )  # fmt: skip
    extras = {
        "cap": np.float32(0), "mask": np.zeros((1, 1, 0), np.float32),
        "sinks": np.full(q.shape[1], -np.inf, np.float32),
        "slopes": np.zeros(q.shape[1], np.float32),
    }  # fmt: skip
    o, lse = np.full_like(q, np.nan), np.full((q.shape[1], len(q)), np.nan, np.float32)
    given = dict(q=q, k=k, v=v, span=span, scale=np.float32(scale), o=o, lse=lse, **extras)
    run(FORWARD, problem, Forward(**given))
    grads = {
        "dq": np.full_like(q, np.nan),
        "dk": np.full_like(k, np.nan),
        "dv": np.full_like(v, np.nan),
    }
    dsinks = np.zeros(0, np.float32)
    run(BACKWARD, problem, Backward(**given, do=do, dsinks=dsinks, **grads))
    return o, lse, *grads.values()


def check(q, k, v, do, span):
    scale = q.shape[2] ** -0.5
    o, lse, *grads = computed(q, k, v, do, span, scale)
    o_exact, lse_exact, *grads_exact = exact(q, k, v, do, span, scale)
    assert nmse(o, o_exact) < 1e-5
    np.testing.assert_allclose(lse, lse_exact, rtol=1e-5, atol=1e-4)
    for found, wanted in zip(grads, grads_exact, strict=True):
        assert nmse(found, wanted) < 6e-5


def inputs(rng, n_queries, n_keys, heads, key_heads, d):
    q, do = (normal(rng, n_queries, heads, d) for _ in range(2))
    return q, *(normal(rng, n_keys, key_heads, d) for _ in range(2)), do


@pytest.mark.parametrize("n", [7, SIDE - 1, SIDE + 1, BR, BR + 1, 2 * BR + 5])
def test_queries_around_the_edges_of_tiles(n, rng):
    check(*inputs(rng, n, n, 2, 1, 32), causal(n, n))


@pytest.mark.parametrize("n_keys", [40, BC, BC + 1, 2 * BC + 9])
def test_more_keys_than_queries(n_keys, rng):
    check(*inputs(rng, 33, n_keys, 2, 2, 32), causal(33, n_keys))


@pytest.mark.parametrize("d", [3, 20, 64, 80, 128])
def test_heads_of_any_size(d, rng):
    check(*inputs(rng, 50, 50, 2, 1, d), causal(50, 50))


def test_windows_and_several_sequences(rng):
    check(*inputs(rng, 300, 300, 2, 2, 32), window(300, 300, 45))
    check(*inputs(rng, 300, 300, 2, 2, 32), sequences(40, 1, 160, 99))


def test_tiles_of_one_head_shared_by_tasks(rng):
    n = 3 * BR
    check(*inputs(rng, n, n, 1, 1, 32), causal(n, n))
    check(*inputs(rng, n, n, FEWEST_TASKS + 1, 1, 32), causal(n, n))


def test_a_query_that_sees_nothing(rng):
    q, k, v, do = inputs(rng, 40, 40, 2, 1, 32)
    span = causal(40, 40)
    span[7] = 0
    o, lse, dq, *_ = computed(q, k, v, do, span, 0.2)
    assert not o[7].any() and not dq[7].any() and (lse[:, 7] == np.float32(1e30)).all()
    check(q, k, v, do, span)


def test_scores_are_nearly_as_exact_as_float32(rng):
    """Large ones, whose errors the exponential shows: a bfloat16 is off by up to 2^−9."""
    q, k, v, do = inputs(rng, 64, 64, 2, 1, 64)
    q *= 8
    o, lse, *_ = computed(q, k, v, do, causal(64, 64), 1.0)
    o_exact, lse_exact, *_ = exact(q, k, v, do, causal(64, 64), 1.0)
    assert np.abs(lse - lse_exact).max() < 3e-5 * np.abs(lse_exact).max()
    assert nmse(o, o_exact) < 1e-5


def test_threads_change_nothing(rng):
    arrays, before, found = inputs(rng, 200, 200, 3, 1, 32), threads.get(), []
    try:
        for n in (1, before):
            threads.set(n)
            found.append([x.tobytes() for x in computed(*arrays, causal(200, 200), 0.2)])
    finally:
        threads.set(before)
    assert found[0] == found[1]
