"""Products of few rows with what stands around them in generation: norm, gate, residual.

Few rows wait for launches and for weights: so the products of q, k and v are one launch, gate, up
and swiglu another, and each makes the norm before it again in all its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pyggml.backends.cuda.gemm import Problem, path_of
from pyggml.backends.cuda.gemm.few_rows import FEW_ROWS, Norm, Part, products
from pyggml.backends.cuda.ops.products import problem_of
from pyggml.backends.cuda.rewrites.branches import ranges
from pyggml.backends.cuda.rewrites.fusion import declare_pattern
from pyggml.backends.cuda.runtime.kernel import Site
from pyggml.graph.call import Call


def _parts(sites: Sequence[Site]) -> tuple[Problem, list[Part]] | None:
    """Products of one A of few rows, as parts of a launch, and the first; None for others."""
    problems = [problem_of(site.node, site.compute) for site in sites]
    first, a = problems[0], sites[0].node.src[1]
    if any(path_of(p) is not FEW_ROWS or p.a != first.a for p in problems):
        return None
    if any(s.node.src[1].root is not a.root or s.node.src[1].offset != a.offset for s in sites):
        return None
    both = zip(sites, problems, strict=True)
    return first, [Part(site.out, site.src[0], p.b.dtype, p.n) for site, p in both]


def _norm(site: Site, product: Site, is_read: bool) -> Norm | None:
    """The norm whose result is the A of a product, row for row."""
    a = product.node.src[1]
    makes = a.root is site.node and a.n_elements == site.node.n_elements
    if not makes or a.shape[-1] != site.node.shape[-1]:
        return None
    return Norm(site.src[1], site.scalars[0], site.out, is_read)


def _bind_after_norm(sites: Sequence[Site], is_read: Sequence[bool]) -> Call | None:
    """Products of one normalised A: of queries, keys and values, say."""
    normed, *reads = sites
    found, norm = _parts(reads), _norm(normed, reads[0], is_read[0])
    if found is None or norm is None:
        return None
    p, parts = found
    return products(parts, normed.src[0], p.m, p.k, normed.stream, norm)


def _bind_gated(sites: Sequence[Site], is_read: Sequence[bool]) -> Call | None:
    """silu(A · gateᵀ) · (A · upᵀ) of a normalised A."""
    normed, first, second, gated = sites
    found, norm = _parts([first, second]), _norm(normed, first, is_read[0])
    if found is None or norm is None or is_read[1] or is_read[2]:
        return None
    p, (gate, up) = found
    roots = [t.root for t in gated.node.src]
    if roots == [second.node, first.node]:
        gate, up = up, gate
    elif roots != [first.node, second.node]:
        return None
    if gate.dtype is not up.dtype or gate.n != up.n:
        return None
    part = replace(gate, out=gated.out, up=up.w)
    return products([part], normed.src[0], p.m, p.k, normed.stream, norm)


def _bind_residual(sites: Sequence[Site], is_read: Sequence[bool]) -> Call | None:
    """A product and what it is added to, of its shape."""
    product, total = sites
    found = _parts([product])
    others = [i for i, t in enumerate(total.node.src) if t.root is not product.node]
    if found is None or is_read[0] or len(others) != 1:
        return None
    added, (result, a) = total.src[others[0]], ranges((total.out, product.src[1]))
    if not added.size == product.out.size == total.out.size or result.meets(a):
        return None
    p, (part,) = found
    part = replace(part, out=total.out, added=added)
    return products([part], product.src[1], p.m, p.k, product.stream)


declare_pattern("rms_norm_mul", *("mul_mat",) * 3, bind=_bind_after_norm, first=True)
declare_pattern("rms_norm_mul", "mul_mat", "mul_mat", "swiglu", bind=_bind_gated)
declare_pattern("rms_norm_mul", "mul_mat", bind=_bind_after_norm, first=True)  # of the logits
# In place: the sum may lie where what is added does, number for number.
declare_pattern("mul_mat", "add", bind=_bind_residual, in_place=True)
