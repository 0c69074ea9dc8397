"""An op that fuses others gives what they give one after the other, and so does its gradient."""

import numpy as np
import pytest
from derivatives import gradients_of

from pyggml import ops
from pyggml.graph.op import OPS
from pyggml.graph.tensor import leaf
from pyggml.runtime import run

pytestmark = pytest.mark.quick

T, N, K, N_VOCAB = 7, 40, 33, 70


def test_what_is_fused_are_ops():
    fused = {op.name: op.fuses for op in OPS.values() if op.fuses}
    assert {
        "rms_norm_mul",
        "mul_mat_add",
        "out_prod_add",
        "flash_attn_ext",
        "linear_cross_entropy",
        "linear_cross_entropy_by_row",
        "linear_soft_cross_entropy",
    } <= set(fused)
    assert all(len(parts) > 1 and set(parts) <= set(OPS) for parts in fused.values())


def attention(q, k, v):
    """Two heads share one key head; token t sees the keys up to t."""
    span = leaf(np.stack([np.zeros(T), np.arange(T) + 1], 1).astype(np.int32))
    return ops.flash_attn_ext(q, k, v, span, scale=0.3)


def attention_apart(q, k, v):
    per_head = [ops.cont(ops.permute(t, (1, 0, 2))) for t in (q, k)]
    scores = ops.diag_mask_inf(ops.scale(ops.mul_mat(per_head[1], per_head[0]), 0.3), 0)
    values = ops.cont(ops.permute(v, (1, 2, 0)))
    return ops.permute(ops.mul_mat(values, ops.soft_max(scores)), (1, 0, 2))


IDS = np.random.default_rng(1).integers(0, N_VOCAB, T).astype(np.int32)
SHARE = np.random.default_rng(2).random(T).astype(np.float32)


def loss(h, w):
    return ops.linear_cross_entropy(h, w, leaf(IDS), leaf(SHARE))


def loss_apart(h, w):
    return ops.cross_entropy_rows(ops.mul_mat(w, h), leaf(IDS), leaf(SHARE))


def losses(h, w):
    return ops.linear_cross_entropy_by_row(h, w, leaf(IDS), leaf(SHARE))


def losses_apart(h, w):
    return ops.cross_entropy_by_row(ops.mul_mat(w, h), leaf(IDS), leaf(SHARE))


SOME = np.array([np.random.default_rng(i).permutation(N_VOCAB)[:9] for i in range(T)], np.int32)
SHARES = np.random.default_rng(3).dirichlet(np.ones(10), T).astype(np.float32)


def soft_loss(h, w):
    return ops.linear_soft_cross_entropy(h, w, leaf(SOME), leaf(SHARES), leaf(SHARE))


def soft_loss_apart(h, w):
    return ops.soft_cross_entropy(ops.mul_mat(w, h), leaf(SOME), leaf(SHARES), leaf(SHARE))


CASES = {
    "rms_norm_mul": (
        [(T, N), (N,)],
        lambda x, w: ops.rms_norm_mul(x, w, 1e-5),
        lambda x, w: ops.mul(ops.rms_norm(x, 1e-5), w),
    ),
    "mul_mat_add": (
        [(T, N), (N, K), (T, K)],
        ops.mul_mat_add,
        lambda y, w, x: ops.add(y, ops.mul_mat(w, x)),
    ),
    "out_prod_add": (
        [(T, N), (K, N), (K, T)],
        ops.out_prod_add,
        lambda c, a, b: ops.add(c, ops.out_prod(a, b)),
    ),
    "flash_attn_ext": ([(T, 4, 16), (T, 2, 16), (T, 2, 16)], attention, attention_apart),
    "linear_cross_entropy": ([(T, K), (N_VOCAB, K)], loss, loss_apart),
    "linear_cross_entropy_by_row": ([(T, K), (N_VOCAB, K)], losses, losses_apart),
    "linear_soft_cross_entropy": ([(T, K), (N_VOCAB, K)], soft_loss, soft_loss_apart),
}


@pytest.mark.parametrize("name", list(CASES))
def test_fused_and_apart(name):
    shapes, fused, apart = CASES[name]
    found = []
    for build in (fused, apart):
        rng = np.random.default_rng(5)
        sources = [leaf(rng.standard_normal(s).astype(np.float32)) for s in shapes]
        y = build(*sources)
        trained = sources[:1] if "cross_entropy" in name else sources  # w is frozen
        seed = leaf(np.random.default_rng(6).standard_normal(y.shape).astype(np.float32))
        found.append(run(y, *gradients_of(y, trained, seed=seed)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
