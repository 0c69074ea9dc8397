"""What a card refuses in the middle of a run, and what becomes of a lost one, by fakes."""

import re
from types import SimpleNamespace

import pytest
from extras import reason

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from failing_card import Fails, of_driver, of_package, raising
from processes import python

from pyggml.backends.cuda.runtime import device, driver
from pyggml.errors import DeviceError, DeviceLostError, DeviceMemoryError


@pytest.mark.parametrize(
    "package, text",
    [
        ("cuda", "CUDA_ERROR_OUT_OF_MEMORY: no memory"),
        ("nvmath", "ALLOC_FAILED (3)"),
        ("nvmath", "NOT_INITIALIZED (1)"),
    ],
)
def test_no_memory_says_what_is_wanted_and_free(monkeypatch, package, text):
    card = Fails(monkeypatch)
    with pytest.raises(
        DeviceMemoryError, match="out of memory: 7 bytes are wanted, 5 of 80 are free"
    ):
        card.raises(of_package(package, text), 7)
    with pytest.raises(DeviceMemoryError, match="a kernel's own memory is wanted, 5 of 80 are"):
        card.raises(of_package(package, text))


def test_no_memory_for_a_context(monkeypatch):
    full = of_package("cuda", "CUDA_ERROR_OUT_OF_MEMORY: no memory")

    def none():
        raise full

    with pytest.raises(DeviceMemoryError, match="the driver's own memory is wanted$"):
        Fails(monkeypatch, none).raises(full)


def test_nothing_is_asked_of_a_card_that_does_not_become_current(monkeypatch):
    """Another card may be current then: its memory is not this one's, nor is its loss."""
    card = Fails(monkeypatch, memory=never, waits=never)
    full = of_package("cuda", "CUDA_ERROR_OUT_OF_MEMORY: no memory")
    monkeypatch.setattr(device, "make_current", raising(full))
    with pytest.raises(DeviceMemoryError, match="the driver's own memory is wanted$"):
        card.backend._working().__enter__()
    absent = of_driver(46, "DEVICE_UNAVAILABLE")
    monkeypatch.setattr(device, "make_current", raising(absent))
    with pytest.raises(DeviceError, match="the card is for another process alone") as refused:
        card.backend._working().__enter__()
    assert type(refused.value) is DeviceError and not card.abandoned


def never():
    raise AssertionError("the card need not be asked")


@pytest.mark.parametrize(
    "number, name, says",
    [
        (214, "ECC_UNCORRECTABLE", "its memory has an error that cannot be corrected, wanted its"),
        (700, "ILLEGAL_ADDRESS", "a kernel read or wrote memory that it does not have"),
        (702, "LAUNCH_TIMEOUT", "a kernel took longer than the system allows"),
        (710, "ASSERT", "a kernel found that something it takes for granted does not hold"),
        (714, "HARDWARE_STACK_ERROR", "a kernel's stack grew too large, or was overwritten"),
        (716, "MISALIGNED_ADDRESS", "a kernel read or wrote at an address that is not aligned"),
        (719, "LAUNCH_FAILED", "a kernel ended with a fault"),
        (810, "MPS_CLIENT_TERMINATED", "the MPS server has ended this process's work"),
    ],
)
def test_errors_after_which_every_call_fails(monkeypatch, number, name, says):
    card = Fails(monkeypatch, waits=never)
    for error in of_driver(number, name), of_package("cuda", f"CUDA_ERROR_{name}: far away"):
        with pytest.raises(DeviceLostError) as lost:
            card.raises(error)
        assert str(lost.value).startswith(f"cuda:0 has failed: {says}")
        assert str(lost.value).endswith(f"(CUDA_ERROR_{name})")
    assert card.abandoned == [0, 0]


def test_all_that_CUDA_calls_fatal_is():
    """Its documentation of each error says what becomes of the process."""
    results = pytest.importorskip("cuda.bindings.driver").CUresult
    from pyggml.backends.cuda.runtime import failures

    ends = re.compile("inconsistent state|must be destroyed|must be terminated")
    fatal = {r.name.removeprefix("CUDA_ERROR_") for r in results if ends.search(r.__doc__ or "")}
    if not fatal:
        pytest.skip("these bindings have no texts of errors to compare with")
    assert fatal <= failures._FATAL.keys()
    named = {r.name.removeprefix("CUDA_ERROR_") for r in results}
    assert failures._FATAL.keys() | failures._REFUSED.keys() <= named


@pytest.mark.parametrize(
    "error, says",
    [
        (
            of_driver(1, "INVALID_VALUE", "cuKernelSetAttribute"),
            "a call's value is out of range, which is a fault of pyggml; --device cpu does without "
            "a card (CUDA_ERROR_INVALID_VALUE of cuKernelSetAttribute)",
        ),
        (
            of_package("cuda", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: no launch"),
            "a launch has more threads, registers or arguments than the card takes, which is a "
            "fault of pyggml; --device cpu does without a card "
            "(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES)",
        ),
        (
            of_package("cuda", "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image"),
            "the driver cannot load what the compiler made, wanted a newer driver "
            "(CUDA_ERROR_NO_BINARY_FOR_GPU)",
        ),
        (
            of_driver(46, "DEVICE_UNAVAILABLE", "cuDevicePrimaryCtxRetain"),
            "the card is for another process alone, or for none, wanted the compute mode of "
            "nvidia-smi -c DEFAULT (CUDA_ERROR_DEVICE_UNAVAILABLE of cuDevicePrimaryCtxRetain)",
        ),
        (of_driver(909, "TIMEOUT"), "Call to cuStreamSynchronize results in CUDA_ERROR_TIMEOUT"),
        (of_package("nvmath", "INTERNAL_ERROR (14)"), "INTERNAL_ERROR (14)"),
        (
            of_package("cuda", "function cuKernelGetParamInfo is not found"),
            "function cuKernelGetParamInfo is not found in the driver, wanted a newer one",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_is_refused_loses_no_card(monkeypatch, error, says):
    card = Fails(monkeypatch)
    with pytest.raises(DeviceError) as refused:
        card.raises(error)
    assert type(refused.value) is DeviceError
    assert str(refused.value) == f"cuda:0 refuses a call: {says}"
    assert not card.abandoned


def test_a_card_that_cannot_be_waited_for_is_lost(monkeypatch):
    """cuBLAS has a word of its own for a kernel's fault, and a card that is gone many."""
    fault = raising(of_driver(719, "LAUNCH_FAILED", "cuCtxSynchronize"))
    card = Fails(monkeypatch, waits=fault)
    with pytest.raises(DeviceLostError, match="cuda:0 has failed: a kernel ended with a fault"):
        card.raises(of_package("nvmath", "EXECUTION_FAILED (13)"))
    card = Fails(monkeypatch, waits=raising(of_driver(999, "UNKNOWN", "cuCtxSynchronize")))
    with pytest.raises(DeviceLostError, match="cuCtxSynchronize results in CUDA_ERROR_UNKNOWN"):
        card.raises(of_driver(101, "INVALID_DEVICE"))
    assert card.abandoned == [0]


@pytest.mark.parametrize(
    "number, name", [(201, "INVALID_CONTEXT"), (900, "STREAM_CAPTURE_UNSUPPORTED")]
)
def test_a_card_that_is_not_to_be_waited_for_goes_on(monkeypatch, number, name):
    """No context is made yet, or another thread captures a graph."""
    card = Fails(monkeypatch, waits=raising(of_driver(number, name, "cuCtxSynchronize")))
    with pytest.raises(DeviceError, match="the card is for another process alone") as refused:
        card.raises(of_driver(46, "DEVICE_UNAVAILABLE"))
    assert type(refused.value) is DeviceError and not card.abandoned


LOST = """
import weakref
from pyggml.backends.cuda.runtime import device, driver
from pyggml.errors import DeviceLostError
from numba.cuda.cudadrv import driver as numba_s
from numba.cuda.cudadrv.driver import Context, CudaAPIError, _PendingDeallocs

numba_s._logger = numba_s.make_logger()  # as if there were a driver

class Array:
    pass

def free(handle):
    raise CudaAPIError(700, "Call to cuMemFree results in CUDA_ERROR_ILLEGAL_ADDRESS")

context = object.__new__(Context)
context.deallocations = pending = _PendingDeallocs()
context.memory_manager = type("Manager", (), {"defer_cleanup": pending.disable})
known = type("Card", (), {"primary_context": context})
driver.driver = type("Driver", (), {"get_device": lambda index: known})
device.make_current = print
arrays = [Array() for _ in range(20)]
for array in arrays:
    weakref.finalize(array, pending.add_item, free, 0, 1)
card = object.__new__(device.CudaBackend)
card.name, card.index = "cuda:0", 0
for _ in range(2):
    try:
        with card._working():
            free(0)
    except DeviceLostError as error:
        print(error)
del arrays[:10]
"""


def test_memory_of_a_lost_device_is_left_alone():
    """Also what is freed as the process ends, when nobody catches errors."""
    done = python("-c", LOST)
    assert (done.stderr, done.returncode) == ("", 0)
    says = (
        "cuda:0 has failed: a kernel read or wrote memory that it does not have "
        "(CUDA_ERROR_ILLEGAL_ADDRESS)"
    )
    assert done.stdout.splitlines() == ["0", says] * 2


ENDS = """
import weakref
from types import SimpleNamespace
from pyggml.backends.cuda.runtime import driver
from numba.cuda.cudadrv import driver as numba_s
from numba.cuda.cudadrv.driver import Context, CudaAPIError, _PendingDeallocs

numba_s._logger = numba_s.make_logger()  # as if there were a driver
loaded, current, modules = {f"kernel {i}" for i in range(20)}, [None], []

class Module:
    pass

class Card:
    def __init__(self, index):
        self.primary_context = context = object.__new__(Context)
        context.handle, context.deallocations = index, _PendingDeallocs()
        memory = SimpleNamespace(defer_cleanup=context.deallocations.disable)
        context.memory_manager = memory

    def __enter__(self):
        current[0] = self.primary_context

    def __exit__(self, *_):
        current[0] = None

def unload(kernel):
    if kernel not in loaded:
        raise CudaAPIError(400, "Call to cuLibraryUnload results in CUDA_ERROR_INVALID_HANDLE")
    loaded.remove(kernel)

cards = [Card(0), Card(1)]
driver.cuda = SimpleNamespace(gpus=cards, current_context=lambda: current[0])
driver.driver = SimpleNamespace(get_device=cards.__getitem__)
driver.direct = SimpleNamespace(cuCtxSetCurrent=print)
driver.make_current(0), driver.make_current(1), driver.make_current(0)
for kernel in sorted(loaded):
    for card in cards:
        modules.append(Module())
        pending = card.primary_context.deallocations
        weakref.finalize(modules[-1], pending.add_item, unload, kernel)
"""


def test_a_process_with_two_cards_ends_in_silence():
    """Numba has one handle for a kernel of both, and unloads it for each."""
    done = python("-c", ENDS)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.split() == ["0", "1", "0"]


def test_other_errors_stay_what_they_are(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        Fails(monkeypatch).raises(ZeroDivisionError())


def test_a_card_without_a_context_is_abandoned_in_silence(monkeypatch):
    cards = SimpleNamespace(get_device=lambda index: SimpleNamespace(primary_context=None))
    monkeypatch.setattr(driver, "driver", cards)
    driver.abandon.__wrapped__(0)
