"""Products of few rows with what stands around them in generation: norm, gate, residual.

Few rows wait for launches and for weights: so the products of q, k and v are one launch, gate, up
and swiglu another, and each makes the norm before it again in all its blocks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm import few_rows, packed_tiles, path_of
from pyggml.backends.cuda.gemm.few_rows import FEW_ROWS, FewRowsProduct, FusedNorm
from pyggml.backends.cuda.gemm.packed_tiles import PACKED_TILES
from pyggml.backends.cuda.ops.products import problem_of
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite, is_of
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor
from pyggml.ops import add, mul_mat, rms_norm_mul, scale, swiglu
from pyggml.ops.layout.cpy import packed_leaf


def _are_few(products: Sequence[Tensor], compute: Compute) -> bool:
    """Whether products of one A of few rows can be parts of a launch."""
    problems, a = [problem_of(t, compute) for t in products], products[0].src[1]
    places = {(t.src[1].root, t.src[1].offset) for t in products}
    paths = {path_of(p).name for p in problems}
    are_alike = places == {(a.root, a.offset)} and all(p.a == problems[0].a for p in problems)
    return are_alike and paths in ({FEW_ROWS.name}, {PACKED_TILES.name})


def _fits(products: Sequence[Tensor], compute: Compute, is_gated: bool, has_norm: bool) -> bool:
    """Whether a block's shared memory is enough, of tiles; of fewer rows it always is."""
    problems = [problem_of(t, compute) for t in products]
    if path_of(problems[0]) is FEW_ROWS:
        return True
    matrices = tuple((p.b.dtype, p.n) for p in problems[: 1 if is_gated else None])
    return packed_tiles.serves(matrices, problems[0].m, problems[0].k, is_gated, has_norm)


def reads_norm(product: Tensor, norm: Tensor) -> bool:
    """Whether the norm's result is the A of a product, row for row."""
    a = product.src[1]
    same = a.root is norm and a.n_elements == norm.n_elements
    return same and a.shape[-1] == norm.shape[-1]


def _follow_norm(m: Match, compute: Compute) -> bool:
    """Products of one normalised A: of queries, keys and values, say."""
    products = [t for t in m.nodes if is_of(t, "mul_mat")]
    are_few = reads_norm(products[0], m.norm) and _are_few(products, compute)
    return are_few and _fits(products, compute, is_of(m.nodes[-1], "swiglu"), has_norm=True)


def _are_gated(m: Match, compute: Compute) -> bool:
    """silu(A · gateᵀ) · (A · upᵀ) of a normalised A."""
    alike = m.w_gate.dtype is m.w_up.dtype and m.w_gate.shape == m.w_up.shape
    return alike and not m.is_read(m.gate, m.up) and _follow_norm(m, compute)


def _adds(m: Match, compute: Compute) -> bool:
    """A product and what it is added to, of its shape."""
    alike = m.added.n_elements == m.product.n_elements == m.total.n_elements
    return alike and not m.is_read(m.product) and _are_few([m.product], compute)


def _bind(
    sites: Sequence[CudaSite], parts: Sequence[FewRowsProduct], norm: FusedNorm | None = None
) -> Call:
    """A launch for a normalised A, of the first node, or for that of the first product."""
    (product, *_), (first, *_) = (s for s in sites if is_of(s.node, "mul_mat")), sites
    p, a = problem_of(product.node, product.compute), first.src[0 if norm else 1]
    launch = few_rows.products if path_of(p) is FEW_ROWS else packed_tiles.products
    return launch(parts, a, p.m, p.k, first.stream, norm)


def _part(site: CudaSite) -> FewRowsProduct:
    return FewRowsProduct(site.out, site.src[0], site.node.src[0].dtype, site.node.shape[-1])


def _norm(site: CudaSite, is_read: bool, other: Any) -> FusedNorm:
    """other: an array, which stands for the norm's result if there is none"""
    return FusedNorm(site.src[1], site.scalars[0], site.out if is_read else other, is_read)


def _bind_after_norm(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    norm, *reads = sites
    return _bind(sites, [_part(s) for s in reads], _norm(norm, is_read[0], reads[0].out))


def _bind_gated(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    norm, gate, up, gated = sites
    part = replace(_part(gate), out=gated.out, up=up.src[0])
    return _bind(sites, [part], _norm(norm, is_read[0], gated.out))


def _bind_residual(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    product, total = sites
    added = next(a for a in total.src if a is not None)
    return _bind(sites, [replace(_part(product), out=total.out, added=added)])


def _products_of_norm(rng: np.random.Generator, *widths: int, k: int = 256) -> list[Tensor]:
    x = rms_norm_mul(drawn(rng, 1, k), drawn(rng, k))
    return [mul_mat(packed_leaf(rng, (n, k), "Q4_K"), x) for n in widths]


def _gate_sample(rng: np.random.Generator) -> Graph:
    gate, up = _products_of_norm(rng, 24, 24, k=512)
    return Graph.of(swiglu(gate, up))


def _residual(rng: np.random.Generator) -> Graph:
    y = mul_mat(packed_leaf(rng, (24, 256), "Q4_K"), drawn(rng, 1, 256))
    return Graph.of(add(drawn(rng, 1, 24), y))


NORM_PRODUCTS = Fusion(
    near("""
        norm = rms_norm_mul(x, w)
        q = mul_mat(w_q, view(norm))
        k = mul_mat(w_k, view(norm))
        v = mul_mat(w_v, view(norm))
    """),
    _follow_norm, _bind_after_norm,
    lambda rng: Graph.of(*(scale(y, 2.0) for y in _products_of_norm(rng, 40, 24, 24))),
)  # fmt: skip
NORM_GATED = Fusion(
    near("""
        norm = rms_norm_mul(x, w)
        gate = mul_mat(w_gate, view(norm))
        up = mul_mat(w_up, view(norm))
        unit = swiglu(view(gate), view(up))
    """),
    _are_gated, _bind_gated, _gate_sample,
)  # fmt: skip
NORM_PRODUCT = Fusion(
    near("norm = rms_norm_mul(x, w); product = mul_mat(b, view(norm))"),
    _follow_norm, _bind_after_norm,
    lambda rng: Graph.of(*_products_of_norm(rng, 40)),
)  # fmt: skip
# The sum may lie where what is added does, number for number, but not where A does.
PRODUCT_ADD = Fusion(
    near("product = mul_mat(b, a); total = add(added, view(product)) or add(view(product), added)"),
    _adds, _bind_residual, _residual, Memory.INPLACE_FIRST, leads=1,
)  # fmt: skip
