"""Problem: a product before it has memory. ProductPath: one way to compute products.

Each path is declared in the file of its kernels; pyggml.kernels.gemm.paths puts them in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.jit.scratch import Layout
from pyggml.kernels.gemm.choice import rounds
from pyggml.kernels.kernel import Compute

Form = Literal["mul_mat", "out_prod", "strided"]
Adds = bool | np.ndarray  # whether C is added to; of (1,) float32, 0 or 1, as the product runs
ANY = 1 << 62  # rows
PROBLEMS = 1024  # whose paths and layouts are remembered


@dataclass(frozen=True, slots=True)
class Problem:
    """C (m, n) (+)= A (m, k) · B (k, n).

    mul_mat    B = Wᵀ, W (n, k) in rows of any type
    out_prod   B = W, W (k, n) in rows of any type
    strided    B = Dᵀ, D (n, k); A, D float32 of any strides, in n_batches
    """

    form: Form
    m: int
    n: int
    k: int
    weight_type: DType = F32
    compute: Compute = "f32"
    n_batches: int = 1
    a_in_columns: bool = False  # A lies column by column, each without gaps; not in mul_mat
    b_in_columns: bool = False  # strided: D does
    a_is_narrow: bool = False  # A is of bfloat16, k and m are even; of paths that take it so
    rounds_w: bool = False  # W is float32 and rounded as it is packed; of the same paths
    rank: int = 0  # R of what is added beside it (pyggml.kernels.gemm.beside)

    @property
    def row(self) -> int:
        """Numbers of a row of W."""
        return self.n if self.form == "out_prod" else self.k

    @property
    def rounds(self) -> bool:
        """Whether its floats are rounded to bfloat16: of a float32 matrix where that is asked."""
        return rounds(self.compute) and (self.weight_type is not F32 or self.rounds_w)


@dataclass(frozen=True, slots=True)
class Packing:
    """Memory in which A is packed once for several products."""

    memory: np.ndarray  # uint8, of the bytes that `packing` asks for
    done: bool


class LowRank(NamedTuple):
    """What is added beside a product, D times a thin matrix; and C's rounded copy."""

    d: np.ndarray  # (m, R), rows without gaps
    thin: np.ndarray  # float32; mul_mat: (n, R), out_prod: (R, n)
    rounded: np.ndarray | None = None  # (m, n) uint16, C as bfloat16


@dataclass(frozen=True, slots=True)
class Operands:
    """The memory of a product. With a weight, C has no gaps, nor have rows or columns of A."""

    c: np.ndarray  # (m, n); strided: (n_batches, m, n)
    a: np.ndarray  # (m, k); strided: (n_batches / i, m, k)
    b: np.ndarray  # W as its type holds it; strided: D (n_batches / j, n, k)
    scratch: np.ndarray  # uint8, of the bytes that the path's layout asks for
    accumulate: Adds
    packing: Packing | None = None
    beside: LowRank | None = None

    @property
    def lda(self) -> int:
        """Floats from row to row of A, or words of two numbers."""
        return int(self.a.strides[0] // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPath:
    """One way to compute products.

    takes    whether it computes such a product, whatever its number of rows
    fewest, most    rows of A that it takes
    layout   (problem) -> its scratch; if `shares`, with an array `packed_a`
    bind     (problem, operands, **arrays of the layout) -> Call
    shares   whether products with the same A can use one packed A, if all take this path
    packs_by_type  whether those must have W of the same type besides
    joins    whether it also computes what is to be added beside the product
    narrow   whether A may be of bfloat16, and W of float32 that is rounded
    """

    name: str
    takes: Callable[[Problem], bool]
    layout: Callable[[Problem], Layout]
    bind: Callable[..., Call]
    fewest: int = 1
    most: int = ANY
    shares: bool = False
    packs_by_type: bool = False
    joins: bool = False
    narrow: bool = False

    def serves(self, p: Problem) -> bool:
        """Whether it computes this product."""
        return self.fewest <= p.m <= self.most and self.takes(p)

    def call(self, p: Problem, o: Operands) -> Call:
        """The product, bound to its memory."""
        layout = layout_of(self, p)
        arrays = layout.cut(o.scratch)
        if o.packing is not None and self.shares:
            arrays["packed_a"] = layout["packed_a"].over(o.packing.memory)
        return self.bind(p, o, **arrays)


@lru_cache(PROBLEMS)
def layout_of(path: ProductPath, p: Problem) -> Layout:
    """The scratch of a product on a path. Layers ask for the same products again and again."""
    return path.layout(p)


def flat(a: np.ndarray) -> np.ndarray:
    """The float32 from a's first to its last element, gaps included, as one axis; two of bfloat16
    are one."""
    if a.flags.c_contiguous:
        return a.reshape(-1).view(np.float32)
    if a.flags.f_contiguous:
        return a.T.reshape(-1).view(np.float32)
    last, size = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)), a.itemsize
    return np.lib.stride_tricks.as_strided(a, (last // size + 1,), (size,)).view(np.float32)
