"""Products: mul_mat, out_prod, and the two that add to what is there.

All four are one product, C = A · Bᵀ with steps (pyggml.backends.cuda.gemm): mul_mat(w, x) has A = x
and B = w, out_prod(a, b) has A = bᵀ and B = aᵀ.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pyggml.backends.cuda.gemm import CudaOperands, CudaProblem, Factor, path_of
from pyggml.backends.cuda.ops.layout.copies import copy_of
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.kit.kernels import nothing_shared
from pyggml.backends.kit.products import gaps_in, sides_of
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor
from pyggml.ops import add, mul_mat, out_prod, scale
from pyggml.quants import QUANTS

_COPY = 16  # bytes that a thread copies to shared memory at once


def problem_of(node: Tensor, compute: Compute) -> CudaProblem:
    """The product that a node is."""
    aligned = node.src[-2].offset % _COPY == 0  # owners begin at multiples of 64
    return _flat(CudaProblem(*sides_of(node), compute, aligned))


def _flat(p: CudaProblem) -> CudaProblem:
    """The product with batches as further rows of A, where they share B and A's rows allow it."""
    outer, inner = p.batches
    goes_on = p.a.k == 1 and p.a.row == p.k
    goes_on &= inner == 1 or p.a.batches[1] == p.m * p.k
    goes_on &= outer == 1 or p.a.batches[0] == inner * p.m * p.k
    if p.b.repeats != p.batches or not goes_on:
        return p
    a, b = Factor(p.k, 1, dtype=p.a.dtype), replace(p.b, batches=(0, 0), repeats=(1, 1))
    return replace(p, m=outer * inner * p.m, batches=(1, 1), a=a, b=b)


def _lacks(node: Tensor) -> str | None:
    b = node.src[-2]
    if b.dtype.name not in QUANTS:
        return f"{b.dtype} is no type of weights"
    if b.dtype is F32:
        return None
    return gaps_in(b) or (f"{b!r} has batches" if len(b.shape) > 2 else None)


def _scratch(node: Tensor, compute: Compute) -> int:
    p = problem_of(node, compute)
    return path_of(p).scratch(p)


def _packing_of(node: Tensor, compute: Compute) -> tuple[int, str]:
    """A in bfloat16."""
    p = problem_of(node, compute)
    shares = p.rounds and p.a.dtype is F32 and path_of(p).shares
    return (2 * p.m * p.k, "bf16") if shares else (0, "")


def _product(site: CudaSite, accumulate: bool = False, factor: float = 1.0) -> Call:
    p = problem_of(site.node, site.compute)
    b, a = site.src[-2:]
    o = CudaOperands(
        site.out, a, b, site.scratch, accumulate, site.stream, site.shared,
        site.shared is not None and not site.fills_shared, factor,
    )  # fmt: skip
    return path_of(p).bind(p, o)


def adding(site: CudaSite, product: Call) -> Call:
    """A product that adds to what its result holds: the first source, copied there before it
    unless it lies there."""
    if site.in_place or site.node.is_write:
        return product
    first = site.node.src[0]
    return in_turn(copy_of(site.out, site.src[0], first, site.stream), product)


# -- fusions ------------------------------------------------------------------------------------


def _scales(m: Match, compute: Compute) -> bool:
    """s · A · Bᵀ, as LoRA has it with s = α / r."""
    p = problem_of(m.product, compute)
    plain = not m.is_read(m.product) and not m.scaled.params["b"]
    return plain and p.b.dtype is F32 and path_of(p).scales


def _bind_scaled(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    product, scaled = sites
    return _product(replace(product, out=scaled.out), factor=scaled.node.params["s"])


def _scaled_product(rng: np.random.Generator) -> Graph:
    y = scale(mul_mat(drawn(rng, 4, 6), drawn(rng, 5, 6)), 2.5)
    return Graph.of(add(y, drawn(rng, 5, 4)))


def _scaled_gradient(rng: np.random.Generator) -> Graph:
    dw = scale(out_prod(drawn(rng, 3, 7), drawn(rng, 3, 5)), 2.5)
    return Graph.of(add(dw, drawn(rng, 5, 7)))


def _bind_sum(site: CudaSite) -> Call:
    return adding(site, _product(site, accumulate=True))


for _name, _shared in (("mul_mat", _packing_of), ("out_prod", nothing_shared)):
    declare(_name, _product, lacks=_lacks, scratch=_scratch, shared=_shared)
    declare(f"{_name}_add", _bind_sum, lacks=_lacks, scratch=_scratch, shared=_shared)
PRODUCT_SCALED = Fusion(
    near("product = mul_mat(b, a); scaled = scale(product)"),
    _scales, _bind_scaled, _scaled_product, scratch=_scratch, shared=_packing_of,
)  # fmt: skip
OUT_PROD_SCALED = Fusion(
    near("product = out_prod(b, a); scaled = scale(product)"),
    _scales, _bind_scaled, _scaled_gradient, scratch=_scratch,
)  # fmt: skip
