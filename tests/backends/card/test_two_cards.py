"""Two like cards in one process, in turns and in threads: each computes what it computes alone."""

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.runtime import transfers
from pyggml.backends.cuda.runtime.driver import CudaAPIError, address, driver
from pyggml.errors import DeviceError, PyggmlError
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, leaf, zeros
from pyggml.lora import LoraConfig, TrainConfig, Trainer, attach, loss_and_grads
from pyggml.lora.data import Corpus, Dataset
from pyggml.ops import get_rows, scale
from pyggml.runtime import Devices, results

GOLDEN = Path(__file__).parents[2] / "golden/models"
NAMES = "qwen3-F16", "llama-Q8_0", "qwen2-Q4_K_M"
TOKENS = np.arange(33) * 7 % 48


def alike():
    """The numbers of two cards of one compute capability; None if there are no such two."""
    try:
        found = cards()
    except DeviceError:
        return None
    for first in found:
        for other in found:
            if other.index > first.index and other.capability == first.capability:
                return first.index, other.index
    return None


PAIR = alike()
pytestmark = pytest.mark.skipif(PAIR is None, reason="wanted two cards of one compute capability")


@pytest.fixture(scope="module")
def pair():
    """Both, with products in bfloat16."""
    return [open_cuda(index) for index in PAIR]


def adapted(name, backend):
    model = pyggml.load(GOLDEN / f"{name}.gguf", backends=[backend])
    adapter = attach(model, LoraConfig(rank=4, alpha=6.0))
    rng = np.random.default_rng(3)
    adapter.parameters.data[:] = rng.normal(0, 0.1, adapter.parameters.data.size)
    return adapter


def gradients(model):
    loss, found = loss_and_grads(model, TOKENS)
    return np.concatenate([[loss], *(found[name].ravel() for name in sorted(found))])


def placed(name, backends, **how):
    """The losses and the adapter of three steps of four passes, which may overlap."""
    model = pyggml.load(GOLDEN / f"{name}.gguf", backends=backends, **how)
    adapter = attach(model, LoraConfig(rank=4, dropout=0.1))
    ids = np.random.default_rng(5).integers(0, 48, (14, 33)).astype(np.int32)
    corpus = Corpus(Dataset(ids[:12], 0 * ids[:12]), Dataset(ids[12:], 0 * ids[12:]))
    config = TrainConfig(lr=0.01, grad_accum=4, max_steps=3, val_every=2, clip=0.05)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config)
    trainer.run(progress=False)
    losses = [*trainer.history.losses, *(v.loss for v in trainer.history.validations)]
    return trainer.passes.n_slots, losses, adapter.parameters.data.tobytes()


def text(model):
    return list(pyggml.generate(model, TOKENS, 9))


def trained(name, backend, barrier=None):
    """The adapter after six steps."""
    rng, adapter = np.random.default_rng(5), adapted(name, backend)
    ids, owner = rng.integers(0, 48, (12, 17)).astype(np.int32), np.zeros((12, 17), np.int32)
    config = TrainConfig(lr=0.01, warmup_steps=2, max_steps=6, batch=2, weight_decay=0.1)
    corpus = Corpus(Dataset(ids, owner), None)
    trainer = Trainer(adapter.model, adapter.parameters, corpus, config)
    trainer.run(lambda event: barrier and barrier.wait(60))
    return adapter.parameters.data.copy()


def together(*works):
    """What these give, each in a thread that has not met a card, all begun at once."""
    begin = Barrier(len(works))

    def run(work):
        begin.wait(60)
        return work()

    with ThreadPoolExecutor(len(works)) as threads:
        return [f.result(300) for f in [threads.submit(run, work) for work in works]]


def same(found, wanted):
    for a in found:
        np.testing.assert_array_equal(a, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_in_turns(pair, name):
    """Each run of the one lies between runs of the other; texts come of captured passes."""
    models = [adapted(name, backend).model for backend in pair]
    wanted = gradients(models[0])
    for _ in range(3):
        same([gradients(model) for model in models], wanted)
    texts = [text(model) for _ in range(2) for model in models]
    assert texts == [texts[0]] * 4


@pytest.mark.parametrize("name", NAMES)
def test_in_threads(pair, name):
    models = [adapted(name, backend).model for backend in pair]
    wanted, wanted_text = gradients(adapted(name, pair[0]).model), text(models[0])
    for _ in range(3):
        same(together(*(lambda m=m: gradients(m) for m in models)), wanted)
        assert together(*(lambda m=m: text(m) for m in models)) == [wanted_text] * 2


def test_trainings_at_once_step_by_step(pair):
    wanted = trained(NAMES[1], pair[0])
    barrier = Barrier(2)
    same(together(*(lambda b=b: trained(NAMES[1], b, barrier) for b in pair)), wanted)
    assert np.abs(wanted - adapted(NAMES[1], pair[0]).parameters.data).max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_blocks_on_both_give_the_bytes_of_one_while_passes_overlap(pair, name):
    """Two blocks and the output: both on the first, or one of them on each in turns."""
    _, losses, adapter = placed(name, pair[:1])
    for split, at_once in (((1, 1), 2), ((1, 1, 1, 1), 3)):
        assert placed(name, pair, split=split) == (at_once, losses, adapter)


def test_a_thread_works_on_the_card_of_its_model_alone(pair):
    """Kernels are chosen, and arrays cut, before anything is launched: with no card current, Numba
    would open the first one."""
    adapter = adapted(NAMES[2], pair[1])

    def where():
        gradients(adapter.model)
        return int(driver.cuCtxGetDevice())

    assert together(where) == [PAIR[1]]


def test_numbers_go_from_card_to_card(pair):
    tensors = [Tensor((3, 1000), F32) for _ in pair]
    for card, t in zip(pair, tensors, strict=True):
        card.attach(t, card.alloc(t.n_bytes), 0)
    values = np.random.default_rng(1).standard_normal((3, 1000)).astype(np.float32)
    pair[0].write(tensors[0], values)
    found = pair[0].read(tensors[0])
    assert transfers.is_locked(found)
    pair[1].write(tensors[1], found)
    found[:] = 0
    np.testing.assert_array_equal(pair[1].read(tensors[1]), values)


def test_memory_is_given_back_to_its_card(pair):
    """Though the other is current when the last reference goes."""
    arrays = [card.alloc(256 << 20) for card in pair]
    places = [address(array) for array in arrays]
    for i, other in ((0, 1), (1, 0)):
        pair[i].memory()  # the card is current
        assert int(driver.cuMemGetAddressRange(places[i])[1]) == 256 << 20
        pair[other].memory()
        arrays[i] = None
        gc.collect()
        pair[i].memory()  # which frees what is gone
        with pytest.raises(CudaAPIError):
            driver.cuMemGetAddressRange(places[i])


def test_a_fault_is_that_of_one_card(pair):
    table, ids = zeros((7, 4)), leaf(np.array([0, 7], np.int32))
    on = [lambda *nodes, c=card: results(Graph.of(*nodes), Devices([c, CPU()])) for card in pair]
    with pytest.raises(PyggmlError, match="no row of a table of 7"):
        on[1](get_rows(table, ids))
    assert on[0](scale(zeros((2,)), 2.0))[0].tolist() == [0, 0]
