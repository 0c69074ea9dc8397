"""Captures of graphs that the driver, a library or the user breaks off: fakes of the driver."""

import gc
from functools import partial
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
from extras import reason

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from failing_card import Fails, of_package

from pyggml.backends.cuda.runtime import captures, driver, failures
from pyggml.errors import DeviceMemoryError


class Recorder:
    """The driver's functions of capture; `fails`: function -> what it raises."""

    def __init__(self, monkeypatch, **fails):
        self.called, self.fails = [], fails
        monkeypatch.setattr(captures, "driver", self)
        monkeypatch.setattr(captures, "direct", self)
        monkeypatch.setattr(captures, "free_what_is_gone", lambda: None)

    def __getattr__(self, name):
        def call(*_):
            self.called.append(name)
            if name in self.fails:
                raise self.fails[name]
            return name

        return call


def test_no_memory_for_a_captured_graph(monkeypatch):
    card, no_memory = Fails(monkeypatch), driver.CudaAPIError(failures.OUT_OF_MEMORY, "no memory")
    found = Recorder(monkeypatch, cuGraphInstantiate=no_memory)
    calls = captures.Capture([lambda: None], SimpleNamespace(handle=0))
    calls()
    with pytest.raises(DeviceMemoryError, match="a kernel's own memory is wanted, 5 of 80 are"):
        card.backend._run(calls)
    assert found.called[-1] == "cuGraphDestroy", "nothing is left behind"


@pytest.mark.parametrize("text", ["ALLOC_FAILED (3)", "NOT_SUPPORTED (15)"])
def test_a_library_that_fails_in_a_capture(monkeypatch, text):
    """The stream takes launches again; what cannot be captured is launched each time."""
    card, found, times = Fails(monkeypatch), Recorder(monkeypatch), []

    def product():
        times.append(found.called[-1:])
        if found.called == ["cuStreamBeginCapture"]:
            raise of_package("nvmath", text)

    calls = captures.Capture([product], SimpleNamespace(handle=0))
    card.backend._run(calls)
    if text.startswith("ALLOC"):
        with pytest.raises(DeviceMemoryError):
            card.backend._run(calls)
    else:
        card.backend._run(calls), card.backend._run(calls)
        assert len(times) == 4
    assert found.called == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy"]


@pytest.mark.parametrize("refuses", ["edge", "graph"])
def test_a_driver_that_refuses_launches_that_begin_early(monkeypatch, refuses):
    """The second capture does without them."""
    found, tried = Recorder(monkeypatch), []
    monkeypatch.setattr(captures, "_next", lambda stream: [])

    def set_next(stream, nodes, is_early):
        tried.append(is_early)
        found.fails.clear()
        if is_early and refuses == "edge":
            raise of_package("cuda", "CUDA_ERROR_INVALID_VALUE: no such edge")
        if is_early:
            found.fails["cuGraphInstantiate"] = driver.CudaAPIError(1, "no such graph")

    monkeypatch.setattr(captures, "_set_next", set_next)
    calls = captures.Capture(
        [lambda: None], SimpleNamespace(handle=0), lambda: [()], lambda waits: [True]
    )
    calls(), calls()
    assert tried == [True, False] and found.called[-1] == "cuGraphLaunch"


def test_what_a_graph_launches_for_several_calls_lasts_as_long_as_it(monkeypatch):
    """Its launch reads a table on the card: freed, it would be the next graph's, whose places this
    one would then fill."""
    Recorder(monkeypatch)
    monkeypatch.setattr(captures, "_next", lambda stream: [])
    monkeypatch.setattr(captures, "_set_next", lambda *_, is_early=False: None)
    tables = []

    def join(calls):
        table = np.zeros(3)
        tables.append(ref(table))
        return calls, lambda: table.sum()

    calls = captures.Capture(
        [lambda: None] * 2, SimpleNamespace(handle=0), lambda: [(), ()], joined=join
    )
    calls(), calls(), calls()
    gc.collect()
    assert len(tables) == 1 and tables[0]() is not None


def test_an_interrupt_in_a_capture(monkeypatch):
    """What is read then, for a checkpoint, needs a stream that captures no more."""
    found = Recorder(monkeypatch)

    def interrupted():
        if found.called:
            raise KeyboardInterrupt

    calls = captures.Capture([interrupted], SimpleNamespace(handle=0))
    calls()
    with pytest.raises(KeyboardInterrupt):
        calls()
    assert found.called == ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphDestroy"]


def test_what_is_gone_is_freed(monkeypatch):
    """Numba has two lists of what waits to be freed: one of memory, one of all else."""
    freed = []
    memory, modules = (SimpleNamespace(clear=partial(freed.append, n)) for n in ("array", "module"))
    context = SimpleNamespace(
        memory_manager=SimpleNamespace(deallocations=memory), deallocations=modules
    )
    monkeypatch.setattr(driver.cuda, "current_context", lambda: context)
    driver.free_what_is_gone()
    assert freed == ["array", "module"]
