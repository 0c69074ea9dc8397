"""Products of wide matrices: LoRA's factors beside the weight, in one product by cuBLAS.

The x of dA may be another tensor than that of the product: the backward pass may have made it
again. A product whose results have further readers stays as it is. Where the product itself is not
computed again, as the last one of a layer, but t = A·x is, gradients of it alone are joined.
"""

from collections import defaultdict
from collections.abc import Iterator

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
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.rewrite import Replacements, rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

FEWEST_ROWS = 16  # fewer are multiplied by the dot products themselves

_FORWARD = """\
plain = mul_mat(w, x)
t = scale(mul_mat(a, x)) or mul_mat(a, x)
y = mul_mat_add(plain, b, t)
"""
_BACK = """\
db = out_prod(t, dy)
v = scale(out_prod(b, turned)) or out_prod(b, turned)
da = out_prod(x_again, v)
"""
_BACK_TO_X = """\
thin = out_prod(a, transpose(v)) or out_prod_add(so_far, a, transpose(v))
dx = out_prod_add(thin, w, turned_again)
"""
_AGAIN = """\
t = scale(mul_mat(a, x)) or mul_mat(a, x)
"""
_TEXTS = (
    _FORWARD + _BACK + _BACK_TO_X, _FORWARD + _BACK, _FORWARD, _AGAIN + _BACK + _BACK_TO_X,
)  # fmt: skip
_PATTERNS = [Pattern(text) for text in _TEXTS]
_RESULTS = "y", "db", "da", "dx"


@graph_pass
def with_wide_products(graph: Graph) -> Graph:
    """The graph with LoRA's products joined with others; the same graph if there is no LoRA.

    None is joined of an x whose products have too many columns together.
    """
    groups: dict[Tensor, list[Match]] = defaultdict(list)
    for m in sorted(_products(graph), key=lambda m: graph.places[m.t]):
        groups[m.x].append(m)
    new: dict[Tensor, Tensor] = {}
    for x, group in groups.items():
        if sum(columns(_rank(m)) for m in group) <= MOST_COLUMNS:
            rows = WIDE_ROWS(x, *(m.a for m in group), scales=tuple(_factor(m.t) for m in group))
            first = 0
            for m in group:
                new |= _join(m, rows, first)
                first += columns(_rank(m))
    return rewrite(graph, new)


def _join(m: Match, rows: Tensor, first: int) -> Replacements:
    """What stands for a product, whose u begins at this further column of X, and its gradients."""
    (u,), n = rows.saved, m.b.shape[0]
    new, y, so_far, dx = dict[Tensor, Tensor](), m.get("y"), m.get("so_far"), m.get("dx")
    if y is not None:
        new[y] = WIDE_PRODUCT(m.w, rows, m.b, first=first, columns=u.shape[1], unpacked=())
    if m.get("db") is not None:
        d = WIDE_GRADIENT(m.dy, m.b, scales=(_factor(m.t),))
        new[m.db] = GRADIENT_OF_B(u, d, first=first, shape=m.b.shape)
        new[m.da] = GRADIENT_OF_A(d, m.x_again, first=n, rank=_rank(m))
        if dx is not None:
            op, src = (WIDE_BACK, ()) if so_far is None else (WIDE_BACK_ADD, (so_far,))
            new[dx] = op(*src, m.w, d, m.a, step=rows.shape[1], unpacked=())
    return new


def _products(graph: Graph) -> Iterator[Match]:
    """Those that can be joined, with their gradients where there are any."""
    taken: set[Tensor] = set()
    for pattern in _PATTERNS:
        for m in pattern.matches(graph, taken):
            results = [m.get(name) for name in _RESULTS]
            inside = [t for t in m.nodes if t not in results]
            if _suits(m) and _has_gradients(m) and not m.is_read(*inside):
                taken.update(m.nodes)
                yield m


def _rank(m: Match) -> int:
    return m.a.shape[0]


def _factor(t: Tensor) -> float:
    """Of a product's multiple; 0 if something is added to it."""
    return 1.0 if not is_of(t, "scale") else t.params["s"] if t.params["b"] == 0 else 0.0


def _has_gradients(m: Match) -> bool:
    """Whether the gradients, if there are any, are those of this product."""
    if m.get("db") is None:
        return True
    dy, turned = m.dy, filter(None, (m.turned, m.get("turned_again")))
    shape = m.x.shape[0], m.w.shape[0]
    plain = dy.shape == shape and dy.is_contiguous and dy.dtype is F32
    alike = _factor(m.v) == _factor(m.t) and _is_matrix(m.x_again)
    return plain and alike and all(_is_transposed(t, dy) for t in turned)


def _is_matrix(t: Tensor) -> bool:
    return len(t.shape) == 2 and t.is_contiguous


def _is_transposed(t: Tensor, of: Tensor) -> bool:
    """Whether t is a view of `of` with its two axes exchanged."""
    same = t.root is of.root and t.offset == of.offset
    return same and (t.shape, t.strides) == (of.shape[::-1], of.strides[::-1])


def _suits(m: Match) -> bool:
    """Whether types and sizes are those that the kernels take."""
    thin = all(f.op is None and f.dtype is F32 and _is_matrix(f) for f in (m.a, m.b))
    if not thin or m.w.dtype is F32 or not all(map(_is_matrix, (m.w, m.x))) or not _factor(m.t):
        return False
    n, k = m.w.shape
    fits = 2 * (n + columns(_rank(m))) * (k + MOST_COLUMNS) <= SLICE
    return fits and n % 16 == k % 16 == 0 and m.x.shape[0] >= FEWEST_ROWS
