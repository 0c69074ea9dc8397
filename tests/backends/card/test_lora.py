"""LoRA's products in bfloat16, joined with those that they adapt, against the host's in float32."""

import gc
from pathlib import Path

import numpy as np
import pytest

import pyggml
from pyggml.backends.cuda.gemm.cublas import has_cublas
from pyggml.backends.cuda.ops.lora import gated_sums, thin_sums
from pyggml.backends.cuda.rewrites import gated_gradients, joined_backs
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.backward import Keep, training_graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16
from pyggml.look.gradients import loss_graph
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.lora.data import WindowBatch
from pyggml.lora.trainer.passes import Passes
from pyggml.models.low_rank import tensors_of_adapters
from pyggml.runtime import results

pytestmark = pytest.mark.skipif(
    SIMULATED or not has_cublas(), reason="wide products take tensor cores and cuBLAS"
)
GOLDEN = Path(__file__).parents[2] / "golden/models"
TOKENS = np.arange(17) * 7 % 48
ALLOWED = 1e-2  # error of a norm: bfloat16 has 8 bits


def close(found, wanted, allowed=ALLOWED):
    assert np.linalg.norm(found - wanted) <= allowed * np.linalg.norm(wanted)


@pytest.fixture(scope="module")
def rounding():
    """The card, with products in bfloat16."""
    return pyggml.backends.cuda.open_cuda(0, "bf16")


def adapter_of(path, alpha, *backends):
    adapter = attach(
        pyggml.load(path, compute="f32", backends=backends), LoraConfig(rank=4, alpha=alpha)
    )
    rng = np.random.default_rng(3)
    adapter.parameters.data[:] = rng.normal(0, 0.1, adapter.parameters.data.size)
    return adapter


def adapted(path, alpha, *backends):
    return adapter_of(path, alpha, *backends).model


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


@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16"])
@pytest.mark.parametrize("room", [0, 1 << 33])
@pytest.mark.parametrize("keep", [Keep.COSTLY, Keep.LAYERS])
def test_gradients_of_what_is_computed_again(rounding, monkeypatch, name, room, keep):
    """Layers, from rounded residual sums; and `up`, unless there is room for it. Gradients of A of
    one x are one product, as where there are many rows."""
    path = GOLDEN / f"{name}.gguf"
    _, wanted = loss_and_grads(adapted(path, 6.0), TOKENS)
    monkeypatch.setattr(gated_gradients, "LARGE", 0)
    monkeypatch.setattr(joined_backs, "_MANY_ROWS", 0)
    monkeypatch.setattr(rounding, "memory", lambda: (room, 1 << 34))
    model = adapted(path, 6.0, rounding)
    parameters = tensors_of_adapters(model.adapters)
    loss = loss_graph(model, TOKENS, parameters=parameters)
    graph = training_graph(loss, parameters, kept_as=BF16, keep=keep)
    found = dict(zip(graph.names, results(graph, model.devices), strict=True))
    for key in parameters:
        close(found[f"grad:{key}"], wanted[key], 6e-2)


@pytest.mark.parametrize("name", ["qwen3-F16", "llama-Q8_0"])
@pytest.mark.parametrize("fewest_rows_that_are_many", [16, 1 << 20])
def test_gradients_that_are_added_where_they_are_made(
    rounding, monkeypatch, name, fewest_rows_that_are_many
):
    """All of one D at once, or, where rows are many, those of a gated unit with it."""
    for module in (gated_sums, thin_sums):
        monkeypatch.setattr(module, "MANY_ROWS", fewest_rows_that_are_many)
    ids, n = np.arange(33, dtype=np.int32) * 7 % 48, np.arange(32, dtype=np.int32)
    span = np.stack([0 * n, n + 1], axis=1)
    batch = WindowBatch(
        ids[:-1], n, span, ids[1:], np.full(32, 1 / 32, "f4"), np.full(32, 32, "f4")
    )
    found = []
    for backends in ((), (rounding,)):
        adapter = adapter_of(GOLDEN / f"{name}.gguf", 6.0, *backends)
        passes = Passes(adapter.model, adapter.parameters, 32, 32)
        passes.train(batch)
        adapter.model.devices.gather(*adapter.parameters.buffers["gradient"])
        found.append(adapter.parameters.gradients)
    for key, wanted in found[0].items():
        close(array(found[1][key]), array(wanted), 6e-2)


def test_weights_that_stay_unpacked_change_no_bit(rounding, monkeypatch):
    """And those for which there is no room are unpacked in every run."""
    path, runs, much = GOLDEN / "qwen2-Q4_K_M.gguf", [], 1 << 33
    gc.collect()  # of a model that streams, nothing else of the card's stays unpacked
    for room in (much, 0, much):  # whatever other processes leave of the card
        monkeypatch.setattr(rounding, "memory", lambda: (much, 2 * much))
        model = adapted(path, 6.0, rounding)  # which would stream without room
        monkeypatch.setattr(rounding, "memory", lambda room=room: (room, 2 * much))
        before = set(rounding._lasting)  # which keeps those of the models before
        runs.append([loss_and_grads(model, TOKENS) for _ in range(3)])
        assert bool(set(rounding._lasting) - before) == (room > 0)
    for run in runs:
        for loss, gradients in run:
            assert loss == runs[0][0][0]
            for key, g in gradients.items():
                np.testing.assert_array_equal(g, runs[0][0][1][key])
