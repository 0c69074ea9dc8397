"""What a driver or a card can lack, each one sentence: fakes stand for what is not there."""

import re
from types import SimpleNamespace

import pytest
from extras import reason
from processes import python

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from failing_card import raising

from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.runtime import driver
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.errors import DeviceError
from pyggml.extras import how_to_install

CARDS = [("NVIDIA A100", (8, 0)), ("Tesla T4", (7, 5)), ("NVIDIA H100", (9, 0))]


@pytest.fixture
def machine(monkeypatch):
    """Cards of these names and capabilities, and the versions of driver and compiler."""

    def make(found=CARDS, runs=(13, 0), made_for=(12, 9)):
        def card(index):
            name, capability = found[index]
            return SimpleNamespace(name=name, compute_capability=capability, id=index)

        fake = SimpleNamespace(
            get_device_count=lambda: len(found), get_device=card, cuDeviceTotalMem=lambda i: 80
        )
        monkeypatch.setattr(driver, "driver", fake)
        monkeypatch.setattr(driver, "versions", lambda: (runs, made_for))

    return make


def refused(sentence, index=None):
    with pytest.raises(DeviceError, match=re.escape(sentence)) as error:
        open_cuda(index)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_cards_that_can_be_used(machine):
    machine()
    assert [(c.index, c.name) for c in cards()] == [(0, "NVIDIA A100"), (2, "NVIDIA H100")]


def test_a_driver_for_cuda_11(machine):
    machine(runs=(11, 8))
    refused(
        "no CUDA device: the driver runs CUDA 11.8, wanted a driver for 12.9, the version of "
        "numba-cuda's compiler"
    )


def test_old_cards(machine):
    machine([("Tesla T4", (7, 5)), ("GTX 1080", (6, 1))])
    refused(
        "no CUDA device: found Tesla T4 (7.5), GTX 1080 (6.1), wanted one of compute capability "
        "8.0 or later"
    )
    machine([])
    refused("no CUDA device: found no card, wanted one of compute capability 8.0 or later")


@pytest.mark.parametrize("index", [1, 3])
def test_a_number_that_no_usable_card_has(machine, index):
    machine()
    names = "cuda:0 (NVIDIA A100), cuda:2 (NVIDIA H100)"
    refused(f"cuda:{index}: no such device, found {names}", index)


def test_a_card_of_another_compute_capability(machine, monkeypatch):
    """Kernels are compiled, and shared memory is counted, for the first."""
    from pyggml.backends.cuda.runtime import device, opening

    machine([*CARDS, CARDS[2]])
    monkeypatch.setattr(device, "CudaBackend", lambda index, compute: index)
    monkeypatch.setattr(opening, "_OPENED", [])
    assert [open_cuda(2), open_cuda(3), open_cuda(2)] == [2, 3, 2]
    refused(
        "cuda:0 (NVIDIA A100, compute capability 8.0): this process uses cuda:2 (NVIDIA H100, "
        "compute capability 9.0), wanted cards of one compute capability",
        0,
    )


def test_no_driver(machine, monkeypatch):
    machine()

    def none():
        raise driver.CudaSupportError("Error at driver init: \nlibcuda cannot be found. See above.")

    monkeypatch.setattr(driver.driver, "get_device_count", none)
    refused("no CUDA device: libcuda cannot be found, wanted NVIDIA's driver")


@pytest.mark.parametrize(
    "name, says",
    [
        ("NO_DEVICE", "the driver finds no card, wanted one that CUDA_VISIBLE_DEVICES does not"),
        (
            "SYSTEM_DRIVER_MISMATCH",
            "the driver in the kernel and libcuda are of different versions",
        ),
        ("UNKNOWN", "Call to cuInit results in CUDA_ERROR_UNKNOWN"),
    ],
)
def test_a_driver_that_does_not_begin(machine, monkeypatch, name, says):
    """As Numba puts it."""
    machine()
    error = f"Error at driver init: Call to cuInit results in CUDA_ERROR_{name} (CUresult.{name})"
    monkeypatch.setattr(driver.driver, "get_device_count", raising(driver.CudaSupportError(error)))
    assert "wanted NVIDIA's driver" not in refused(f"no CUDA device: {says}")


def test_a_compiler_that_is_missing(machine, monkeypatch):
    """As cuda-pathfinder puts it: versions are the compiler's, too."""
    machine()
    missing = type("DynamicLibNotFoundError", (RuntimeError,), {"__module__": "cuda.pathfinder"})
    fails = raising(missing('Failure finding "libnvrtc.so.12": No such file: libnvrtc.so.12\n'))
    monkeypatch.setattr(driver, "versions", fails)
    refused('no CUDA device: Failure finding "libnvrtc.so.12", wanted pip install')


def test_without_numba_cuda_the_extra_is_named():
    code = "import sys; sys.modules['numba.cuda'] = None; from pyggml.runtime import backends_of"
    done = python("-c", f"{code}; backends_of('cuda')")
    install = how_to_install("cuda")
    wanted = f"no CUDA device: the package numba.cuda is missing, wanted {install}"
    assert done.stderr.rstrip().endswith(wanted)


def test_kernels_that_may_ask_for_no_more_memory_do_not(monkeypatch):
    from pyggml.backends.cuda.code import jit
    from pyggml.backends.cuda.runtime import early

    assert not HAS_PTX or early.least_shared() > 0
    monkeypatch.setattr(jit, "_store", lambda: None)
    assert early.least_shared() == 0


KIB = 1 << 10


@pytest.mark.parametrize(
    "capability, whole, block, wanted",
    [  # of a multiprocessor and of a block, as CUDA's programming guide has them
        ((8, 0), 164, 163, 0),
        ((8, 9), 100, 99, 0),
        ((9, 0), 228, 227, 228 * KIB // 3),
        ((10, 0), 228, 227, 228 * KIB // 3),
        ((12, 0), 100, 99, 100 * KIB // 3),
    ],
    ids=str,
)
def test_a_multiprocessor_has_room_for_two_blocks_that_begin_early(
    monkeypatch, capability, whole, block, wanted
):
    """And for no third one; the driver has a KiB of each."""
    from pyggml.backends.cuda.code import jit
    from pyggml.backends.cuda.runtime import early

    card = SimpleNamespace(
        compute_capability=capability,
        MAX_SHARED_MEMORY_PER_MULTIPROCESSOR=whole * KIB,
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=block * KIB,
    )
    monkeypatch.setattr(jit, "_store", lambda: "a store")
    monkeypatch.setattr(driver.cuda, "get_current_device", lambda: card)
    found = early.least_shared()
    assert found == wanted <= jit.most_shared() == block * KIB
    assert not found or 2 * (found + KIB) <= whole * KIB < 3 * (found + KIB)
    monkeypatch.setattr(early, "versions", lambda: ((12, 3), (12, 9)))
    assert early.knows_early() == (capability >= (9, 0))
    monkeypatch.setattr(early, "versions", lambda: ((12, 2), (12, 9)))
    assert not early.knows_early(), "edges of a graph have such ports since CUDA 12.3"
