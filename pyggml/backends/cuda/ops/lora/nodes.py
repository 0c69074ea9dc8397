"""The card's own ops of wide matrices, and the nodes that apply them. M rows, K columns, rank r.

What an op computes of arrays stands before it. Its first operand may be a formula of several.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pyggml.backends.cuda.ops.lora import gated, gradients, products, wide
from pyggml.backends.cuda.ops.lora.wide import columns
from pyggml.backends.cuda.runtime.kernel import Kernel, OwnOp, own_op
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import OPS, SAVED, Memory
from pyggml.graph.tensor import Tensor


def _value(formula: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    if not formula:
        (x,) = operands
        return x
    return np.asarray(OPS[formula].ref(*operands))


def _beside(x: np.ndarray, *further: np.ndarray) -> np.ndarray:
    """[x | each further product, zeros behind its columns | zeros to the end of a wide row]"""
    both = np.concatenate([x, *map(_whole_tiles, further)], axis=1)
    return _pad(both, wide.width(both.shape[1]))


def _whole_tiles(x: np.ndarray) -> np.ndarray:
    return _pad(x, columns(x.shape[1]))


def _pad(x: np.ndarray, n: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, n - x.shape[1])))


def _rows(
    *arrays: np.ndarray, scales: tuple[float, ...], formula: str = ""
) -> Iterator[np.ndarray]:
    x = _value(formula, arrays[: -len(scales)])
    u = [x @ (s * a).T for s, a in zip(scales, arrays[-len(scales) :], strict=True)]
    yield _beside(x, *u)
    yield np.concatenate([*map(_whole_tiles, u)], axis=1)


def _gradient(
    *arrays: np.ndarray, scales: tuple[float, ...], formula: str = ""
) -> Iterator[np.ndarray]:
    (scale,), *operands, b = scales, *arrays
    dy = _value(formula, operands)
    yield _beside(dy, dy @ b * scale)


def _gate_gradients(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, *b: np.ndarray, scales: tuple[float, ...]
) -> Iterator[np.ndarray]:
    d_gate, d_up = _value("swiglu_back_gate", (gate, up, dy)), _value("swiglu", (gate, dy))
    for d, factor, scale in zip((d_gate, d_up), b, scales, strict=True):
        yield _beside(d, d @ factor * scale)
    yield _value("swiglu", (gate, up))


def _product(
    w: np.ndarray, x: np.ndarray, b: np.ndarray, first: int, columns: int, unpacked: bool
) -> Iterator[np.ndarray]:
    k, rank = w.shape[1], b.shape[1]
    yield x[:, :k] @ w.T + x[:, k + first :][:, :rank] @ b.T


def _back(
    w: np.ndarray, d: np.ndarray, a: np.ndarray, step: int, unpacked: bool
) -> Iterator[np.ndarray]:
    n, rank = w.shape[0], a.shape[0]
    yield d[:, :n] @ w + d[:, n : n + rank] @ a


def _of_a(
    d: np.ndarray, *operands: np.ndarray, first: int, rank: int, formula: str = ""
) -> Iterator[np.ndarray]:
    yield d[:, first : first + rank].T @ _value(formula, operands)


def _of_b(u: np.ndarray, d: np.ndarray, first: int, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    n, rank = shape
    yield d[:, :n].T @ u[:, first : first + rank]


def _adding(name: str, kernel: Kernel, results: Callable[..., Iterator[np.ndarray]]) -> OwnOp:
    """The op that adds what another one computes to its first source."""

    def sums_with(to: np.ndarray, *arrays: np.ndarray, **params: Any) -> Iterator[np.ndarray]:
        (product,) = results(*arrays, **params)
        yield to + product

    return own_op(name, kernel, sums_with, Memory.INPLACE_FIRST)


_WIDE_ROWS = own_op("wide_rows", wide.OF_ROWS, _rows)
_WIDE_GRADIENT = own_op("wide_gradient", wide.OF_GRADIENT, _gradient)
_GATED_GRADIENTS = own_op("gated_gradients", gated.GRADIENTS, _gate_gradients)
_WIDE_PRODUCT = own_op("wide_product", products.FORWARD, _product)
_WIDE_BACK = own_op("wide_back", products.BACK, _back)
_WIDE_BACK_ADD = _adding("wide_back_add", products.BACK_ADD, _back)
GRADIENT_OF_A = own_op("gradient_of_a", gradients.OF_A, _of_a)
GRADIENT_OF_A_ADD = _adding("gradient_of_a_add", gradients.OF_A_ADD, _of_a)
GRADIENT_OF_B = own_op("gradient_of_b", gradients.OF_B, _of_b)
GRADIENT_OF_B_ADD = _adding("gradient_of_b_add", gradients.OF_B_ADD, _of_b)


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
    """y: W (N, K), X, B (N, r), X's further column of u's first -> (M, N).

    W is unpacked in every run; rewrites/unpacked.py can say that it lasts.
    """
    shape = x.shape[0], w.shape[0]
    params = {"first": first, "columns": x.saved[0].shape[1], "unpacked": False}
    return Tensor(shape, F32, _WIDE_PRODUCT, (w, x, b), params)


def wide_back(to: Tensor | None, w: Tensor, d: Tensor, a: Tensor, step: int) -> Tensor:
    """dx: W (N, K), D, A (r, K) -> (M, K), added to `to` if there is one.

    step: numbers from row to row of W unpacked, as many as in a row of its product's X
    """
    shape, params = (d.shape[0], w.shape[1]), {"step": step, "unpacked": False}
    if to is None:
        return Tensor(shape, F32, _WIDE_BACK, (w, d, a), params)
    return Tensor(shape, F32, _WIDE_BACK_ADD, (to, w, d, a), params)


def gradient_of_a(d: Tensor, x: Tensor, first: int, rank: int) -> Tensor:
    """dA: D, whose further columns begin at `first`, x (M, K) -> (r, K)."""
    params = {"first": first, "rank": rank}
    return Tensor((rank, x.shape[1]), F32, GRADIENT_OF_A, (d, x), params)


def gradient_of_b(u: Tensor, d: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """dB: the further columns of X, D -> (N, r)."""
    return Tensor(shape, F32, GRADIENT_OF_B, (u, d), {"first": first, "shape": shape})
