"""Products of a wide matrix: W is unpacked beside the thin factors, and cuBLAS multiplies.

Forward has B to the right of W, backward A below it, in rows equally far apart. So one matrix
serves both, where W stays unpacked: a run then places the thin factors alone.
"""

from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.ops.lora.wide import columns
from pyggml.backends.cuda.ops.products import adding
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.weights.unpack import Thin, place_thin, unpacked_beside
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Tensor


def lasting_bytes(node: Tensor) -> int:
    """Bytes that W takes where it stays unpacked: with the further columns of all products of its
    x, and the further rows of its own factor."""
    *_, w, x, factor = node.src
    is_forward = "first" in node.params
    rank = factor.shape[1 if is_forward else 0]
    step = x.shape[1] if is_forward else node.params["step"]
    return BF16.block_bytes * (w.shape[0] + columns(rank)) * int(step)


def _lasting(node: Tensor) -> tuple[int, int] | None:
    return (len(node.src) - 3, lasting_bytes(node)) if node.params["unpacked"] else None


def _right_factor(
    site: CudaSite, n_bytes: int, step: int, thin: Any, place: Thin
) -> tuple[Any, Call]:
    """W in bfloat16, rows `step` apart, with a thin factor in its place; what makes both, or where
    W lasts, the factor's place."""
    w = site.node.src[-3]
    kind = w.dtype, site.stream, w.shape[1], step - w.shape[1]
    packed = site.src[-3].view(np.uint8)
    lasting = _lasting(site.node)
    if lasting is None:
        right = site.scratch[:n_bytes].view(np.uint16)
        return right, unpacked_beside(right, packed, *kind, thin, place)
    memory, is_new = site.lasting(*lasting)
    right = memory.view(np.uint16)
    if is_new:
        unpacked_beside(right, packed, *kind, thin, place)()
    return right, place_thin(right, thin, place, site.stream)


def _forward_bytes(node: Tensor) -> int:
    w, x, _ = node.src
    return 2 * w.shape[0] * x.shape[1]


def _forward(site: CudaSite) -> Call:
    """y = X·[W | 0 … B … 0]ᵀ."""
    w, x, b = site.node.src
    (n, k), (m, step), rank = w.shape, x.shape, b.shape[1]
    first, n_columns = site.node.params["first"], site.node.params["columns"]
    place = Thin(n, rank, k, step, n, n_columns, first)
    right, call = _right_factor(site, _forward_bytes(site.node), step, site.src[2], place)
    sizes, form = (m, n, k + n_columns), (True, step)
    right = right[: n * step]
    product = multiply(site.stream, sizes, site.src[1], form, right, form, site.out, n, False)
    return in_turn(call, product)


def _back_bytes(node: Tensor) -> int:
    w, _, a = node.src[-3:]
    return 2 * (w.shape[0] + columns(a.shape[0])) * int(node.params["step"])


def _back_product(site: CudaSite, accumulate: bool) -> Call:
    """dx (+)= D·[W ; A]."""
    w, d, a = site.node.src[-3:]
    (n, k), (m, d_step), rank = w.shape, d.shape, a.shape[0]
    step, left, thin = site.node.params["step"], *site.src[-2:]
    place = Thin(rank, k, n * step, step, columns(rank), k)
    right, call = _right_factor(site, _back_bytes(site.node), step, thin, place)
    sizes, of_d, of_w = (m, k, n + columns(rank)), (True, d_step), (False, step)
    product = multiply(site.stream, sizes, left, of_d, right, of_w, site.out, k, accumulate)
    return in_turn(call, product)


def _back(site: CudaSite) -> Call:
    return _back_product(site, accumulate=False)


def _back_added(site: CudaSite) -> Call:
    return adding(site, _back_product(site, accumulate=True))


def _forward_scratch(node: Tensor, compute: Compute) -> int:
    return 0 if node.params["unpacked"] else _forward_bytes(node)


def _back_scratch(node: Tensor, compute: Compute) -> int:
    return 0 if node.params["unpacked"] else _back_bytes(node)


FORWARD = CudaKernel(_forward, scratch=_forward_scratch, lasting=_lasting)
BACK = CudaKernel(_back, scratch=_back_scratch, lasting=_lasting)
BACK_ADD = CudaKernel(_back_added, scratch=_back_scratch, lasting=_lasting)
