"""The WebGPU device of this machine, which may be software Vulkan; shared: shaders compile once.

Also what a card that is not there must do without.
"""

import os

import pytest
from extras import need

from pyggml.errors import DeviceError


def opened(limit=None, features=None):
    """The device, or a skipped test that says what is missing."""
    os.environ.setdefault("XDG_RUNTIME_DIR", "/tmp")  # else Mesa complains
    try:
        wgpu = need("wgpu")
        from pyggml.backends.webgpu.runtime.device import WebGPUBackend

        return WebGPUBackend(wgpu.gpu.request_adapter_sync(), limit, features)
    except (RuntimeError, DeviceError) as error:
        pytest.skip(f"no WebGPU here: {error}")


@pytest.fixture
def without_cublas(monkeypatch):
    """For cards that are not there: where cuBLAS is installed, it asks for one."""
    from pyggml.backends.cuda.gemm import cublas

    monkeypatch.setattr(cublas, "_library", lambda: None)


@pytest.fixture(scope="session")
def gpu():
    return opened()


@pytest.fixture(scope="session")
def narrow():
    """A device whose bindings hold 16 KB: most of what the tests make is taken in parts."""
    return opened(16 << 10)


@pytest.fixture(scope="session")
def plain():
    """A device whose optional features are not used."""
    return opened(features=())


@pytest.fixture
def own_gpu():
    """One that the test may destroy."""
    return opened()
