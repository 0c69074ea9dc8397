"""Products with one weight per expert, of few rows and in tiles, against NumPy."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml import ops
from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.ops.experts.products import in_tiles
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, DTYPES
from pyggml.graph.tensor import leaf
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.ops.in_bf16 import bf16_op
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, results

GOLDEN = Path(__file__).parents[2] / "golden/peers"
N_EXPERT, N, K = 5, 96, 512
KINDS = ["Q4_K", "Q5_0", "Q6_K", "Q8_0", "Q3_K", "IQ4_XS", "MXFP4", "NVFP4", "Q2_K", "BF16", "F16"]
ROWS = [3, 40, 400]  # of two experts each: none, small and large tiles

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")


@pytest.fixture(scope="module")
def rounding():
    """The first card, with products in bfloat16."""
    return open_cuda(cards()[0].index, "bf16")


def weights(kind, seed=1):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N_EXPERT * N, K), np.float32)
    packed = quantize(values, kind)
    plain = dequantize(packed, kind).reshape(N_EXPERT, N, K).astype(np.float64)
    dtype = DTYPES[kind]
    w = leaf(packed.view(dtype.numpy).reshape(N_EXPERT, N, -1), dtype=dtype)
    return w, plain


def drawn_ids(n_tokens, seed=2):
    """Expert 3 has no row, expert 0 has most."""
    ids = np.random.default_rng(seed).choice([0, 0, 0, 1, 2, 4], (n_tokens, 2))
    return ids.astype(np.int32)


def computed(node, card):
    (found,) = results(Graph.of(node), Devices([card, CPU()]))
    return found


def check(found, wanted):
    assert np.abs(found - wanted).max() <= 8e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", ROWS)
@pytest.mark.parametrize("same", [False, True])
def test_forward(rounding, kind, n_tokens, same):
    w, plain = weights(kind)
    ids = drawn_ids(n_tokens)
    shape = (n_tokens, 1 if same else 2, K)
    x = np.random.default_rng(3).standard_normal(shape, np.float32)
    wanted = np.einsum("tuk,tunk->tun", np.broadcast_to(x, (n_tokens, 2, K)), plain[ids])
    check(computed(ops.mul_mat_id(w, leaf(x), leaf(ids)), rounding), wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_tokens", ROWS)
def test_backward(rounding, kind, n_tokens):
    w, plain = weights(kind)
    ids = drawn_ids(n_tokens)
    dy = np.random.default_rng(4).standard_normal((n_tokens, 2, N), np.float32)
    wanted = np.einsum("tun,tunk->tuk", dy, plain[ids])
    check(computed(ops.mul_mat_id_back(w, leaf(dy), leaf(ids)), rounding), wanted)


@pytest.mark.parametrize("n_tokens", ROWS)
def test_gradient_of_the_weights(rounding, n_tokens):
    ids, rng = drawn_ids(n_tokens), np.random.default_rng(5)
    x, dy = (rng.standard_normal((n_tokens, 2, n), np.float32) for n in (64, 24))
    wanted = np.zeros((N_EXPERT, 24, 64))
    np.add.at(wanted, ids.reshape(-1), np.einsum("tun,tuk->tunk", dy, x).reshape(-1, 24, 64))
    found = computed(ops.out_prod_id(leaf(x), leaf(dy), leaf(ids), N_EXPERT), rounding)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "IQ3_S"])
@pytest.mark.parametrize("n", [24, 40, 1000])
@pytest.mark.parametrize("k", [256, 768, 2048])
def test_a_token_at_widths_that_end_within_a_slab(rounding, kind, n, k):
    rng = np.random.default_rng(7)
    packed = quantize(rng.standard_normal((3 * n, k), np.float32), kind)
    plain = dequantize(packed, kind).reshape(3, n, k).astype(np.float64)
    w = leaf(packed.reshape(3, n, -1), dtype=DTYPES[kind])
    x, ids = rng.standard_normal((1, 2, k), np.float32), np.array([[2, 0]], np.int32)
    found = computed(ops.mul_mat_id(w, leaf(x), leaf(ids)), rounding)
    check(found, np.einsum("tuk,tunk->tun", x, plain[ids]))


def test_results_are_the_same_each_time(rounding):
    w, _ = weights("Q4_K")
    ids, x = drawn_ids(300), np.random.default_rng(6).standard_normal((300, 2, K), np.float32)
    node = ops.mul_mat_id(w, leaf(x), leaf(ids))
    first, again = computed(node, rounding), computed(node, rounding)
    assert np.array_equal(first, again)


@pytest.mark.parametrize("wrong", [-1, N_EXPERT])
@pytest.mark.parametrize("n_tokens", [8, 100])
def test_an_id_that_is_no_expert_is_refused(rounding, wrong, n_tokens):
    w, _ = weights("Q8_0")
    ids = drawn_ids(n_tokens)
    ids[7, 1] = wrong
    x = np.ones((n_tokens, 2, K), np.float32)
    with pytest.raises(PyggmlError, match="an id is not one of 5 experts"):
        computed(ops.mul_mat_id(w, leaf(x), leaf(ids)), rounding)


def halves(x):
    """x cut to bfloat16, which is an exact one: (its bits, its numbers)."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return bits, floats(bits)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize("n_tokens", ROWS[1:])
def test_products_in_tiles_read_and_write_bfloat16(rounding, kind, n_tokens):
    """The numbers are those of float32, rounded, and of rows that a token's experts share."""
    (w, _), ids, rng = weights(kind), leaf(drawn_ids(n_tokens)), np.random.default_rng(8)
    for product, n in ((ops.mul_mat_id, K), (ops.mul_mat_id_back, N)):
        bits, x = halves(rng.standard_normal((n_tokens, 1, n), np.float32))
        plain = product(w, leaf(np.repeat(x, 2, axis=1)), ids)
        assert in_tiles(plain, "bf16")
        shared, rounded = (
            bf16_op(plain.op, (1,), writes)(w, leaf(bits, dtype=BF16), ids) for writes in ((), (0,))
        )
        values = results(Graph.of(plain, shared, rounded), Devices([rounding, CPU()]))
        np.testing.assert_array_equal(values[0], values[1])
        assert np.abs(floats(values[2]) - values[0]).max() <= 2**-8 * np.abs(values[0]).max()


@pytest.mark.parametrize("name", ["qwen3moe", "olmoe", "granitemoe"])
def test_gradients_of_a_mixture(rounding, name):
    tokens = np.arange(60) * 7 % 40
    config = LoraConfig(rank=4, alpha=6.0, modules=("attn_q", "attn_v", "attn_output"))

    def computed_by(backends):
        model = pyggml.load(GOLDEN / f"{name}.gguf", compute="f32", backends=backends)
        adapter = attach(model, config)
        drawn = np.random.default_rng(3).normal(0, 0.1, adapter.parameters.data.size)
        adapter.parameters.data[:] = drawn
        return [loss_and_grads(adapter.model, tokens) for _ in range(2)]

    wanted_loss, wanted = computed_by(())[0]
    for loss, gradients in computed_by((rounding,)):  # the second run is captured
        assert loss == pytest.approx(wanted_loss, rel=2e-3)
        for key, x in gradients.items():
            cosine = (x * wanted[key]).sum() / np.linalg.norm(x) / np.linalg.norm(wanted[key])
            assert cosine > 0.99, key


@pytest.mark.parametrize("n, k", [(128, 8), (512, 32), (7, 7), (33, 1), (600, 3), (64, 40)])
def test_the_best_of_a_row(rounding, n, k):
    """Of equal numbers the first, -0 is 0, NaN comes last."""
    rng = np.random.default_rng(10)
    x = rng.integers(-3, 4, (300, n)).astype(np.float32)
    special = rng.random(x.shape)
    x[special < 0.05], x[special > 0.95], x[(special > 0.4) & (special < 0.5)] = (
        np.nan,
        np.inf,
        -0.0,
    )
    x[7] = np.nan
    wanted = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(computed(ops.top_k(leaf(x), k), rounding), wanted)


@pytest.mark.parametrize("shape", [(96, 8, 2048), (3, 2, 24), (200, 3, 1366)])
def test_the_sum_over_experts(rounding, shape):
    rng = np.random.default_rng(11)
    y, other = rng.standard_normal(shape, np.float32), rng.standard_normal(shape[::2], np.float32)
    over = ops.repeat_back(leaf(y), (shape[0], 1, shape[2]))
    total = ops.add(leaf(other), ops.reshape(over, other.shape))
    alone, summed = results(Graph.of(over, total), Devices([rounding, CPU()]))
    joint = computed(total, rounding)
    wanted = np.zeros_like(other)
    for u in range(shape[1]):
        wanted += y[:, u]
    np.testing.assert_array_equal(alone[:, 0], wanted)
    np.testing.assert_array_equal(summed, other + wanted)
    np.testing.assert_array_equal(joint, other + wanted)
