"""The output layer's loss on tiles (AMX) against float64. Without them, vector code stands in."""

import numpy as np
import pytest

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.dtypes import dtype
from pyggml.jit import JIT
from pyggml.jit.scratch import Layout
from pyggml.kernels.gemm import Weight, reference
from pyggml.ops.loss import head_amx
from pyggml.ops.loss.head_amx import FEWEST_ROWS, MOST_ROWS, PARTS
from pyggml.ops.loss.head_slices import Goals
from pyggml.ops.loss.soft import soft_rows
from pyggml.quants import quantize

from measures import nmse

pytestmark = pytest.mark.skipif(not JIT, reason="tasks need the JIT")


def case(rng, n=37, n_vocab=300, k=64, kind="Q8_0", spread=1.0, n_targets=1):
    """h, what is wanted, and w; logits are `spread` wide. One target has all probability, several
    share it with the others."""
    w = quantize(rng.standard_normal((n_vocab, k)).astype(np.float32), kind)
    h = (rng.standard_normal((n, k)) * spread / np.sqrt(k)).astype(np.float32)
    targets = np.array([rng.permutation(n_vocab)[:n_targets] for _ in range(n)], np.int32)
    shares = rng.dirichlet(np.ones(n_targets + 1), n) if n_targets > 1 else np.eye(2)[[0] * n]
    weights = rng.uniform(0.1, 1, n).astype(np.float32)
    return h, Goals(targets, shares.astype(np.float32), weights), w, kind


def computed(h, wanted, w, kind, gradient=True, room=0):
    """Losses and dh; the scratch, for `room` more positions, is NaN before."""
    n, k = h.shape
    layout = Layout(**head_amx.arrays(n + room, len(w), k, gradient, wanted.targets.shape[1]))
    memory = CPU().alloc(layout.n_bytes)
    memory[:] = 255
    made = head_amx.HeadResults(*(np.full(shape, np.nan, np.float32) for shape in (n, n, (n, k))))
    weight, scratch = Weight(w, dtype(kind), "bf16"), layout.cut(memory)
    head_amx.call(weight, h, wanted, made, gradient, scratch)()
    z = reference.dequantize(w, kind).astype(np.float64) @ h.astype(np.float64).T
    if np.isfinite(z).all():
        found, exact_logits = scratch["target_logits"][:n], z[wanted.targets.T, np.arange(n)].T
        np.testing.assert_allclose(made.tops, z.max(0), rtol=3e-3, atol=1.6e-2)
        np.testing.assert_allclose(found, exact_logits, rtol=3e-3, atol=1.6e-2)
    return made.losses, made.dh


def exact(h, wanted, w, kind):
    w = reference.dequantize(w, kind).astype(np.float64)
    losses, slopes = soft_rows(h.astype(np.float64) @ w.T, *wanted)
    return losses, slopes @ w


def assert_exact_enough(*parts):
    (losses, dh), (wanted, wanted_dh) = computed(*parts), exact(*parts)
    np.testing.assert_allclose(losses, wanted, atol=1.6e-2)
    assert nmse(dh, wanted_dh) < 3e-6


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "F16", "IQ4_NL", "Q4_0"])
def test_weights_of_several_types(kind, rng):
    assert_exact_enough(*case(rng, k=256, kind=kind))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_positions_around_the_edges_of_squares(n, rng):
    assert_exact_enough(*case(rng, n=n))


@pytest.mark.parametrize("n_vocab", [5, 33, MOST_ROWS, MOST_ROWS + 1, PARTS * MOST_ROWS + 70])
def test_vocabularies_around_the_edges_of_blocks_and_parts(n_vocab, rng):
    assert_exact_enough(*case(rng, n_vocab=n_vocab))


@pytest.mark.parametrize("n_targets", [2, 70])
def test_several_targets_share_the_probability_with_the_others(n_targets, rng):
    assert_exact_enough(*case(rng, n_targets=n_targets))


@pytest.mark.parametrize(("k", "kind"), [(1, "F16"), (70, "F16"), (544, "Q8_0"), (2080, "Q8_0")])
def test_rows_of_any_length(k, kind, rng):
    """Around the edges of steps and pieces; the longest have blocks of the fewest rows."""
    assert_exact_enough(*case(rng, n=5, n_vocab=FEWEST_ROWS + 40, k=k, kind=kind))


def test_a_chunk_with_fewer_positions_than_there_is_room_for(rng):
    parts = case(rng)
    for found, wanted in zip(computed(*parts, room=70), computed(*parts), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_positions_that_are_sure(rng):
    """The target's own term, p − 1, is smaller than bfloat16's rounding of p is."""
    h, wanted, w, kind = case(rng, spread=0.0)
    rows = reference.dequantize(w, kind)
    targets = rng.permutation(len(w))[: len(h)].astype(np.int32)
    parts = 0.2 * rows[targets], wanted._replace(targets=targets[:, None]), w, kind
    assert np.median(exact(*parts)[0]) < 2e-3
    assert nmse(computed(*parts)[1], exact(*parts)[1]) < 1e-4


def test_without_gradient_the_losses_are_the_same(rng):
    parts = case(rng)
    losses, dh = computed(*parts, gradient=False)
    np.testing.assert_array_equal(losses, computed(*parts)[0])
    assert np.isnan(dh).all()


def test_threads_and_other_positions_change_nothing(rng):
    h, wanted, *w = case(rng, n=5 * 32, n_vocab=2000, n_targets=3)
    before, found = threads.get(), []
    try:
        for n in (1, before):
            threads.set(n)
            found.append(computed(h, wanted, *w))
    finally:
        threads.set(before)
    found.append([np.concatenate(x) for x in zip(
        *(computed(h[i:j], Goals(*(a[i:j] for a in wanted)), *w) for i, j in ((0, 50), (50, 160))),
        strict=True,
    )])  # fmt: skip
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_what_is_not_finite_stays_in_its_row(rng):
    h, *others = case(rng, n=5)
    h[1, 7], h[3, 9] = np.nan, np.inf
    losses, dh = computed(h, *others)
    assert not np.isfinite(losses[[1, 3]]).any()
    assert np.isfinite(losses[[0, 2, 4]]).all() and np.isfinite(dh[[0, 2, 4]]).all()
