"""The fused output layer and loss against their unfused twin: mul_mat, then cross_entropy_rows."""

import numpy as np
import pytest
from arenas import bound
from derivatives import gradients_of

from pyggml import threads
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU
from pyggml.errors import NoGradientError, ShapeError
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import I32, dtype
from pyggml.graph.tensor import leaf, zeros
from pyggml.kernels.gemm import FLOAT_TILE
from pyggml.ops import cross_entropy_rows, linear_cross_entropy, mul_mat, scale, tanh
from pyggml.quants import quantize
from pyggml.runtime import run

MR = FLOAT_TILE.mr


def computed(*outputs):
    """Values of these tensors; the arena is NaN before."""
    p = plan(Graph.of(*outputs), CPU())
    arena = p.backend.alloc(p.n_bytes)
    arena[:] = 255
    bound(p, arena)()
    return [np.array(array(t)) for t in outputs]


def case(rng, n=29, n_vocab=90, n_embd=32, kind="F32"):
    h = leaf(rng.standard_normal((n, n_embd)).astype(np.float32), "h")
    values = rng.standard_normal((n_vocab, n_embd)).astype(np.float32)
    raw = quantize(values, kind).view(dtype(kind).numpy)
    w = leaf(raw, "output.weight", dtype(kind))
    targets = leaf(rng.integers(0, n_vocab, n).astype(np.int32), "targets")
    share = rng.uniform(0.1, 1, n) * (np.arange(n) % 3 != 1)
    return h, w, targets, leaf(share.astype(np.float32), "share")


def twin(h, w, targets, share, gradient=True, softcap=0.0):
    z = mul_mat(w, h)
    z = scale(tanh(scale(z, 1 / softcap)), softcap) if softcap else z
    return cross_entropy_rows(z, targets, share)


def assert_same_loss(h, w, targets, share, softcap=0.0):
    seed = leaf(np.full((), 0.7, np.float32), "seed")
    pairs = []
    for build in (linear_cross_entropy, twin):
        loss = build(h, w, targets, share, softcap=softcap)
        pairs.append(computed(loss, *gradients_of(loss, [h], seed)))
    (loss, dh), (wanted, wanted_dh) = pairs
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    np.testing.assert_allclose(dh, wanted_dh, rtol=1e-4, atol=1e-6 * np.abs(wanted_dh).max())


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_capped_logits(softcap, rng):
    assert_same_loss(*case(rng), softcap=softcap)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_loss_and_gradient_are_the_twins(kind, rng):
    assert_same_loss(*case(rng, kind=kind))


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("build", [linear_cross_entropy, twin])
def test_targets_with_the_greatest_logit_are_counted(build, rows, rng, monkeypatch):
    """Those of rows that count, with and without the gradient; every second target is the best."""
    monkeypatch.setattr("pyggml.ops.loss.head_slices.ROWS", rows)
    h, w, targets, share = case(rng, n=4 * MR + 1, kind="F16")
    best = (h.data @ w.data.astype(np.float32).T).argmax(1)
    targets.data[::2] = best[::2]
    for softcap in (0.0, 30.0):
        for gradient in (True, False):
            loss = build(h, w, targets, share, gradient=gradient, softcap=softcap)
            _, n_right = computed(loss, loss.saved[0])
            assert n_right == np.count_nonzero((targets.data == best) & (share.data != 0)) > 3


@pytest.mark.parametrize("n", [1, 2, MR, 3 * MR + 1])
def test_row_counts(n, rng):
    assert_same_loss(*case(rng, n=n))


@pytest.mark.parametrize("rows", [1, MR + 2, 2 * MR])
def test_logits_in_chunks(rows, rng, monkeypatch):
    """A limit of a few rows: the chunks together give the loss of all."""
    monkeypatch.setattr("pyggml.ops.loss.head_slices.ROWS", rows)
    assert_same_loss(*case(rng, n=4 * MR + 1))


@pytest.mark.parametrize("rows", [32, 64, 89])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_vocabulary_in_slices(rows, softcap, rng, monkeypatch):
    """Also where each slice has greater logits than all before, and where the first has the
    greatest."""
    for name, value in (("SLICE_BYTES", 1), ("FEWEST", rows)):
        monkeypatch.setattr(f"pyggml.ops.loss.head_slices.{name}", value)
    h, w, targets, share = case(rng)
    assert_same_loss(h, w, targets, share, softcap=softcap)
    h.data[:, 0] = 3
    for order in (1, -1):
        w.data[:, 0] = np.linspace(-4, 4, 90)[::order]
        assert_same_loss(h, w, targets, share, softcap=softcap)


def test_chunks_bound_the_memory(rng, monkeypatch):
    h, w, targets, share = case(rng, n=1000, n_vocab=512)
    whole = plan(Graph.of(linear_cross_entropy(h, w, targets, share)), CPU()).n_bytes
    monkeypatch.setattr("pyggml.ops.loss.head_slices.ROWS", 32)
    chunked = plan(Graph.of(linear_cross_entropy(h, w, targets, share)), CPU()).n_bytes
    assert chunked < whole - 1000 * 512 * 4 + (1 << 17)


def test_rows_without_weight_cost_and_change_nothing(rng):
    h, w, targets, share = case(rng)
    idle = share.data == 0
    assert idle.any()
    loss = linear_cross_entropy(h, w, targets, share)
    before = computed(loss, *gradients_of(loss, [h]))
    targets.data[idle] = -100  # what other programs write there
    h.data[idle] = np.nan
    after = computed(loss, *gradients_of(loss, [h]))
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not after[1][idle].any()


def test_other_numbers_of_rows_in_the_next_step(rng):
    """A bound graph computes as many rows as have a weight, each time anew."""
    h, w, targets, share = case(rng, n=4 * MR + 1)
    loss = linear_cross_entropy(h, w, targets, share)
    p = plan(Graph.of(loss, loss.saved[1]), CPU())
    program = bound(p, p.backend.alloc(p.n_bytes))
    for n in (4 * MR + 1, MR, 1, 3 * MR):
        share.data[:] = np.arange(4 * MR + 1) < n
        program()
        (wanted,) = computed(twin(h, w, targets, share))
        np.testing.assert_allclose(array(loss), wanted, rtol=1e-6)
        assert (np.abs(array(loss.saved[1])).max(axis=1) > 0).tolist() == (share.data > 0).tolist()


def test_a_target_that_is_nearly_sure(rng):
    """p − 1 is then a difference of nearly equal numbers, and the gradient small."""
    h, w, targets, share = case(rng)
    w.data[targets.data] += h.data / 2
    assert_same_loss(h, w, targets, share)


def test_no_row_at_all(rng):
    h, w, targets, share = case(rng)
    share.data[:] = 0
    loss = linear_cross_entropy(h, w, targets, share)
    value, dh = computed(loss, *gradients_of(loss, [h]))
    assert value == 0
    assert not dh.any()


def test_without_gradient_the_loss_is_the_same(rng):
    parts = case(rng)
    with_it, without = (linear_cross_entropy(*parts, gradient=g) for g in (True, False))
    assert len(without.saved) == 1, "the number of right tokens"
    assert plan(Graph.of(without), CPU()).n_bytes < plan(Graph.of(with_it), CPU()).n_bytes
    assert computed(without) == computed(with_it)


def test_a_gradient_that_was_left_out_is_refused(rng):
    h, w, targets, share = case(rng)
    loss = linear_cross_entropy(scale(h, 1.0), w, targets, share, gradient=False).named("val loss")
    with pytest.raises(NoGradientError, match=r"val loss .*gradient=False"):
        gradients_of(loss, [h])


@pytest.mark.parametrize("target", [-1, 90, 2**31 - 1])
def test_a_target_outside_the_vocabulary_is_refused(target, rng):
    h, w, targets, share = case(rng)
    targets.data[3] = target
    assert share.data[3]
    loss = linear_cross_entropy(h, w, targets, share)
    with pytest.raises(ShapeError, match="a target is outside the 90 tokens"):
        run(loss)


@pytest.mark.parametrize(
    ("h", "w", "targets", "share"),
    [
        ((5, 8), (9, 7), (5,), (5,)),
        ((5, 8), (9, 8), (4,), (5,)),
        ((5, 8), (9, 8), (5,), (6,)),
        ((8,), (9, 8), (8,), (8,)),
    ],
)
def test_misfits_are_refused(h, w, targets, share):
    with pytest.raises(ShapeError, match=r"linear_cross_entropy: .* wanted"):
        linear_cross_entropy(zeros(h), zeros(w), zeros(targets, I32), zeros(share))


@pytest.mark.skipif(threads.most() < 2, reason="this process has one thread")
def test_results_do_not_depend_on_the_threads(rng):
    parts = case(rng, n=5 * MR, n_vocab=300)
    before, found = threads.get(), []
    try:
        for n in (1, 2):
            threads.set(n)
            loss = linear_cross_entropy(*parts)
            found.append(computed(loss, *gradients_of(loss, parts[:1])))
    finally:
        threads.set(before)
    for one, two in zip(*found, strict=True):
        np.testing.assert_array_equal(one, two)
