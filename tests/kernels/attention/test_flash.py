"""Tiled attention against its plain path and against softmax between two products."""

import numpy as np
import pytest
from arenas import bound
from derivatives import gradients_of
from rooms import Rooms

from pyggml import threads
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import leaf, zeros
from pyggml.kernels.attention import AttentionProblem, flash, plain
from pyggml.kernels.attention.flash import FloatBackward
from pyggml.kernels.attention.flash_tile import BR, PAIRS
from pyggml.kernels.attention.pair_softmax import softmax_pairs, softmax_pairs_back
from pyggml.kernels.attention.row_softmax import SCALES
from pyggml.kernels.attention.softmax import BC, ScoreBlock
from pyggml.kernels.attention.tiled_back import FEWEST_TASKS, n_tasks
from pyggml.kernels.gemm import CHOSEN, FLOAT_TILE
from pyggml.ops import flash_attn_ext, mul_mat, permute, soft_max, transpose
from pyggml.ops.attention.attention import may_round

MR = FLOAT_TILE.mr
COUNTS = [1, MR - 1, MR, MR + 1, BR - 1, BR, BR + 1, BC + 1, 2 * BC + 5]


def numbers(rng, *shape):
    return leaf(rng.standard_normal(shape).astype(np.float32))


def computed(*outputs, compute="f32"):
    """Values of these tensors; the arena is NaN before, so nothing may rely on what was there."""
    p = plan(Graph.of(*outputs), CPU(compute))
    arena = p.backend.alloc(p.n_bytes)
    arena[:] = 255
    bound(p, arena)()
    return [np.array(array(t)) for t in outputs]


def with_gradients(out, q, k, v, seed):
    return [out, *gradients_of(out, [q, k, v], seed)]


def unfused(q, k, v, span, scale):
    """softmax(scale · q·kᵀ + mask) · v, head by head."""
    j = np.arange(k.shape[0])
    seen = (span.data[:, :1] <= j) & (j < span.data[:, 1:])
    mask = leaf(np.where(seen, 0, -np.inf).astype(np.float32), "mask")
    by_head = [permute(t, (1, 0, 2)) for t in (q, k, v)]
    p = soft_max(mul_mat(by_head[1], by_head[0]), mask, scale)  # (H, T, S)
    return permute(mul_mat(transpose(by_head[2]), p), (1, 0, 2))


def causal(n_queries, n_keys):
    """The last queries of a sequence of n_keys tokens."""
    last = np.arange(n_keys - n_queries, n_keys) + 1
    return leaf(np.stack([np.zeros_like(last), last], axis=1).astype(np.int32), "span")


def window(n_queries, n_keys, width):
    span = causal(n_queries, n_keys)
    span.data[:, 0] = np.maximum(span.data[:, 1] - width, 0)
    return span


def blocks(lengths):
    """Several sequences one after the other: each token sees its own sequence up to itself."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    ends = np.arange(sum(lengths)) + 1
    return leaf(np.stack([starts, ends], axis=1).astype(np.int32), "span")


def inputs(rng, n_queries, n_keys, heads, key_heads, d):
    q, k, v = numbers(rng, n_queries, heads, d), *(numbers(rng, n_keys, key_heads, d) for _ in "kv")
    return q, k, v, numbers(rng, n_queries, heads, d)


def assert_same_attention(q, k, v, seed, span, atol=1e-5, rounded=True):
    """Fused and unfused, and fused in bfloat16: the result and all three gradients."""
    scale = q.shape[2] ** -0.5
    fused = computed(*with_gradients(flash_attn_ext(q, k, v, span, scale), q, k, v, seed))
    plain = computed(*with_gradients(unfused(q, k, v, span, scale), q, k, v, seed))
    for found, wanted in zip(fused, plain, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=atol)
    if not rounded:
        return
    fused = with_gradients(may_round(flash_attn_ext(q, k, v, span, scale)), q, k, v, seed)
    for found, wanted in zip(computed(*fused, compute="bf16"), plain, strict=True):
        # 2⁻⁹ for each rounded factor; where sums cancel, relative to what they are made of.
        assert np.abs(found - wanted).max() <= 0.04 * max(np.abs(wanted).max(), 1)


# -- against softmax ----------------------------------------------------------------------------


@pytest.mark.parametrize("n_queries", sorted(set(COUNTS)))
def test_query_counts_around_the_tiles(n_queries, rng):
    q, k, v, seed = inputs(rng, n_queries, n_queries, 2, 1, 16)
    assert_same_attention(q, k, v, seed, causal(n_queries, n_queries))


@pytest.mark.parametrize("d", [1, 8, 20, 64, 80, 96])
def test_head_sizes_that_are_no_whole_panels(d, rng):
    for n in (3, MR + 5):
        q, k, v, seed = inputs(rng, n, n, 2, 2, d)
        assert_same_attention(q, k, v, seed, causal(n, n))


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_heads_that_share_keys(heads, key_heads, rng):
    q, k, v, seed = inputs(rng, MR + 3, MR + 3, heads, key_heads, 12)
    assert_same_attention(q, k, v, seed, causal(MR + 3, MR + 3))


@pytest.mark.parametrize("heads", [2, FEWEST_TASKS])
def test_tiles_of_a_head_in_one_task_or_several(heads, rng):
    n = 2 * BR + 3
    q, k, v, seed = inputs(rng, n, n, heads, 2, 8)
    problem = AttentionProblem(n, heads, n, 2, 8, 8, F32, F32, has_extras=False, compute="f32")
    assert n_tasks(FloatBackward, problem) == {2: 2 * 3, FEWEST_TASKS: FEWEST_TASKS}[heads]
    assert_same_attention(q, k, v, seed, causal(n, n))


@pytest.mark.parametrize("n_queries", [1, 5, MR, 2 * MR + 1])
def test_keys_that_were_there_before(n_queries, rng):
    """As with a cache: more keys than queries, the last of them not filled yet."""
    q, k, v, seed = inputs(rng, n_queries, BC + 40, 2, 1, 16)
    span = causal(n_queries, BC + 20)
    assert_same_attention(q, k, v, seed, span)


@pytest.mark.parametrize("width", [1, 7, BC, BC + 1])
def test_sliding_windows(width, rng):
    n = 2 * BC + 10
    q, k, v, seed = inputs(rng, n, n, 2, 1, 16)
    assert_same_attention(q, k, v, seed, window(n, n, width))


@pytest.mark.parametrize("n", [5, BC + MR + 1])
def test_any_ranges(n, rng):
    """Ranges that neither begin nor end in the order of the queries."""
    q, k, v, seed = inputs(rng, n, 2 * n, 2, 1, 16)
    ends = np.sort(rng.integers(0, 2 * n + 1, (n, 2)), axis=1)
    assert_same_attention(q, k, v, seed, leaf(ends.astype(np.int32), "span"))


@pytest.mark.parametrize("lengths", [[5, 1, 9, 30], [BC, BC], [100, 3, 70]])
def test_several_sequences_in_one_row(lengths, rng):
    n = sum(lengths)
    q, k, v, seed = inputs(rng, n, n, 2, 1, 16)
    span = blocks(lengths)
    assert_same_attention(q, k, v, seed, span)
    (together,) = computed(flash_attn_ext(q, k, v, span, 0.25))
    first = 0
    for m in lengths:
        own = (leaf(np.ascontiguousarray(t.data[first : first + m])) for t in (q, k, v))
        (alone,) = computed(flash_attn_ext(*own, causal(m, m), 0.25))
        np.testing.assert_allclose(together[first : first + m], alone, rtol=1e-5, atol=1e-6)
        first += m


@pytest.mark.parametrize("n", [3, 3 * MR])
def test_queries_that_see_nothing(n, rng):
    q, k, v, seed = inputs(rng, n, n, 2, 1, 16)
    span = causal(n, n)
    span.data[::2] = 0
    assert_same_attention(q, k, v, seed, span)
    span.data[...] = 2
    out = computed(*with_gradients(flash_attn_ext(q, k, v, span, 1.0), q, k, v, seed))
    assert not any(a.any() for a in out)


@pytest.mark.parametrize("n", [3, 3 * MR])
def test_scores_far_from_zero(n, rng):
    """Only differences of scores matter; e^s itself would overflow.

    Gradients of q and k are differences of probabilities, which know scores of 1000 to 1e-4.
    """
    q, k, v, seed = inputs(rng, n, n, 1, 1, 16)
    q.data *= 10
    k.data += 30
    span = causal(n, n)
    assert np.abs(q.data[:, 0] @ k.data[:, 0].T).max() / 4 > 300
    fused, plain = computed(flash_attn_ext(q, k, v, span, 0.25), unfused(q, k, v, span, 0.25))
    np.testing.assert_allclose(fused, plain, rtol=1e-3, atol=1e-4)
    assert_same_attention(q, k, v, seed, span, atol=0.02, rounded=False)  # 1000 to 2⁻⁹ is 2


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_other_tokens_have_no_influence(compute, rng):
    """Keys outside a query's range may be anything, even NaN (rows of a cache never written)."""
    n = MR + 3
    q, k, v, _ = inputs(rng, n, 200, 2, 1, 16)
    out = may_round(flash_attn_ext(q, k, v, causal(n, 100), 0.25))
    (clean,) = computed(out, compute=compute)
    k.data[100:], v.data[100:] = np.nan, np.nan
    (dirty,) = computed(out, compute=compute)
    np.testing.assert_array_equal(clean, dirty)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_later_tokens_have_no_influence(compute, rng):
    n = 2 * BC + 5
    q, k, v, _ = inputs(rng, n, n, 2, 1, 16)
    out = may_round(flash_attn_ext(q, k, v, causal(n, n), 0.25))
    (clean,) = computed(out, compute=compute)
    for seen in (BC + 3, BC, MR + 1, 1):
        k.data[seen:], v.data[seen:], q.data[seen:] = 300, 300, -7
        (other,) = computed(out, compute=compute)
        np.testing.assert_array_equal(clean[:seen], other[:seen])


@pytest.mark.parametrize("rise", [-40, -5, 5, 15, 40])
def test_scores_that_rise_and_fall_from_tile_to_tile(rise, rng):
    """By whole numbers, which bfloat16 holds. In pairs a maximum may stay behind by up to 20."""
    n = 4 * BC
    q, k, v, _ = inputs(rng, n, n, 2, 1, 16)
    q.data[...] = k.data[...] = 0
    q.data[:, :, 0], k.data[:, 0, 0] = 4, rise * (np.arange(n) // BC)
    out = may_round(flash_attn_ext(q, k, v, causal(n, n), 0.25))
    exact, pairs = (computed(out, out.saved[0], compute=c) for c in ("f32", "bf16"))
    np.testing.assert_allclose(pairs[0], exact[0], atol=0.01 * np.abs(exact[0]).max())
    np.testing.assert_allclose(pairs[1], exact[1], rtol=1e-5)
    plain = computed(unfused(q, k, v, causal(n, n), 0.25))
    np.testing.assert_allclose(exact[0], plain[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not SCALES, reason="this CPU lacks AVX512-BF16")
def test_both_passes_of_training_round_scores_alike(rng):
    """The backward pass's probabilities e^(s − lse) add up to 1, though it rounds scores of 1000 by
    as much as 2: the forward pass's lse is that of the same scores."""
    n = 2 * BR + 7
    q, k, v, seed = inputs(rng, n, n, 4, 2, 16)
    q.data *= 10
    k.data += 30
    seed.data[...] = 1
    sums = []
    for form in (may_round, lambda t: t):
        out = form(flash_attn_ext(q, k, v, causal(n, n), 0.25))
        *_, dv = computed(*with_gradients(out, q, k, v, seed), compute="bf16")
        sums.append(dv.sum(axis=(0, 2)) / (16 * 2 * n))  # of p over keys, by key head: its queries
    np.testing.assert_allclose(sums[0], 1, atol=1e-3)
    assert np.abs(sums[1] - 1).max() > 0.1


# -- against the plain path ---------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.skipif(not CHOSEN.compiled, reason="this path has no tiles")
def test_tiles_give_what_the_plain_path_gives(rng, monkeypatch):
    n = BC + MR + 1
    q, k, v, seed = inputs(rng, n, n, 4, 2, 20)
    results = []
    for rows in ((flash.FORWARD, flash.BACKWARD), (plain.FORWARD, plain.BACKWARD)):
        for verb, row in zip(("forward_path", "backward_path"), rows, strict=True):
            monkeypatch.setattr(f"pyggml.kernels.attention.{verb}", lambda problem, row=row: row)
        out = flash_attn_ext(q, k, v, window(n, n, 50), 0.2)
        results.append(computed(*with_gradients(out, q, k, v, seed), out.saved[0]))
    for tiles, loops in zip(*results, strict=True):
        np.testing.assert_allclose(tiles, loops, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(threads.most() < 2, reason="this process has one thread")
@pytest.mark.parametrize("n", [MR - 1, 5 * MR + 1, 2 * BR + 1])
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_results_do_not_depend_on_the_threads(n, compute, rng):
    q, k, v, seed = inputs(rng, n, n, 4, 2, 16)
    before, found = threads.get(), []
    try:
        for count in (1, 2):
            threads.set(count)
            out = may_round(flash_attn_ext(q, k, v, causal(n, n), 0.25))
            found.append(computed(*with_gradients(out, q, k, v, seed), compute=compute))
    finally:
        threads.set(before)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q", "k", "v", "span"),
    [
        ((5, 2, 8), (5, 2, 4), (5, 2, 8), (5, 2)),
        ((5, 2, 8), (5, 2, 8), (6, 2, 8), (5, 2)),
        ((5, 3, 8), (5, 2, 8), (5, 2, 8), (5, 2)),
        ((5, 2, 8), (5, 2, 8), (5, 2, 8), (4, 2)),
        ((5, 16), (5, 16), (5, 16), (5, 2)),
    ],
)
def test_misfits_are_refused(q, k, v, span):
    with pytest.raises(ShapeError, match=r"flash_attn_ext: q .* wanted"):
        flash_attn_ext(zeros(q), zeros(k), zeros(v), leaf(np.zeros(span, np.int32)), 1.0)


def test_types_are_refused():
    x, span = zeros((5, 2, 8)), zeros((5, 2))
    with pytest.raises(ShapeError, match="span in I32"):
        flash_attn_ext(x, x, x, span, 1.0)


@pytest.mark.skipif(not SCALES, reason="the path that multiplies pairs is for AVX512-BF16")
@pytest.mark.parametrize(
    "start, key", [(0, BC), (BC - MR, BC), (BC + 17, 0), (2 * BC, BC), (3 * BC + 5, BC)]
)
def test_a_group_that_sees_no_key_of_a_tile_writes_nothing(start, key, rng):
    """Not even zeros, which would lie behind its rows: in those of another thread. The group sees
    the MR keys from `start` on, the tile has those from `key` on."""
    seen = np.tile(np.int32([start, start + MR]), (MR, 1))
    starts, stops = np.array([start], np.int32), np.array([start + MR], np.int32)
    s, dp = (rng.standard_normal((MR, PAIRS.lds)).astype(np.float32) for _ in range(2))
    sizes = PAIRS.ldp, PAIRS.ldp, PAIRS.lds, PAIRS.lds
    p, ds, p_pairs, ds_pairs = (np.full((2 * MR, n), 7, np.float32) for n in sizes)
    o, norms, m = (
        np.ones((MR, 64), np.float32),
        np.ones((MR, 16), np.float32),
        np.zeros(MR, np.float32),
    )
    block, numbers = ScoreBlock(seen, 0, key, (0, 0)), np.zeros(MR, np.float32)
    softmax_pairs(p, s, o, m, norms, block, starts, stops, np.float32(1))
    softmax_pairs_back(
        ds, p_pairs, ds_pairs, s, dp, numbers, numbers, block, starts, stops, MR, 16, np.float32(1)
    )
    assert all((a == 7).all() for a in (p, ds, p_pairs, ds_pairs))
    assert (o == 1).all() and (norms == 1).all() and (m == 0).all()


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("width", [1, 20, BC + 1])
def test_no_array_of_scratch_is_written_past(width, compute, rng, monkeypatch):
    """Forward and backward, with each array in memory of its own and bytes around it."""
    rooms, n = Rooms(monkeypatch), 2 * BC + 10
    q, k, v, seed = inputs(rng, n, n, 2, 1, 16)
    out = may_round(flash_attn_ext(q, k, v, window(n, n, width), 0.25))
    computed(*with_gradients(out, q, k, v, seed), compute=compute)
    assert not rooms.written_past()
