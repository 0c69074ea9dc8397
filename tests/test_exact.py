"""Arithmetic of kernels: fast where sums may change their order, exact where bytes depend on it."""

import numpy as np

from pyggml.jit import exact, kernel


def test_an_exact_function_is_exact_in_a_kernel_that_is_the_first_to_call_it():
    @exact
    def lost(x, y):
        return (x + y) - x

    @kernel
    def call(numbers):
        return lost(numbers[0], numbers[1])

    assert call(np.array([1e8, 1], np.float32)) == 0
