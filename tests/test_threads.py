"""`pyggml.threads`: what is set is used, within what the process was started with."""

import numba
import pytest

from pyggml import threads
from pyggml.jit import JIT

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def as_before():
    before = threads.get()
    yield
    threads.set(before)


@pytest.mark.parametrize(
    ("wanted", "used"), [(1, 1), (0, threads.most()), (10_000, threads.most())]
)
def test_what_is_set_is_used(wanted, used):
    threads.set(min(2, threads.most()) if wanted == 1 else 1)
    threads.set(wanted)
    assert threads.get() == used


@pytest.mark.skipif(not JIT, reason="interpreted code runs on one thread")
@pytest.mark.parametrize("layer", ["omp", "tbb", "workqueue"])
def test_only_the_slow_layer_is_warned_of(monkeypatch, recwarn, layer):
    monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    threads.set(1)
    assert [str(w.message)[:30] for w in recwarn] == (
        ["Numba found neither OpenMP nor"] if layer == "workqueue" else []
    )
