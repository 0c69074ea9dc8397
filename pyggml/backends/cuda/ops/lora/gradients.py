"""Gradients of LoRA's factors: sums over all rows of a wide matrix."""

import numpy as np

from pyggml.backends.cuda.gemm.cublas import multiply
from pyggml.backends.cuda.ops.lora.operands import formula_of, is_ready, rounded_formula, types_of
from pyggml.backends.cuda.ops.products import adding
from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.graph.call import Call
from pyggml.graph.op import Memory
from pyggml.graph.tensor import Tensor


def _adds(node: Tensor) -> bool:
    """Whether the first source is what the gradient is added to."""
    assert node.op is not None
    return node.op.memory is Memory.INPLACE_FIRST


def _x_bytes(node: Tensor) -> int:
    """Of x in bfloat16, if it is not given so."""
    _, *operands = node.src[_adds(node) :]
    return 0 if is_ready(operands, node) else 2 * operands[0].n_elements


def _scratch_of_a(node: Tensor, compute: Compute) -> int:
    return _x_bytes(node)


def _shared_of_a(node: Tensor, compute: Compute) -> tuple[int, str]:
    """x in bfloat16."""
    return (0 if formula_of(node) else _x_bytes(node)), "bf16"


def _of_a(site: CudaSite, accumulate: bool = False) -> Call:
    """dA = vᵀ·x, v the further columns of D."""
    d, *operands = site.node.src[accumulate:]
    packed, *arrays = site.src[accumulate:]
    (rank, k), (m, step), x, calls = site.node.shape, d.shape, arrays[0], []
    if not is_ready(operands, site.node):
        memory = site.scratch if site.shared is None else site.shared
        x = memory[: 2 * m * k].view(np.uint16)
        if site.shared is None or site.fills_shared:
            kind = formula_of(site.node), types_of(operands)
            calls.append(rounded_formula(x, arrays, *kind, site.stream))
    v = packed[site.node.params["first"] :]
    of_v, of_x = (False, step), (False, k)
    product = multiply(site.stream, (rank, k, m), v, of_v, x, of_x, site.out, k, accumulate)
    return in_turn(*calls, product)


def _of_b(site: CudaSite, accumulate: bool = False) -> Call:
    """dB = dyᵀ·u, dy columns of D."""
    (n, rank), (of_columns, d) = site.node.shape, site.node.src[-2:]
    (m, step), n_columns, (columns, dy) = d.shape, of_columns.shape[1], site.src[-2:]
    u = columns[site.node.params["first"] :]
    dy = dy[site.node.params.get("column", 0) :]
    of_d, of_u = (False, step), (False, n_columns)
    sizes = (n, rank, m)
    return multiply(site.stream, sizes, dy, of_d, u, of_u, site.out, rank, accumulate)


def _of_a_added(site: CudaSite) -> Call:
    return adding(site, _of_a(site, accumulate=True))


OF_A = CudaKernel(_of_a, scratch=_scratch_of_a, shared=_shared_of_a)
OF_B = CudaKernel(_of_b)
OF_A_ADD = CudaKernel(_of_a_added, scratch=_scratch_of_a, shared=_shared_of_a)
OF_B_ADD = CudaKernel(lambda site: adding(site, _of_b(site, accumulate=True)))
