"""Gradients of LoRA's factors: sums over all rows of a wide matrix."""

from __future__ import annotations

from functools import partial

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.ops.products import declare_summed
from pyggml.backends.cuda.rewrites.lora.operands import (
    formula_of,
    is_ready,
    rounded_formula,
    types_of,
)
from pyggml.backends.cuda.runtime.kernel import Compute, Kernel, Site
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor


def _x_bytes(node: Tensor) -> int:
    """Of x in bfloat16, if it is not given so."""
    return 0 if is_ready(node.src[1:], node) else 2 * node.src[1].n_elements


def _scratch_of_a(node: Tensor, compute: Compute) -> int:
    return _x_bytes(node)


def _shared_of_a(node: Tensor, compute: Compute) -> tuple[int, str]:
    """x in bfloat16."""
    return (0 if formula_of(node) else _x_bytes(node)), "bf16"


def _of_a(site: Site, accumulate: bool = False) -> Call:
    """dA = vᵀ·x, v the further columns of D."""
    (rank, k), (m, step) = site.node.shape, site.node.src[0].shape
    operands, x, calls = site.node.src[1:], site.src[1], []
    if not is_ready(operands, site.node):
        memory = site.scratch if site.shared is None else site.shared
        x = memory[: 2 * m * k].view(np.uint16)
        if site.shared is None or site.fills_shared:
            kind = formula_of(site.node), types_of(operands)
            calls.append(rounded_formula(x, site.src[1:], *kind, site.stream))
    v = site.src[0][site.node.params["first"] :]
    of_v, of_x = (False, step), (False, k)
    product = multiply(site.stream, (rank, k, m), v, of_v, x, of_x, site.out, k, accumulate)
    return in_turn(*calls, product)


def _of_b(site: Site, accumulate: bool = False) -> Call:
    """dB = dyᵀ·u, dy the first columns of D."""
    (n, rank), (m, step) = site.node.shape, site.node.src[1].shape
    n_columns, u = site.node.src[0].shape[1], site.src[0][site.node.params["first"] :]
    of_d, of_u = (False, step), (False, n_columns)
    sizes = (n, rank, m)
    return multiply(site.stream, sizes, site.src[1], of_d, u, of_u, site.out, rank, accumulate)


OF_A = Kernel(_of_a, scratch=_scratch_of_a, shared=_shared_of_a)
OF_B = Kernel(_of_b)
declare_summed("gradient_of_a", partial(_of_a, accumulate=True))
declare_summed("gradient_of_b", partial(_of_b, accumulate=True))
