"""Products of a wide matrix: W is unpacked beside the thin factor, and cuBLAS multiplies."""

from __future__ import annotations

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.launch import in_turn
from pyggml.backends.cuda.lora.wide import columns, placed
from pyggml.backends.cuda.products import adding
from pyggml.backends.cuda.unpack import unpacked
from pyggml.call import Call
from pyggml.tensors import Tensor


def _forward_scratch(node: Tensor, compute: Compute) -> int:
    w, x, _ = node.src
    return 2 * w.shape[0] * x.shape[1]


def _forward(site: Site) -> Call:
    """y = X·[W | 0 … B … 0]ᵀ."""
    w, x, b = site.node.src
    (n, k), (m, width), rank = w.shape, x.shape, b.shape[1]
    right = site.scratch[: 2 * n * width].view(np.uint16)
    sizes = (n, width - k, site.node.params["first"], rank)
    forms = (True, width), (True, width)
    packed = site.src[0].view(np.uint8)
    return in_turn(
        unpacked(right, packed, w.dtype, site.stream, k, width - k),
        placed(right[k:], site.src[2], sizes, (width, 1), (rank, 1), site.stream),
        multiply(
            site.stream, (m, n, width), site.src[1], forms[0], right, forms[1], site.out, n, False
        ),
    )


def _back_scratch(node: Tensor, compute: Compute) -> int:
    w, d, _ = node.src[-3:]
    return 2 * d.shape[1] * w.shape[1]


def _back_product(site: Site, accumulate: bool) -> Call:
    """dx (+)= D·[W ; A]."""
    w, d, a = site.node.src[-3:]
    packed, left, thin = site.src[-3:]
    (n, k), (m, width), rank = w.shape, d.shape, a.shape[0]
    right = site.scratch[: 2 * width * k].view(np.uint16)
    sizes = (k, columns(rank), 0, rank)
    return in_turn(
        unpacked(right[: n * k], packed.view(np.uint8), w.dtype, site.stream),
        placed(right[n * k :], thin, sizes, (1, k), (1, k), site.stream),
        multiply(
            site.stream, (m, k, width), left, (True, width), right, (False, k), site.out, k,
            accumulate,
        ),
    )  # fmt: skip


def _back(site: Site) -> Call:
    return _back_product(site, accumulate=False)


def _back_added(site: Site) -> Call:
    return adding(site, _back_product(site, accumulate=True))


FORWARD = Kernel(_forward, scratch=_forward_scratch)
BACK = Kernel(_back, scratch=_back_scratch)
BACK_ADD = Kernel(_back_added, scratch=_back_scratch)
