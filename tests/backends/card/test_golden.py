"""The golden files of all architectures on the card: logits, an adapter's gradients, generation.

compute="f32" meets PyTorch as the host does, "bf16" as near as bfloat16 is. Nothing is left to the
host.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from llama_models import LIMITS, N_TOKENS, VARIANTS, tokens_of, with_adapter, write

import pyggml
from pyggml import gguf
from pyggml.backends.cuda import open_cuda
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.generation import Session
from pyggml.lora import loss_and_grads
from pyggml.models import ARCHITECTURES

from measures import nmse
from peers.trial import adapted

GOLDEN = Path(__file__).parents[2] / "golden"
PEERS = sorted(p.stem for p in (GOLDEN / "peers").glob("*.gguf"))
# The host's errors in bfloat16 by model: NMSE of logits, and of those over a cache; norm of the
# gradients' difference. tests/models/test_peers.py holds the host to them.
OF_HOST = json.loads((GOLDEN / "peers/bf16.json").read_text())
TIMES = 3.0  # a card rounds in other places, A and B too; in float32 one bound holds for all
LOGITS, LOSS, GRADIENTS = 2e-11, {"f32": 1.5e-6, "bf16": 1.5e-2}, 6e-5
pytestmark = [
    pytest.mark.skipif(SIMULATED, reason="the simulator takes minutes for a product"),
    pytest.mark.filterwarnings("error:.* leaves .* to cpu"),
]


@pytest.fixture(scope="module", params=["f32", "bf16"])
def compute(request):
    return request.param


@pytest.fixture(scope="module")
def device(compute):
    return open_cuda(None, compute)


def values_of(name):
    with np.load(GOLDEN / f"peers/{name}.npz") as arrays:
        return dict(arrays)


def loaded(name, device):
    return pyggml.load(GOLDEN / f"{name}.gguf", compute=device.compute, backends=[device])


def allowed(what, name, compute):
    """The largest error of "logits", "gradients" or "cache" that a model may have."""
    if compute == "bf16":
        return TIMES * OF_HOST[name][what]
    return GRADIENTS if what == "gradients" else LOGITS


def logits_error(name, device):
    values = values_of(name)
    return nmse(loaded(f"peers/{name}", device).logits(values["tokens"]), values["logits"])


def gradient_errors(name, device):
    """(relative error of the loss, of the gradients as one vector)."""
    values = values_of(name)
    model = adapted(loaded(f"peers/{name}", device), values)
    loss, found = loss_and_grads(model, values["tokens"])
    wanted = {key: values[f"grad/{key}"] for key in found}
    apart = sum(np.sum((found[key] - wanted[key]) ** 2.0) for key in found)
    whole = sum(np.sum(g**2.0) for g in wanted.values())
    return abs(loss / float(values["lora_loss"]) - 1), (apart / whole) ** 0.5


def session_error(name, device):
    """The largest error of logits, of a prompt in parts and of single tokens; of LongRoPE, of those
    that have the rotary factors of the whole text."""
    values, model = values_of(name), loaded(f"peers/{name}", device)
    tokens, errors = values["tokens"], []
    session = Session(model, len(tokens))
    for n in (7, 1, 1, 12, 1, 1, 1):
        found = session.feed(tokens[session.n_past : session.n_past + n])
        if session.n_past > (model.config.n_ctx_short or 0):
            errors.append(nmse(found, values["logits"][session.n_past - 1]))
    return max(errors)


@pytest.mark.parametrize("name", PEERS)
def test_logits(name, device, compute, record_property):
    error = logits_error(name, device)
    record_property("error", float(error))
    assert error < allowed("logits", name, compute)


@pytest.mark.parametrize("name", PEERS)
def test_gradients_of_an_adapter(name, device, compute, record_property):
    of_loss, error = gradient_errors(name, device)
    record_property("error", float(error))
    assert of_loss < LOSS[compute]
    assert error < allowed("gradients", name, compute)


@pytest.mark.parametrize("name", PEERS)
def test_a_cache_changes_nothing(name, device, compute, record_property):
    error = session_error(name, device)
    record_property("error", float(error))
    assert error < allowed("cache", name, compute)


@pytest.mark.parametrize("file", sorted((GOLDEN / "formulas").glob("*.gguf")), ids=lambda p: p.stem)
def test_architectures_of_formulas(file, device, compute, record_property):
    tokens = np.random.default_rng(0).integers(0, 40, 24)
    wanted = np.load(file.with_suffix(".npy"))
    error = nmse(loaded(f"formulas/{file.stem}", device).logits(tokens), wanted)
    record_property("error", float(error))
    assert error < allowed("logits", file.stem, compute)


@pytest.mark.parametrize("name", sorted(p.stem for p in (GOLDEN / "llama_cpp").glob("*.npz")))
def test_models_that_llama_cpp_is_asked_about(name, device, compute, tmp_path, record_property):
    """Logits without and with an adapter; in bfloat16 as near as the host's."""
    path = write(tmp_path / "model.gguf", *VARIANTS[name])
    model = pyggml.load(path, compute=compute, backends=[device])
    with np.load(GOLDEN / f"llama_cpp/{name}.npz") as arrays:
        wanted = dict(arrays)
    tokens = tokens_of(name)
    host = pyggml.load(path, compute="bf16").logits(tokens) if compute == "bf16" else None
    error = nmse(model.logits(tokens)[-N_TOKENS:], wanted["logits"])
    record_property("error", float(error))
    limit = LIMITS[name] if host is None else TIMES * nmse(host[-N_TOKENS:], wanted["logits"])
    assert error < limit
    if host is None:
        adapted_logits = with_adapter(model).model.logits(tokens)[-N_TOKENS:]
        assert nmse(adapted_logits, wanted["lora_logits"]) < limit


def test_every_architecture_is_here():
    folders = (GOLDEN / name for name in ("peers", "formulas", "models"))
    found = set()
    for path in (p for folder in folders for p in folder.glob("*.gguf")):
        with gguf.open(path) as file:
            if "general.architecture" in file.metadata:
                found.add(file.metadata["general.architecture"].raw.decode())
    found |= {VARIANTS[p.stem][0] for p in (GOLDEN / "llama_cpp").glob("*.npz")}
    assert set(ARCHITECTURES) <= found
