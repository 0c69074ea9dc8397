"""Tests that need a card, or the simulator: NUMBA_ENABLE_CUDASIM=1 pytest tests/backends/card."""

import os
import sys

import pytest

from pyggml.backends.cuda import cards, open_cuda
from pyggml.errors import DeviceError

try:
    FOUND = cards()
except DeviceError:
    FOUND = []

# The simulator waits for the threads of a block by asking them: they must get the interpreter soon.
sys.setswitchinterval(5e-5)

if FOUND:
    from pyggml.backends.cuda.runtime.toolkit import SIMULATED

    if SIMULATED:
        from numba.cuda.simulator.kernelapi import FakeCUDAShared
        from warps import shared_array

        FakeCUDAShared.array = shared_array

collect_ignore_glob = [] if FOUND else ["test_*.py"]


@pytest.fixture(scope="module", autouse=True)
def compiles_alone():
    """Workers of a session are processes enough: none is forked to compile in others, of which one
    that hangs is waited for two minutes."""
    from pyggml.backends.cuda.runtime import ahead

    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ:
            patch.setattr(ahead, "n_cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def card():
    """The first card, with products in float32."""
    return open_cuda(FOUND[0].index, "f32")
