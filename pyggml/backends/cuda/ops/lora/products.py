"""Products of a wide matrix: W is unpacked beside the thin factor, and cuBLAS multiplies."""

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.ops.lora.wide import columns
from pyggml.backends.cuda.ops.products import adding
from pyggml.backends.cuda.runtime.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.weights.unpack import Thin, unpacked_beside
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


def _forward_scratch(node: Tensor, compute: Compute) -> int:
    w, x, _ = node.src
    return 2 * w.shape[0] * x.shape[1]


def _forward(site: Site) -> Call:
    """y = X·[W | 0 … B … 0]ᵀ."""
    w, x, b = site.node.src
    (n, k), (m, step), rank = w.shape, x.shape, b.shape[1]
    first, n_columns = site.node.params["first"], site.node.params["columns"]
    right = site.scratch[: 2 * n * step].view(np.uint16)
    place = Thin(n, rank, k, step, n, n_columns, first)
    packed, form = site.src[0].view(np.uint8), (True, step)
    sizes = m, n, k + n_columns
    return in_turn(
        unpacked_beside(right, packed, w.dtype, site.stream, k, step - k, site.src[2], place),
        multiply(site.stream, sizes, site.src[1], form, right, form, site.out, n, False),
    )


def _back_scratch(node: Tensor, compute: Compute) -> int:
    w, _, a = node.src[-3:]
    return 2 * (w.shape[0] + columns(a.shape[0])) * w.shape[1]


def _back_product(site: Site, accumulate: bool) -> Call:
    """dx (+)= D·[W ; A]."""
    w, d, a = site.node.src[-3:]
    packed, left, thin = site.src[-3:]
    (n, k), (m, step), rank = w.shape, d.shape, a.shape[0]
    n_rows = n + columns(rank)
    right = site.scratch[: 2 * n_rows * k].view(np.uint16)
    place, packed = Thin(rank, k, n * k, k, columns(rank), k), packed.view(np.uint8)
    sizes, of_d, of_w = (m, k, n_rows), (True, step), (False, k)
    return in_turn(
        unpacked_beside(right, packed, w.dtype, site.stream, 1, 0, thin, place),
        multiply(site.stream, sizes, left, of_d, right, of_w, site.out, k, accumulate),
    )


def _back(site: Site) -> Call:
    return _back_product(site, accumulate=False)


def _back_added(site: Site) -> Call:
    return adding(site, _back_product(site, accumulate=True))


FORWARD = Kernel(_forward, scratch=_forward_scratch)
BACK = Kernel(_back, scratch=_back_scratch)
BACK_ADD = Kernel(_back_added, scratch=_back_scratch)
