"""Tests that need a card, or the simulator: NUMBA_ENABLE_CUDASIM=1 pytest tests/backends/card."""

import pytest

from pyggml.backends.cuda import cards, open_cuda
from pyggml.errors import DeviceError

try:
    FOUND = cards()
except DeviceError:
    FOUND = []

collect_ignore_glob = [] if FOUND else ["test_*.py"]


@pytest.fixture(scope="session")
def card():
    """The first card, with products in float32."""
    return open_cuda(FOUND[0].index, "f32")
