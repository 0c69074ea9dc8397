"""Elementwise kernels work in strips of a fixed length.

The length must not depend on the number of threads: the last few elements of a loop run through
other machine code than its vectors, and may differ in the last bit.
"""

from collections.abc import Callable
from math import gcd, prod

from pyggml.graph.call import Call
from pyggml.graph.tensor import Shape
from pyggml.kernels.kernel import Site

LENGTH = 4096  # floats: 16 KiB, a few µs of work


def strip(shape: Shape) -> int:
    """The length of a strip: it divides the number of elements, and is about LENGTH."""
    return max(gcd(prod(shape), LENGTH), shape[-1] if shape else 1)


def strips(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *params) with every array as (n_strips, n); all have one shape."""

    def run(site: Site) -> Call:
        n = strip(site.out.shape)
        arrays = (site.out, *site.src)
        return Call(kernel, *(a.reshape(-1, n) for a in arrays), *site.scalars)

    return run
