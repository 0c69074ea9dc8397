"""A card on which errors are raised, and errors as the driver, packages and Numba raise them."""

from types import SimpleNamespace

from pyggml.backends.cuda.runtime import device, driver, failures


class Fails:
    """A card on which errors are raised; `memory` says that 5 of 80 bytes are free, `waits` what
    happens when the card is waited for."""

    def __init__(self, monkeypatch, memory=lambda: (5, 80), waits=lambda: None):
        context = SimpleNamespace(get_memory_info=memory)
        monkeypatch.setattr(device, "cuda", SimpleNamespace(current_context=lambda: context))
        monkeypatch.setattr(device, "make_current", lambda index: None)
        self.abandoned = []
        monkeypatch.setattr(device, "abandon", self.abandoned.append)
        monkeypatch.setattr(failures, "driver", SimpleNamespace(cuCtxSynchronize=waits))
        self.backend = object.__new__(device.CudaBackend)
        self.backend.name, self.backend.index = "cuda:0", 0

    def raises(self, error, n_bytes=0):
        with self.backend._working(n_bytes):
            raise error


def of_package(name, text):
    return type("CUDAError", (Exception,), {"__module__": f"{name}.core"})(text)


def of_driver(number, name, call="cuStreamSynchronize"):
    """As Numba raises what the driver's own interface refuses."""
    return driver.CudaAPIError(number, f"Call to {call} results in CUDA_ERROR_{name}")


def raising(error):
    def fails(*_):
        raise error

    return fails
