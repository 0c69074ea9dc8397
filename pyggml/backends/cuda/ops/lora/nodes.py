"""The card's own ops of wide matrices. M rows, K or N columns, rank r.

    wide_rows         X = [x | s·x·Aᵀ of each A], BF16; saved: those products alone
    wide_gradient     D = [each dy | s·dy·B of each], BF16
    gated_gradients   D of gate, of swiglu(gate, up); saved: D of up, and the unit; joined: one D
                      of both, and the unit alone is saved
    wide_product      y = x·Wᵀ + u·Bᵀ, of X and u's first further column
    wide_back         dx = dy·W + v·A of each W and A, of D
    gradient_of_a     dA = vᵀ·x
    gradient_of_b     dB = dyᵀ·u

A product has as many further columns as its rank, and zeros to a whole tile. Nothing writes or
reads what a wide row has behind them. Where operands have a formula, it is that of their value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.backends.cuda.ops.glu import GRADIENTS
from pyggml.backends.cuda.ops.lora import gated, gradients, products, wide
from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.ops.lora.wide import columns
from pyggml.backends.cuda.runtime.kernel import CudaKernel, OwnOp, own_op
from pyggml.backends.cuda.runtime.slabs import MemoryPlace
from pyggml.errors import ShapeError
from pyggml.graph.dtypes import BF16, F32
from pyggml.graph.op import OPS, Memory, Op, Sample, Spec
from pyggml.graph.tensor import Shape, Tensor, as_leaf
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.quants import QUANTS

Results = Iterator[np.ndarray]
Scales = tuple[float, ...]
Places = tuple[MemoryPlace, ...]
_NO_FORMULA = ("relu", "swiglu_oai")


# -- what operands, factors and wide matrices are -------------------------------------------------


def _value_spec(op: str, operands: Sequence[Tensor], formula: str) -> tuple[int, int]:
    """The shape of a formula of matrices in F32 or BF16. ShapeError if they do not fit."""
    if formula and formula not in FORMULAS:
        raise ShapeError(f"{op}: formula is {formula!r}, wanted one of {sorted(FORMULAS)}")
    if len(operands) != (1 if not formula else 3 if formula in GRADIENTS else 2):
        raise ShapeError(f"{op}: formula {formula!r} of {len(operands)} operands")
    for t in operands:
        expect_axes(op, "an operand", t, 2)
        expect(op, "an operand", t, operands[0].shape, BF16 if t.dtype is BF16 else F32)
    m, k = operands[0].shape
    _expect_fit(op, k % 8 == 0, f"rows of {k}, wanted a multiple of 8")
    return m, k


def _expect_fit(op: str, fits: bool, sentence: str) -> None:
    if not fits:
        raise ShapeError(f"{op}: {sentence}")


def _expect_wide(op: str, t: Tensor, n: int, why: str = "") -> None:
    """ShapeError unless t is a BF16 matrix with n columns or more."""
    fits = t.dtype is BF16 and len(t.shape) == 2 and t.shape[1] >= n
    _expect_fit(op, fits, f"a wide matrix is {t!r}, wanted BF16 with {n} columns {why}")


def _rank_of(op: str, factor: Tensor, n: int, axis: int) -> int:
    """The rank of a thin factor with n numbers along an axis. ShapeError for another one."""
    expect_axes(op, "a factor", factor, 2)
    rank = factor.shape[1 - axis]
    expect(op, "a factor", factor, (n, rank) if axis == 0 else (rank, n))
    return rank


def _expect_weight(op: str, w: Tensor) -> None:
    expect_axes(op, "w", w, 2)
    _expect_fit(op, w.dtype.name in QUANTS, f"rows of {w!r} cannot be unpacked")


def _value(formula: str, operands: Sequence[np.ndarray]) -> np.ndarray:
    if not formula:
        (x,) = operands
        return x
    return np.asarray(OPS[formula].ref(*operands))


def _beside(x: np.ndarray, *further: np.ndarray) -> np.ndarray:
    """[x | each further product, zeros behind its columns | zeros to the end of a wide row]"""
    every = np.concatenate([x, *map(_whole_tiles, further)], axis=1)
    return _pad(every, wide.width(every.shape[1]))


def _whole_tiles(x: np.ndarray) -> np.ndarray:
    return _pad(x, columns(x.shape[1]))


def _pad(x: np.ndarray, n: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, n - x.shape[1])))


# -- wide_rows ------------------------------------------------------------------------------------


def _rows_sizes(src: Sequence[Tensor], scales: Scales, formula: str) -> tuple[int, int, int]:
    """(rows, columns of x, further columns)."""
    _expect_fit("wide_rows", 0 < len(scales) < len(src), f"scales are {scales} of {src}")
    m, k = _value_spec("wide_rows", src[: -len(scales)], formula)
    n = sum(columns(_rank_of("wide_rows", a, k, 1)) for a in src[-len(scales) :])
    fits = 0 < n <= wide.MOST_COLUMNS
    _expect_fit("wide_rows", fits, f"{n} further columns, wanted {wide.MOST_COLUMNS} at most")
    return m, k, n


def _rows_spec(*src: Tensor, scales: Scales, formula: str = "") -> Spec:
    m, k, n = _rows_sizes(src, scales, formula)
    return Spec((m, wide.width(k + n)), BF16)


def _rows_saved(*src: Tensor, scales: Scales, formula: str = "") -> tuple[Spec, ...]:
    m, _, n = _rows_sizes(src, scales, formula)
    return (Spec((m, n), BF16),)


def _rows(*arrays: np.ndarray, scales: Scales, formula: str = "") -> Results:
    x = _value(formula, arrays[: -len(scales)])
    u = [x @ (s * a).T for s, a in zip(scales, arrays[-len(scales) :], strict=True)]
    yield _beside(x, *u)
    yield np.concatenate([*map(_whole_tiles, u)], axis=1)


def _rows_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows that end with their further columns; blocks share those of the first and the last."""
    x, gate, up = (rng.standard_normal((20, n)) for n in (120, 56, 56))
    factors = [rng.standard_normal((r, 48)) for r in (4, 8)]
    yield Sample((x, rng.standard_normal((5, 120))), {"scales": (0.5,)})
    yield Sample((packed_leaf(rng, (37, 48), "BF16"), *factors), {"scales": (0.5, 2.0)})
    formula = {"scales": (1.5,), "formula": "swiglu"}
    yield Sample((gate, up, rng.standard_normal((8, 56))), formula)
    arrays = [rng.standard_normal((n, 1248)) for n in (40, 32, 32, 32)]
    yield Sample(tuple(arrays), {"scales": (0.5, 2.0, 3.0)})


WIDE_ROWS = own_op(
    name="wide_rows",
    spec=_rows_spec,
    saved=_rows_saved,
    results=_rows,
    samples=_rows_samples,
    refuses={"scales": ((), (1.0,) * 9), "formula": _NO_FORMULA},
    kernel=wide.OF_ROWS,
)

# -- wide_gradient --------------------------------------------------------------------------------


def _gradient_spec(*src: Tensor, scales: Scales, formula: str = "") -> Spec:
    """Several dy come before their B; a formula is one's."""
    n_each, n = len(scales), 0
    fits = n_each == 1 or (n_each > 0 and not formula and len(src) == 2 * n_each)
    _expect_fit("wide_gradient", fits, f"scales are {scales} of {src}")
    operands, factors = src[:-n_each], src[-n_each:]
    for i, b in enumerate(factors):
        of_it = operands if n_each == 1 else operands[i : i + 1]
        m, k = _value_spec("wide_gradient", of_it, formula)
        _expect_fit("wide_gradient", m == src[0].shape[0], f"{of_it} have other rows than {src[0]}")
        n += k + columns(_rank_of("wide_gradient", b, k, 0))
    return Spec((m, wide.width(n)), BF16)


def _gradient(*arrays: np.ndarray, scales: Scales, formula: str = "") -> Results:
    n = len(scales)
    every = arrays[:n] if n > 1 else [_value(formula, arrays[:-1])]
    triples = zip(every, arrays[-n:], scales, strict=True)
    yield _beside(np.concatenate(every, axis=1), *(dy @ b * scale for dy, b, scale in triples))


def _gradient_samples(rng: np.random.Generator) -> Iterator[Sample]:
    b = rng.standard_normal((56, 5))
    for m, n in ((20, 120), (40, 1272)):
        yield Sample((rng.standard_normal((m, n)), rng.standard_normal((n, 5))), {"scales": (0.5,)})
    yield Sample((packed_leaf(rng, (37, 56), "BF16"), b), {"scales": (2.0,)})
    gate, up, dy = (rng.standard_normal((20, 56)) for _ in range(3))
    yield Sample((gate, up, dy, b), {"scales": (1.0,), "formula": "swiglu_back_gate"})
    for m, sizes, ranks in ((20, (120, 48), (5, 5)), (40, (1272, 56, 64), (8, 8, 12))):
        halves = [rng.random() < 0.5 for _ in sizes]
        every = [
            packed_leaf(rng, (m, n), "BF16") if half else rng.standard_normal((m, n))
            for n, half in zip(sizes, halves, strict=True)
        ]
        factors = [rng.standard_normal(shape) for shape in zip(sizes, ranks, strict=True)]
        yield Sample((*every, *factors), {"scales": (0.5, 2.0, 3.0)[: len(sizes)]})


WIDE_GRADIENT = own_op(
    name="wide_gradient",
    spec=_gradient_spec,
    results=_gradient,
    samples=_gradient_samples,
    refuses={"scales": ((), (1.0,) * 9), "formula": _NO_FORMULA},
    kernel=wide.OF_GRADIENT,
)

# -- gated_gradients ------------------------------------------------------------------------------


def _gate_sizes(src: Sequence[Tensor], scales: Scales, joined: bool) -> tuple[Shape, Shape]:
    """The shape of gate; numbers from row to row of both wide matrices."""
    _expect_fit("gated_gradients", len(scales) == 2, f"scales are {scales}, wanted two")
    gate, *_ = operands = src[:3]
    m, n = _value_spec("gated_gradients", operands, "swiglu_back_gate")
    for t in operands:
        expect("gated_gradients", "an operand", t, gate.shape, BF16)
    ranks = [_rank_of("gated_gradients", b, n, 0) for b in src[3:]]
    return (m, n), gated.sides(n, ranks, joined)


def _gate_spec(
    gate: Tensor, up: Tensor, dy: Tensor, b_gate: Tensor, b_up: Tensor, scales: Scales,
    joined: bool,
) -> Spec:  # fmt: skip
    (m, _), (of_gate, _) = _gate_sizes((gate, up, dy, b_gate, b_up), scales, joined)
    return Spec((m, of_gate), BF16)


def _gate_saved(*src: Tensor, scales: Scales, joined: bool) -> tuple[Spec, ...]:
    (m, n), (_, of_up) = _gate_sizes(src, scales, joined)
    unit = Spec((m, n), BF16)
    return (unit,) if joined else (Spec((m, of_up), BF16), unit)


def _gate_gradients(
    gate: np.ndarray, up: np.ndarray, dy: np.ndarray, *b: np.ndarray, scales: Scales, joined: bool
) -> Results:
    both = _value("swiglu_back_gate", (gate, up, dy)), _value("swiglu", (gate, dy))
    if joined:
        yield from _gradient(*both, *b, scales=scales)
    else:
        for d, factor, scale in zip(both, b, scales, strict=True):
            yield from _gradient(d, factor, scales=(scale,))
    yield _value("swiglu", (gate, up))


def _gate_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for m, n, ranks in ((20, 120, (5, 8)), (37, 48, (12, 16)), (40, 1264, (16, 16))):
        operands = [packed_leaf(rng, (m, n), "BF16") for _ in range(3)]
        factors = [rng.standard_normal((n, r)) for r in ranks]
        for joined in (False, True):
            yield Sample((*operands, *factors), {"scales": (0.5, 3.0), "joined": joined})


GATED_GRADIENTS = own_op(
    name="gated_gradients",
    spec=_gate_spec,
    saved=_gate_saved,
    results=_gate_gradients,
    samples=_gate_samples,
    refuses={"scales": ((), (1.0,)), "joined": ()},
    kernel=gated.GRADIENTS,
)

# -- wide_product, wide_back ----------------------------------------------------------------------


def _product_spec(
    w: Tensor, x: Tensor, b: Tensor, first: int, columns: int, unpacked: Places
) -> Spec:
    """columns: further ones of X, of all products. unpacked: where W lasts in bfloat16, if so"""
    _expect_weight("wide_product", w)
    n, k = w.shape
    _expect_wide("wide_product", x, k + columns, f"for columns {columns}")
    rank = _rank_of("wide_product", b, n, 0)
    fits = 0 <= first <= columns - wide.columns(rank)
    _expect_fit("wide_product", fits, f"first is {first} for a rank of {rank} in columns {columns}")
    return Spec((x.shape[0], n))


def _product(
    w: np.ndarray, x: np.ndarray, b: np.ndarray, first: int, columns: int, unpacked: Places
) -> Results:
    k, rank = w.shape[1], b.shape[1]
    yield x[:, :k] @ w.T + x[:, k + first :][:, :rank] @ b.T


def _product_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for kind, rank, first, n_columns in (("Q8_0", 5, 0, 8), ("F16", 8, 8, 24)):
        x = packed_leaf(rng, (20, wide.width(32 + n_columns)), "BF16")
        x.data[:, 32 + first + rank : 32 + first + columns(rank)] = 0
        w, b = packed_leaf(rng, (48, 32), kind), rng.standard_normal((48, rank))
        yield Sample((w, x, b), {"first": first, "columns": n_columns, "unpacked": ()})


WIDE_PRODUCT = own_op(
    name="wide_product",
    spec=_product_spec,
    results=_product,
    samples=_product_samples,
    refuses={"first": (-1, 99), "columns": (0, 999), "unpacked": ()},
    kernel=products.FORWARD,
    costly=True,
)


def _back_spec(*src: Tensor, step: int, unpacked: Places) -> Spec:
    """src: each W, then D, then each A. step: numbers from row to row of W unpacked, as many as in
    a row of its product's X"""
    _expect_fit("wide_back", len(src) % 2 == 1 and len(src) > 1, f"sources are {src}")
    weights, d, factors = products.split_sources(src)
    n, k = 0, weights[0].shape[-1]
    for w, a in zip(weights, factors, strict=True):
        _expect_weight("wide_back", w)
        _expect_fit("wide_back", w.shape[1] == k, f"{w!r} has other columns than {weights[0]!r}")
        n += w.shape[0] + columns(_rank_of("wide_back", a, k, 1))
    _expect_wide("wide_back", d, n)
    _expect_fit("wide_back", step >= k, f"step is {step}, wanted {k} or more")
    return Spec((d.shape[0], k))


def _back(*arrays: np.ndarray, step: int, unpacked: Places) -> Results:
    weights, d, factors = products.split_sources(arrays)
    n, ranks = [len(w) for w in weights], [len(a) for a in factors]
    dx = d[:, : sum(n)] @ np.concatenate(weights)
    for a, at in zip(factors, wide.places_beside(n, ranks)[1], strict=True):
        dx += d[:, at : at + len(a)] @ a
    yield dx


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for kind, rank in (("Q8_0", 5), ("F16", 8)):
        d = packed_leaf(rng, (20, wide.width(48 + columns(rank))), "BF16")
        d.data[:, 48 + rank :] = 0
        w, a = packed_leaf(rng, (48, 32), kind), rng.standard_normal((rank, 32))
        yield Sample((w, d, a), {"step": 64, "unpacked": ()})
    weights = [packed_leaf(rng, (n, 32), "Q8_0") for n in (48, 16)]
    d = packed_leaf(rng, (20, wide.width(48 + 16 + 8 + 16)), "BF16")
    d.data[:, 64 + 5 : 64 + 8] = d.data[:, 72 + 12 :] = 0
    factors = [rng.standard_normal((rank, 32)) for rank in (5, 12)]
    yield Sample((*weights, d, *factors), {"step": 64, "unpacked": ()})


WIDE_BACK = own_op(
    name="wide_back",
    spec=_back_spec,
    results=_back,
    samples=_back_samples,
    refuses={"step": (0, 31), "unpacked": ()},
    kernel=products.BACK,
    costly=True,
)

# -- gradients of factors -------------------------------------------------------------------------


def _of_a_spec(d: Tensor, *operands: Tensor, first: int, rank: int, formula: str = "") -> Spec:
    """first: where D's further columns begin"""
    m, k = _value_spec("gradient_of_a", operands, formula)
    _expect_fit("gradient_of_a", min(first, rank) >= 0, f"first is {first}, rank is {rank}")
    _expect_wide("gradient_of_a", d, first + rank, f"for first {first}, rank {rank}")
    _expect_fit("gradient_of_a", d.shape[0] == m, f"{d!r} and {operands[0]!r} have other rows")
    return Spec((rank, k))


def _of_a(
    d: np.ndarray, *operands: np.ndarray, first: int, rank: int, formula: str = ""
) -> Results:
    yield d[:, first : first + rank].T @ _value(formula, operands)


def _of_a_samples(rng: np.random.Generator) -> Iterator[Sample]:
    d, x, up = packed_leaf(rng, (20, 64), "BF16"), *(rng.standard_normal((20, 32)) for _ in "xu")
    yield Sample((d, x), {"first": 48, "rank": 5})
    yield Sample((d, packed_leaf(rng, (20, 32), "BF16")), {"first": 40, "rank": 8})
    yield Sample((d, x, up), {"first": 48, "rank": 16, "formula": "swiglu"})


GRADIENT_OF_A = own_op(
    name="gradient_of_a",
    spec=_of_a_spec,
    results=_of_a,
    samples=_of_a_samples,
    refuses={"first": (-1, 99), "rank": (-1, 99), "formula": _NO_FORMULA},
    kernel=gradients.OF_A,
    costly=True,
)


def _of_b_spec(u: Tensor, d: Tensor, first: int, shape: Shape, column: int = 0) -> Spec:
    """u: the further columns of X, from `first` on; shape: of B; column: where dy begins in D"""
    fits = len(shape) == 2 and min(first, column, *shape) >= 0
    _expect_fit("gradient_of_b", fits, f"first is {first}, {column} in D, shape is {shape}")
    _expect_wide("gradient_of_b", u, first + shape[1], f"for first {first}")
    _expect_wide("gradient_of_b", d, column + shape[0])
    _expect_fit("gradient_of_b", u.shape[0] == d.shape[0], f"{u!r} and {d!r} have other rows")
    return Spec(shape)


def _of_b(u: np.ndarray, d: np.ndarray, first: int, shape: Shape, column: int = 0) -> Results:
    n, rank = shape
    yield d[:, column : column + n].T @ u[:, first : first + rank]


def _of_b_samples(rng: np.random.Generator) -> Iterator[Sample]:
    u, d = packed_leaf(rng, (20, 24), "BF16"), packed_leaf(rng, (20, 64), "BF16")
    yield Sample((u, d), {"first": 0, "shape": (48, 5)})
    yield Sample((u, d), {"first": 8, "shape": (56, 8)})
    yield Sample((u, d), {"first": 8, "shape": (24, 8), "column": 32})


GRADIENT_OF_B = own_op(
    name="gradient_of_b",
    spec=_of_b_spec,
    results=_of_b,
    samples=_of_b_samples,
    refuses={"first": (-1, 99), "shape": ((1,), (99, 5), (48, 99)), "column": (-1, 99)},
    kernel=gradients.OF_B,
    costly=True,
)

# -- the same, added to what is there -------------------------------------------------------------


def add_op(op: Op, kernel: CudaKernel) -> OwnOp:
    """The op that adds what another one computes to its first source."""
    name = f"{op.name}_add"

    def spec(to: Tensor, *src: Tensor, **params: Any) -> Spec:
        product = op.spec(*src, **params)
        expect(name, "what it is added to", to, product.shape)
        return product

    def results(to: np.ndarray, *arrays: np.ndarray, **params: Any) -> Results:
        yield to + op.ref(*arrays, **params)

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for s in op.samples(rng):
            shape = op(*map(as_leaf, s.arrays), **s.params).shape
            yield replace(s, arrays=(rng.standard_normal(shape), *s.arrays))

    return own_op(
        name=name, spec=spec, results=results, samples=samples, refuses=op.refuses, kernel=kernel,
        memory=Memory.INPLACE_FIRST, costly=True,
    )  # fmt: skip


WIDE_BACK_ADD = add_op(WIDE_BACK, products.BACK_ADD)
GRADIENT_OF_A_ADD = add_op(GRADIENT_OF_A, gradients.OF_A_ADD)
GRADIENT_OF_B_ADD = add_op(GRADIENT_OF_B, gradients.OF_B_ADD)
