"""What kernels call is compiled for kernels alone, until Python calls it too."""

import numba
import numpy as np
import pytest
from processes import printed

from pyggml.jit import JIT
from pyggml.jit.decorators import OPTIONS

pytestmark = pytest.mark.skipif(not JIT, reason="without the JIT all is plain Python")


def declare(function):
    """A kernel that is not kept, as one of the package's."""
    function.__module__ = "pyggml.of_a_test"
    return numba.njit(**OPTIONS | {"cache": False})(function)


def has_wrapper(overload):
    return overload.fndesc.llvm_cpython_wrapper_name in overload.library.get_llvm_str()


@pytest.mark.quick
def test_python_may_call_what_a_kernel_has_called():
    @declare
    def one_more(x):
        return x + 1

    @declare
    def twice(x):
        return 2 * one_more(x)

    assert twice(2.0) == 6
    (part,), (kernel,) = one_more.overloads.values(), twice.overloads.values()
    assert has_wrapper(kernel) and not has_wrapper(part)
    assert one_more(2.0) == 3 and has_wrapper(*one_more.overloads.values())
    assert declare(lambda x: one_more(x) / 2)(2.0) == 1.5 and twice(3.0) == 8


def test_a_part_is_compiled_once_for_all_constants():
    @declare
    def add(x, y):
        return x + y

    assert declare(lambda x: add(x, 1) + add(x, 2) + add(1, x))(3) == 13
    assert len(add.overloads) == 1


def has_vectors(module):
    return " x float>" in str(module)


@pytest.mark.parametrize("by_python", [False, True])
def test_what_a_kernel_calls_is_optimised_there_alone(by_python):
    """So the kernel has the same code whether or not Python called that before."""

    @declare
    def squares(n):
        total = np.float32(0)
        for i in range(n):
            total += np.float32(i) * np.float32(i)
        return total

    if by_python:
        assert squares(4) == 14
    kernel = declare(lambda n: 2 * squares(n))
    assert kernel(4) == 28
    (part,), (whole,) = squares.overloads.values(), kernel.overloads.values()
    assert not has_vectors(part.library._get_module_for_linking())
    assert has_vectors(part.library.get_llvm_str()) == by_python
    assert has_vectors(whole.library.get_llvm_str())


# Calls a kernel of the package from Python, or from another kernel; prints its result, and
# whether it was compiled, not in the cache.
CALLS = """
import sys
import numba
from numba.core import event
from pyggml.jit.decorators import OPTIONS
from pyggml.jit.simd import key_of
compiled = []
class Listener(event.Listener):
    def on_start(self, e): compiled.append(e.data["dispatcher"])
    def on_end(self, e): pass
event.register("numba:compile", Listener())
result = key_of(1.0) if {} else numba.njit(lambda x: key_of(x))(1.0)
print(result, key_of in compiled)
"""


def test_a_part_is_kept_apart_from_the_kernel_that_python_calls(tmp_path):
    found = [
        printed(CALLS.format(by_python), NUMBA_CACHE_DIR=str(tmp_path))
        for by_python in (False, True, False, True)
    ]
    assert [line.split()[1] for line in found] == ["True", "True", "False", "False"]
    assert len({line.split()[0] for line in found}) == 1
