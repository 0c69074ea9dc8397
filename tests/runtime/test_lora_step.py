"""A LoRA step on two devices: the second knows half of the ops and computes in its own memory."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from cases import cases
from reference_backend import ReferenceBackend

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.graph.arrays import read
from pyggml.graph.tensor import leaf
from pyggml.lora import LoraConfig, attach
from pyggml.models import Inputs, build_loss
from pyggml.models.texts import fill
from pyggml.ops import OPS
from pyggml.runtime import Devices, bind, schedule

pytestmark = pytest.mark.filterwarnings("ignore:reference leaves")
GOLDEN = Path(__file__).parents[1] / "golden/models"
TOKENS = np.arange(21) * 11 % 48
MODELS = ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16"]
PARTS = {"half": sorted(OPS)[::2], "the other half": sorted(OPS)[1::2]}
START = 0.001  # of the accumulators, so that what is added to them is seen


def step(path):
    """The graph of a loss and its gradients, added to accumulators that start at START."""
    adapter = attach(pyggml.load(path, compute="f32"), LoraConfig(rank=4, alpha=6.0))
    model, parameters = adapter.model, adapter.parameters
    parameters.data[:] = np.random.default_rng(3).normal(0, 0.1, parameters.data.shape)
    inputs = Inputs.empty(len(TOKENS) - 1)
    fill(inputs, TOKENS[:-1])
    targets = leaf(TOKENS[1:].astype(np.int32), "targets")
    weights = leaf(np.full(len(TOKENS) - 1, 0.05, np.float32), "weights")
    loss = build_loss(model.parts, inputs, targets, weights, model.adapters)
    graph = build_backward(
        loss,
        list(parameters.tensors.values()),
        accumulators=list(parameters.gradients.values()),
    )
    return parameters, graph


def results(program, graph, parameters):
    """Loss and gradients of the second of two runs: what is kept from run to run must be fresh."""
    program()
    parameters.gradient[:] = START
    program()
    found = [read(t) for t in parameters.gradients.values()]
    return float(program.read(graph["loss"])), found


@pytest.mark.parametrize("name, part", cases(product(MODELS, PARTS), [("qwen3-F16", "half")]))
def test_two_devices_give_the_cpu_s_loss_and_gradients(name, part):
    path = GOLDEN / f"{name}.gguf"
    parameters, graph = step(path)
    wanted_loss, wanted = results(bind(schedule(graph, Devices([CPU()]))), graph, parameters)
    device = ReferenceBackend(PARTS[part])
    parameters, graph = step(path)
    made = schedule(graph, Devices([device, CPU()]))
    loss, gradients = results(bind(made), graph, parameters)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for found, want in zip(gradients, wanted, strict=True):
        assert np.linalg.norm(found - want) <= 4e-6 * np.linalg.norm(want - START)
    assert sum(device.computed.values()) >= 60 and len(made.parts) >= 20, made.report()
