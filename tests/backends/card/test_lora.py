"""LoRA's products in bfloat16, joined with those that they adapt, against the host's in float32."""

from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.backends.cuda.gemm.cublas import has_cublas
from pyggml.backends.cuda.ops.lora import nodes as ops
from pyggml.backends.cuda.ops.lora import wide
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, DTYPES
from pyggml.graph.tensor import leaf
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices, results

pytestmark = pytest.mark.skipif(
    SIMULATED or not has_cublas(), reason="wide products take tensor cores and cuBLAS"
)
GOLDEN = Path(__file__).parents[2] / "golden/models"
TOKENS = np.arange(17) * 7 % 48
ALLOWED = 1e-2  # error of a norm: bfloat16 has 8 bits


def floats(found):
    return (found.astype(np.uint32) << 16).view(np.float32)


def halves(x):
    """x cut to bfloat16, which is an exact one."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def close(found, wanted, allowed=ALLOWED):
    assert np.linalg.norm(found - wanted) <= allowed * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def rounding():
    """The card, with products in bfloat16."""
    return pyggml.backends.cuda.open_cuda(0, "bf16")


@pytest.mark.parametrize("m, k, n", [(37, 96, 64), (160, 1280, 48), (70, 224, 528)])
@pytest.mark.parametrize("ranks", [(4, 8), (16,), (8, 8, 8), (32, 32, 32), (64, 64, 64)])
def test_each_op_agrees_with_numpy(rounding, m, k, n, ranks):
    rng = np.random.default_rng(1)
    x, dy, c = (rng.standard_normal(s, np.float32) for s in ((m, k), (m, n), (m, k)))
    factors = [rng.standard_normal((r, k), np.float32) for r in ranks]
    b = rng.standard_normal((n, ranks[-1]), np.float32)
    raw = quantize(rng.standard_normal((n, k), np.float32), "Q8_0")
    w, a = dequantize(raw, "Q8_0"), factors[-1]
    scales, first = [0.5, 2.0, 3.0][: len(ranks)], sum(-(-r // 8) * 8 for r in ranks[:-1])

    of_x, packed = leaf(x), leaf(raw, dtype=DTYPES["Q8_0"])
    rows = ops.wide_rows(of_x, [leaf(f) for f in factors], scales)
    y = ops.wide_product(packed, rows, leaf(b), first)
    d = ops.wide_gradient(leaf(dy), leaf(b), 2.0)
    dx, added = (ops.wide_back(to, packed, d, leaf(a), rows.shape[1]) for to in (None, leaf(c)))
    da = ops.gradient_of_a(d, of_x, *b.shape)
    db = ops.gradient_of_b(rows.saved[0], d, first, b.shape)
    nodes = rows, rows.saved[0], y, d, dx, added, da, db
    found = results(Graph.of(*nodes), Devices([rounding, CPU()]))

    u, v = x @ a.T * scales[-1], dy @ b * 2
    close(floats(found[0])[:, :k], x)
    close(floats(found[0])[:, k + first :][:, : ranks[-1]], u)
    np.testing.assert_array_equal(found[1], found[0][:, k : k + found[1].shape[1]])
    close(found[2], x @ w.T + u @ b.T)
    close(floats(found[3])[:, n : n + ranks[-1]], v)
    close(found[4], dy @ w + v @ a)
    close(found[5], c + dy @ w + v @ a)
    close(found[6], v.T @ x)
    close(found[7], dy.T @ u)


@pytest.mark.parametrize("m, n, ranks", [(37, 96, (4, 16)), (160, 1296, (8, 8))])
def test_the_gradients_of_a_gated_unit(rounding, m, n, ranks):
    rng = np.random.default_rng(2)
    gate, up, dy = (halves(rng.standard_normal((m, n), np.float32)) for _ in range(3))
    b_gate, b_up = (rng.standard_normal((n, r), np.float32) for r in ranks)
    operands = [leaf(t, dtype=BF16) for t in (gate, up, dy)]
    node = ops.gated_gradients(operands, [leaf(b_gate), leaf(b_up)], [0.5, 3.0])
    of_gate, of_up, unit = results(Graph.of(node, *node.saved), Devices([rounding, CPU()]))

    gate, up, dy = map(floats, (gate, up, dy))
    s = 1 / (1 + np.exp(-gate))
    wanted = dy * up * s * (1 + gate * (1 - s)), dy * gate * s, gate * s * up
    for found, d, b, scale in zip(
        (of_gate, of_up), wanted[:2], (b_gate, b_up), (0.5, 3.0), strict=True
    ):
        close(floats(found)[:, :n], d, 4e-3)
        close(floats(found)[:, n : n + b.shape[1]], d @ b * scale)
        assert not found[:, n + b.shape[1] : n + wide.columns(b.shape[1])].any()
    close(floats(unit), wanted[2], 4e-3)


def adapted(path, alpha, *backends):
    adapter = attach(
        pyggml.load(path, compute="f32", backends=backends), LoraConfig(rank=4, alpha=alpha)
    )
    rng = np.random.default_rng(3)
    adapter.parameters.data[:] = rng.normal(0, 0.1, adapter.parameters.data.size)
    return adapter.model


@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16", "lfm2-Q4_K_M"])
@pytest.mark.parametrize("alpha", [4.0, 6.0])
def test_gradients_of_a_model(rounding, name, alpha):
    path = GOLDEN / f"{name}.gguf"
    wanted_loss, wanted = loss_and_grads(adapted(path, alpha), TOKENS)
    model = adapted(path, alpha, rounding)
    for _ in range(2):  # the second run is captured
        loss, gradients = loss_and_grads(model, TOKENS)
        assert loss == pytest.approx(wanted_loss, rel=2e-3)
        for key, g in gradients.items():
            close(g, wanted[key], 6e-2)


def test_weights_that_stay_unpacked_change_no_bit(rounding, monkeypatch):
    """And those for which there is no room are unpacked in every run."""
    path, runs = GOLDEN / "qwen2-Q4_K_M.gguf", []
    free, total = rounding.memory()
    for room in (free, 0, None):
        if room is not None:
            monkeypatch.setattr(rounding, "memory", lambda room=room: (room, total))
        model = adapted(path, 6.0, rounding)
        before = set(rounding._lasting)  # which keeps those of the models before
        runs.append([loss_and_grads(model, TOKENS) for _ in range(3)])
        assert bool(set(rounding._lasting) - before) == (room != 0)
        monkeypatch.undo()
    for run in runs:
        for loss, gradients in run:
            assert loss == runs[0][0][0]
            for key, g in gradients.items():
                np.testing.assert_array_equal(g, runs[0][0][1][key])
