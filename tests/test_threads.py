"""`pyggml.threads`: what is set is used, within what the process was started with."""

import pytest

from pyggml import threads

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def as_before():
    before = threads.get()
    yield
    threads.set(before)


@pytest.mark.parametrize(("wanted", "used"), [(1, 1), (0, threads.most())])
def test_what_is_set_is_used(wanted, used):
    threads.set(min(2, threads.most()) if wanted == 1 else 1)
    threads.set(wanted)
    assert threads.get() == used


def test_more_than_there_are_warn():
    threads.set(1)
    with pytest.warns(RuntimeWarning, match="^10000 threads were asked for: .* all that this proc"):
        threads.set(10_000)
    assert threads.get() == threads.most()


def test_fewer_than_none_are_refused():
    before = threads.get()
    with pytest.raises(ValueError, match="^-1 threads, wanted 1 to "):
        threads.set(-1)
    assert threads.get() == before
