"""The card's own ops of wide matrices, and the nodes that apply them. M rows, K columns, rank r."""

from __future__ import annotations

from collections.abc import Sequence

from pyggml.backends.cuda.rewrites.lora import gated, gradients, products, wide
from pyggml.backends.cuda.rewrites.lora.wide import columns
from pyggml.backends.cuda.runtime.kernel import Kernel, OwnOp
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import SAVED, Memory, NoGrad
from pyggml.graph.tensor import Tensor


def _own(name: str, kernel: Kernel, memory: Memory = Memory.FRESH) -> OwnOp:
    fields = {f: getattr(SAVED, f) for f in ("ggml", "spec", "ref", "samples", "refuses")}
    reason = NoGrad("a device's own ops enter a graph that has its gradients")
    return OwnOp(name=name, grad=reason, memory=memory, kernel=kernel, **fields)


_WIDE_ROWS = _own("wide_rows", wide.OF_ROWS)
_WIDE_GRADIENT = _own("wide_gradient", wide.OF_GRADIENT)
_GATED_GRADIENTS = _own("gated_gradients", gated.GRADIENTS)
_WIDE_PRODUCT = _own("wide_product", products.FORWARD)
_WIDE_BACK = _own("wide_back", products.BACK)
_WIDE_BACK_ADD = _own("wide_back_add", products.BACK_ADD, Memory.INPLACE_FIRST)
_GRADIENT_OF_A = _own("gradient_of_a", gradients.OF_A)
_GRADIENT_OF_B = _own("gradient_of_b", gradients.OF_B)


def wide_rows(x: Tensor, factors: Sequence[Tensor], scales: Sequence[float]) -> Tensor:
    """X: x (M, K) and A of each product (r, K) -> BF16 (M, K + columns); saved: the columns.

    Wide rows end with some numbers that nothing writes or reads (`wide.width`).
    """
    (m, k), n = x.shape, sum(columns(a.shape[0]) for a in factors)
    params = {"scales": tuple(scales)}
    node = Tensor((m, wide.width(k + n)), BF16, _WIDE_ROWS, (x, *factors), params)
    node.saved = (Tensor((m, n), BF16, SAVED, (node,)),)
    return node


def wide_gradient(dy: Tensor, b: Tensor, scale: float) -> Tensor:
    """D: dy (M, N), B (N, r) -> BF16 (M, N + columns)."""
    shape = dy.shape[0], wide.width(dy.shape[1] + columns(b.shape[1]))
    return Tensor(shape, BF16, _WIDE_GRADIENT, (dy, b), {"scales": (scale,)})


def gated_gradients(
    operands: Sequence[Tensor], factors: Sequence[Tensor], scales: Sequence[float]
) -> Tensor:
    """D of gate: gate, up and dy (M, N), B of gate and of up (N, r) -> BF16 (M, N + columns);
    saved: D of up, and swiglu(gate, up) (M, N), both BF16."""
    m, n = operands[0].shape
    widths = [wide.width(n + columns(b.shape[1])) for b in factors]
    params = {"scales": tuple(scales)}
    node = Tensor((m, widths[0]), BF16, _GATED_GRADIENTS, (*operands, *factors), params)
    node.saved = tuple(Tensor((m, w), BF16, SAVED, (node,)) for w in (widths[1], n))
    return node


def absorbing(node: Tensor, formula: str, operands: Sequence[Tensor], at: int) -> Tensor:
    """The node with a formula of these operands, F32 or BF16, in place of its source `at`."""
    src = (*node.src[:at], *operands, *node.src[at + 1 :])
    new = node.reading(src)
    new.params = {**node.params, "formula": formula}
    return new


def wide_product(w: Tensor, x: Tensor, b: Tensor, first: int) -> Tensor:
    """y: W (N, K), X, B (N, r), X's further column of u's first -> (M, N)."""
    shape = x.shape[0], w.shape[0]
    params = {"first": first, "columns": x.saved[0].shape[1]}
    return Tensor(shape, F32, _WIDE_PRODUCT, (w, x, b), params)


def wide_back(to: Tensor | None, w: Tensor, d: Tensor, a: Tensor) -> Tensor:
    """dx: W (N, K), D, A (r, K) -> (M, K), added to `to` if there is one."""
    shape = d.shape[0], w.shape[1]
    if to is None:
        return Tensor(shape, F32, _WIDE_BACK, (w, d, a))
    return Tensor(shape, F32, _WIDE_BACK_ADD, (to, w, d, a))


def gradient_of_a(d: Tensor, x: Tensor, first: int, rank: int) -> Tensor:
    """dA: D, whose further columns begin at `first`, x (M, K) -> (r, K)."""
    return Tensor((rank, x.shape[1]), F32, _GRADIENT_OF_A, (d, x), {"first": first})


def gradient_of_b(u: Tensor, d: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """dB: the further columns of X, D -> (N, r)."""
    return Tensor(shape, F32, _GRADIENT_OF_B, (u, d), {"first": first})
