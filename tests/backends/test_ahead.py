"""Kernels compiled by processes of their own, without a card."""

from types import SimpleNamespace

import numpy as np
import pytest
from extras import needs_compiler, reason

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime import ahead
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.backends.cuda.runtime.simulator import HAS_PTX


def scaling(by):
    @kernel
    def scale(y):
        y[0] *= by

    return scale


@pytest.mark.skipif(not HAS_PTX, reason="the simulator compiles nothing")
def test_what_is_launched_first_is_compiled_by_processes_and_found(tmp_path, monkeypatch):
    from numba.cuda import dispatcher

    from pyggml.backends.cuda.runtime import cubins

    needs_compiler()
    card = SimpleNamespace(compute_capability=(9, 0))
    for module in (dispatcher, cubins):
        monkeypatch.setattr(module, "get_current_device", lambda: card)
    monkeypatch.setattr(cubins, "_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr(ahead, "n_cores", lambda: 2)
    compiled = []
    monkeypatch.setattr(dispatcher, "_Kernel", counting(dispatcher._Kernel, compiled))

    def wrong(y):
        y.no_such_thing()

    y = np.zeros(1, np.float32)
    kernels = [scaling(2.0), scaling(3.0), kernel(wrong)]
    calls = [launch(k, 1, 1, 0, y) for k in kernels for _ in range(2)]
    ahead.compile_missing(calls)
    assert not compiled, "this process compiles none"
    paths = [k._cache.path((k.typeof_pyval(y),)) for k in kernels]
    for path in paths[:2]:
        name, code = cubins.read(path)
        assert "scale" in name and code.startswith(b"\x7fELF")
    assert not paths[2].exists()
    (left,) = ahead._missing(calls)
    assert left.kernel is kernels[2], "it is compiled, and refused, where it is launched"


def counting(make, made):
    def one(*arguments, **options):
        made.append(arguments)
        return make(*arguments, **options)

    return one
