"""LoRA's products become wide products with those that they adapt: see ops/lora.

    forward     y = mul_mat_add(mul_mat(W, x), B, t),   t = scale(mul_mat(A, x), s)
    backward    dB = out_prod(t, dy)
                v = scale(out_prod(B, dyᵀ), s)
                dA = out_prod(x, v)
                dx = out_prod_add(out_prod(A, vᵀ), W, dyᵀ), or both added to another gradient

The x of dA may be another tensor than that of the product: the backward pass may have made it
again. A product whose results have further readers stays as it is.
"""

from collections import defaultdict
from dataclasses import dataclass

from pyggml.backends.cuda.gemm.slices import SLICE
from pyggml.backends.cuda.ops.lora.nodes import (
    GRADIENT_OF_A,
    GRADIENT_OF_B,
    WIDE_BACK,
    WIDE_BACK_ADD,
    WIDE_GRADIENT,
    WIDE_PRODUCT,
    WIDE_ROWS,
)
from pyggml.backends.cuda.ops.lora.wide import MOST_COLUMNS, columns
from pyggml.backends.cuda.runtime.kernel import is_of
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

FEWEST_ROWS = 16  # fewer are multiplied by the dot products themselves


@dataclass(slots=True, eq=False)
class _Back:
    """The gradients of a product; da, to and dx are None where nothing needs them."""

    dy: Tensor
    db: Tensor
    v: Tensor
    da: Tensor
    x: Tensor
    dx: Tensor | None = None
    to: Tensor | None = None


@dataclass(slots=True, eq=False)
class _Product:
    """An adapted product: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ."""

    y: Tensor
    w: Tensor
    x: Tensor
    a: Tensor
    b: Tensor
    scale: float
    back: _Back | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@graph_pass
def with_wide_products(graph: Graph) -> Graph:
    """The graph with LoRA's products joined with others; the same graph if there is no LoRA."""
    groups: dict[Tensor, list[_Product]] = defaultdict(list)
    for p in _products(graph):
        groups[p.x].append(p)
    new: dict[Tensor, Tensor] = {}
    for x, group in groups.items():
        rows = WIDE_ROWS(x, *(p.a for p in group), scales=tuple(p.scale for p in group))
        first = 0
        for p in group:
            new |= _join(p, rows, first)
            first += columns(p.rank)
    return rewrite(graph, new)


def _join(p: _Product, rows: Tensor, first: int) -> dict[Tensor, Tensor]:
    """What stands for a product, whose u begins at this further column of X, and its gradients."""
    (u,), (n, rank) = rows.saved, p.b.shape
    y = WIDE_PRODUCT(p.w, rows, p.b, first=first, columns=u.shape[1], unpacked=False)
    new = {p.y: y}
    if p.back is not None:
        d = WIDE_GRADIENT(p.back.dy, p.b, scales=(p.scale,))
        new[p.back.db] = GRADIENT_OF_B(u, d, first=first, shape=p.b.shape)
        new[p.back.da] = GRADIENT_OF_A(d, p.back.x, first=n, rank=rank)
        if p.back.dx is not None:
            op, src = (WIDE_BACK, ()) if p.back.to is None else (WIDE_BACK_ADD, (p.back.to,))
            new[p.back.dx] = op(*src, p.w, d, p.a, step=rows.shape[1], unpacked=False)
    return new


def _products(graph: Graph) -> list[_Product]:
    """Those that can be joined; none of an x whose products have too many columns together."""
    all_of = [p for t in graph.nodes if (p := _product(t, graph)) is not None]
    n_columns: dict[Tensor, int] = defaultdict(int)
    for p in all_of:
        n_columns[p.x] += columns(p.rank)
    return [p for p in all_of if n_columns[p.x] <= MOST_COLUMNS]


def _product(y: Tensor, graph: Graph) -> _Product | None:
    if not is_of(y, "mul_mat_add") or not is_of(y.src[0], "mul_mat"):
        return None
    plain, b, t = y.src
    w, x = plain.src
    u, scale = _without_scale(t)
    if u is None or not is_of(u, "mul_mat") or u.src[1] is not x:
        return None
    p = _Product(y, w, x, u.src[0], b, scale)
    alone = graph.is_only_for(plain, y) and (u is t or graph.is_only_for(u, t))
    if not alone or not _suits(p) or t in graph.outputs:
        return None
    backward = [r for r in graph.readers[t] if r is not y]
    if backward:
        p.back = _back(p, t, backward, graph)
    return p if p.back is not None or not backward else None


def _back(p: _Product, t: Tensor, readers: list[Tensor], graph: Graph) -> _Back | None:
    """The gradients, if the only other reader of t is dB, and all others are found."""
    db = readers[0]
    if len(readers) > 1 or not is_of(db, "out_prod") or db.src[0] is not t:
        return None
    dy = db.src[1]
    if dy.shape != p.y.shape or not dy.is_contiguous or dy.dtype is not F32:
        return None
    back = _of_v(p, dy, db, graph)
    return back if back is None or _find_dx(p, back, graph) else None


def _of_v(p: _Product, dy: Tensor, db: Tensor, graph: Graph) -> _Back | None:
    for product in graph.readers[p.b]:
        if is_of(product, "out_prod") and _is_transposed(product.src[1], dy):
            after = graph.readers[product]
            v = after[0] if after and is_of(after[0], "scale") else product
            if v is not product and not graph.is_only_for(product, v):
                return None
            if _without_scale(v) != (product, p.scale) or v in graph.outputs:
                return None
            of_a = [r for r in graph.readers[v] if is_of(r, "out_prod") and r.src[1] is v]
            if len(of_a) == 1 and _is_matrix(of_a[0].src[0]):
                return _Back(dy, db, v, of_a[0], of_a[0].src[0])
    return None


def _find_dx(p: _Product, back: _Back, graph: Graph) -> bool:
    """Find dx, which reads v as dA does, and enter it; False if v has still other readers."""
    readers = [r for r in graph.readers[back.v] if r is not back.da]
    if not readers:
        return True
    thins = graph.readers[readers[0]]
    if len(readers) > 1 or len(thins) != 1 or not is_of(readers[0], "transpose"):
        return False
    (thin,) = thins
    if not is_of(thin, "out_prod", "out_prod_add") or thin.src[-2] is not p.a:
        return False
    dx = graph.readers[thin][0] if graph.readers[thin] else thin
    if not is_of(dx, "out_prod_add") or dx.src[0] is not thin or not graph.is_only_for(thin, dx):
        return False
    if dx.src[1] is not p.w or not _is_transposed(dx.src[2], back.dy):
        return False
    back.dx, back.to = dx, thin.src[0] if is_of(thin, "out_prod_add") else None
    return True


def _without_scale(t: Tensor) -> tuple[Tensor | None, float]:
    """(What t is a multiple of, the factor)."""
    if not is_of(t, "scale"):
        return t, 1.0
    return (t.src[0], t.params["s"]) if t.params["b"] == 0 else (None, 1.0)


def _is_matrix(t: Tensor) -> bool:
    return len(t.shape) == 2 and t.is_contiguous


def _is_transposed(t: Tensor, of: Tensor) -> bool:
    """Whether t is a view of `of` with its two axes exchanged."""
    same = t.root is of.root and t.offset == of.offset
    return same and (t.shape, t.strides) == (of.shape[::-1], of.strides[::-1])


def _suits(p: _Product) -> bool:
    """Whether types and sizes are those that the kernels take."""
    thin = all(f.op is None and f.dtype is F32 and _is_matrix(f) for f in (p.a, p.b))
    if not thin or p.w.dtype is F32 or not all(_is_matrix(t) for t in (p.w, p.x)):
        return False
    n, k = p.w.shape
    fits = 2 * (n + columns(p.rank)) * (k + MOST_COLUMNS) <= SLICE
    return fits and n % 16 == k % 16 == 0 and p.x.shape[0] >= FEWEST_ROWS
