"""What the host asks of a card's driver for a token, and how it waits; the driver notes it."""

import gc
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
from extras import reason
from tiny_models import write

import pyggml
from pyggml.generation import Session
from pyggml.graph.call import Call

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from dry_card import DryCard

from pyggml.backends.cuda.runtime import captures, device, driver, events, transfers


class Notes:
    """The driver's functions, noted as they are called. An event comes when asked `comes` times."""

    def __init__(self, monkeypatch, comes=1):
        self.called, self.comes, self.copied = [], comes, []
        for module in (captures, driver, events, transfers):
            monkeypatch.setattr(module, "direct", self)
        monkeypatch.setattr(events, "driver", self)
        monkeypatch.setattr(events, "finalize", lambda *_: SimpleNamespace())
        monkeypatch.setattr(transfers, "_LOCKED", [])

    def __getattr__(self, name):
        def call(*arguments):
            self.called.append(name)
            if name == "cuMemcpyHtoDAsync":
                self.copied.append(arguments[:3])
            return name != "cuEventQuery" or self.called.count(name) >= self.comes

        return call


class NotingCard(DryCard):
    """A card whose programs are captured already."""

    bind_write, begin_read = device.CudaBackend.bind_write, device.CudaBackend.begin_read

    def __init__(self):
        super().__init__()
        self.stream, self._fault = SimpleNamespace(handle=7), np.zeros(1, np.int32)
        self._transfers = transfers.Transfers(self.stream)

    def join(self, calls):
        captured = captures.Capture((), self.stream)
        captured._times, captured._graph = 2, "graph"
        return [Call(self._run, captured)]


def test_a_token_is_a_copy_a_launch_and_a_copy_back(monkeypatch, tmp_path):
    notes = Notes(monkeypatch)
    monkeypatch.setattr(transfers.cuda, "pinned_array", np.zeros)
    model = pyggml.load(write(tmp_path / "model.gguf"), backends=[NotingCard()])
    session = Session(model, 8)
    session.feed([1])
    del notes.called[:], notes.copied[:]
    logits = session.feed([2])
    assert notes.called == [
        "cuMemcpyHtoDAsync", "cuGraphLaunch", "cuMemcpyDtoHAsync", "cuEventRecord", "cuEventQuery",
    ]  # fmt: skip
    assert not np.shares_memory(logits, session.feed([3])), "the caller keeps what it was given"
    assert notes.copied[0] == notes.copied[1], "from one place to one place"


class Copied(np.ndarray):
    """Notes its copies."""

    def copy(self):
        made = np.array(self)
        self.copies.append(ref(made))
        return made


def test_a_copy_of_what_is_page_locked_lives_until_it_is_read(monkeypatch):
    lives, values = [], np.ones(5, np.float32).view(Copied)
    values.copies = []
    monkeypatch.setattr(transfers, "is_locked", lambda values: True)
    reads = SimpleNamespace(cuMemcpyHtoDAsync=lambda *_: lives.append(values.copies[0]()))
    monkeypatch.setattr(transfers, "direct", reads)
    target = SimpleNamespace(n=values.nbytes, address=99)
    transfers.Transfers(SimpleNamespace(handle=7)).to_card(target, values)
    assert lives[0] is not None


def test_memory_that_went_with_its_card_is_not_page_locked_any_more(monkeypatch):
    Notes(monkeypatch)
    monkeypatch.setattr(transfers.cuda, "pinned_array", np.zeros)
    sends, source = transfers.Transfers(SimpleNamespace(handle=7)), SimpleNamespace(n=8, address=9)
    copy, _ = sends.to_host(source)
    assert transfers.is_locked(copy)
    del sends
    gc.collect()
    assert transfers.is_locked(copy), "somebody has it"
    del copy
    gc.collect()
    assert not transfers._LOCKED


@pytest.mark.parametrize("comes, sleeps", [(3, False), (1 << 30, True)])
def test_the_host_waits_awake_and_then_asleep(monkeypatch, comes, sleeps):
    notes, clock = Notes(monkeypatch, comes), iter(np.arange(100) * 0.5e-3)
    monkeypatch.setattr(events, "perf_counter", lambda: next(clock))
    event = events.Event()
    event.record(SimpleNamespace(handle=7))
    assert event.wait() > 0
    assert (notes.called[-1] == "cuEventSynchronize") is sleeps
    assert notes.called.count("cuEventQuery") == (5 if sleeps else 3), "for 2 ms"


@pytest.mark.parametrize("comes, before, slept", [
    (3, 0.01, [0.0088]), (2, 0.01, [0.0088]), (1, 0.01, []), (3, 0.003, []), (3, 20.0, []),
])  # fmt: skip
def test_the_host_sleeps_through_a_wait_that_was_long_before(monkeypatch, comes, before, slept):
    Notes(monkeypatch, comes)
    naps = []
    monkeypatch.setattr(events, "sleep", naps.append)
    event = events.Event()
    event.record(SimpleNamespace(handle=7))
    took = event.wait(before)
    assert naps == pytest.approx(slept)
    assert (took == 0) is (comes == 2), "it was done before the host was awake again"


@pytest.mark.parametrize("code, wanted", [(0, True), (600, False)])
def test_what_is_asked_directly_is_answered(monkeypatch, code, wanted):
    bindings = SimpleNamespace(cuEventQuery=lambda event: (code,))
    monkeypatch.setattr(driver.importlib, "import_module", lambda name: bindings)
    assert driver._Direct().cuEventQuery("event") is wanted


def test_what_the_driver_refuses_is_named(monkeypatch):
    from enum import IntEnum

    refused = IntEnum("CUresult", {"CUDA_ERROR_ILLEGAL_ADDRESS": 700}).CUDA_ERROR_ILLEGAL_ADDRESS
    bindings = SimpleNamespace(cuGraphLaunch=lambda *_: (refused,))
    monkeypatch.setattr(driver.importlib, "import_module", lambda name: bindings)
    with pytest.raises(driver.CudaAPIError, match="cuGraphLaunch results in CUDA_ERROR_ILLEGAL"):
        driver._Direct().cuGraphLaunch("graph", "stream")
