"""Functions without branches as LLVM's code, which this test has run by the CPU."""

import numpy as np
import pytest
from extras import reason

pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))

import numba
from numba import extending, types

from pyggml.backends.cuda.code import straight as module


def numbers(a, b, x):
    """Of every operation, as NumPy computes them."""
    low, high = a & np.uint32(255), a >> np.uint32(24)
    shifted = np.int32(b) >> np.int32(3)
    total = x * np.float32(shifted) + (-x)
    total -= np.float32(np.int32(~b))
    least = low if low < high else high
    last = np.int32(7) if shifted == np.int32(-1) else -shifted
    pair = ((a * b) ^ least, a - b)
    return total, pair[1], 3 * np.int64(least) + 1, (a + b) << np.uint32(1) | pair[0], last


def loop(a):
    for _ in range(3):
        a += a
    return a


def on_cpu(function, returns, monkeypatch):
    monkeypatch.setattr(module, "intrinsic", extending.intrinsic)
    run = module.straight(function, returns)
    n = function.__code__.co_argcount
    call = (lambda a, b, x: run(a, b, x)) if n == 3 else (lambda a: run(a))
    return numba.njit(call)


def test_a_straight_function_computes_what_numpy_does(monkeypatch):
    returns = types.Tuple([types.float32, types.uint32, types.int64, types.uint32, types.int32])
    run = on_cpu(numbers, returns, monkeypatch)
    for a, b in np.random.default_rng(1).integers(0, 1 << 32, (99, 2), np.uint32):
        for arguments in ((a, b, np.float32(0.3)), (b >> 8, np.uint32(2**32 - 1), np.float32(-2))):
            with np.errstate(over="ignore"):
                wanted = numbers(*arguments)
            assert run(*arguments) == wanted


def test_a_branch_is_named(monkeypatch):
    run = on_cpu(loop, types.uint32, monkeypatch)
    with pytest.raises(Exception, match="loop is not straight: for _ in range"):
        run(np.uint32(1))
