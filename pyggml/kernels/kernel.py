"""The CPU's kernel of an op, declared beside the op: `cpu_kernel(ADD, run)`."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from pyggml.backends.kit import kernels
from pyggml.graph.call import Call
from pyggml.graph.op import Op
from pyggml.graph.tensor import Tensor

Compute = Literal["f32", "bf16", "int8"]


@dataclass(frozen=True, slots=True)
class Site(kernels.NodeSite[np.ndarray]):
    """The memory of one node, as a kernel's `run` gets it; arrays have the node's shapes.

    Scratch is uint8, 64-byte aligned.
    """

    compute: Compute  # how quantised weights are multiplied, see pyggml.kernels.gemm
    shared: np.ndarray | None = None  # scratch that several nodes read, see Kernel.shared
    fills_shared: bool = False  # whether this node is the first of them


Kernel = kernels.DeviceKernel[Site, Call, Compute]
KERNELS: dict[Op, Kernel] = {}


def cpu_kernel(
    op: Op,
    run: Callable[[Site], Call],
    scratch: Callable[[Tensor, Compute], int] = kernels.no_scratch,
    shared: Callable[[Tensor, Compute], tuple[int, str]] = kernels.nothing_shared,
) -> None:
    """Declare how the CPU computes an op. Ops that only look at memory need no kernel."""
    KERNELS[op] = kernels.DeviceKernel(run, scratch=scratch, shared=shared)


# -- how kernels see arrays ---------------------------------------------------------------------


def flat(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *params) with every array as one axis."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src)
        return Call(kernel, *(a.reshape(-1) for a in arrays), *site.scalars)

    return run


def rows(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *saved, *params) with every array as (n_rows, n)."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src, *site.saved)
        return Call(kernel, *(as_rows(a) for a in arrays), *site.scalars)

    return run


def four(kernel: Callable[..., None]) -> Callable[[Site], Call]:
    """Call kernel(out, *src, *params) with every array padded with leading ones to four axes."""

    def run(site: Site) -> Call:
        arrays = (site.out, *site.src)
        return Call(kernel, *(as_four(a) for a in arrays), *site.scalars)

    return run


def as_rows(a: np.ndarray) -> np.ndarray:
    """(..., n) as (n_rows, n), no copy; a scalar as (1, 1)."""
    return a.reshape(prod(a.shape[:-1]), a.shape[-1]) if a.ndim else a.reshape(1, 1)


def as_four(a: np.ndarray) -> np.ndarray:
    """Leading axes of one element until there are four, no copy."""
    return a[(None,) * (4 - a.ndim)]


def onto_first(site: Site, call: Call) -> Call:
    """`call`, which adds to the result, after a copy of the first source into the result, unless it
    lies there."""
    if site.in_place or site.node.is_write:
        return call
    return Call(_after_copy, site.out, site.src[0], call)


def _after_copy(out: np.ndarray, y: np.ndarray, call: Call) -> None:
    np.copyto(out, y)
    call()
