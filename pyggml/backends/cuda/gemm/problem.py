"""CudaProblem: a product before it has memory. CudaProductPath: one way to compute products.

    C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]

A is float32, B of any type; beside a B in BF16, cuBLAS takes A in BF16 too. A `Factor` says where
its numbers lie, so that a transposed factor is the same product with other steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyggml.backends.cuda.runtime.kernel import Compute
from pyggml.backends.kit.products import SizedProduct
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32


@dataclass(frozen=True, slots=True)
class CudaProblem(SizedProduct):
    """A product, and how a B of another type than F32 is multiplied.

    b_aligned: whether B begins where 16 bytes can be copied at once: a view of rows may not
    """

    compute: Compute = "f32"
    b_aligned: bool = True

    @property
    def rounds(self) -> bool:
        """Whether both factors are rounded to bfloat16: never with a float32 matrix."""
        return self.compute == "bf16" and self.b.dtype is not F32

    @property
    def is_single(self) -> bool:
        return self.batches == (1, 1)

    @property
    def a_is_whole(self) -> bool:
        """Whether A is one matrix whose rows lie one after the other."""
        return self.is_single and self.a.k == 1 and (self.m == 1 or self.a.row == self.k)

    @property
    def b_in_rows(self) -> bool:
        """Whether a packed B is read along k (C = A·Wᵀ), not along n (C = A·W)."""
        return self.b.k == 1


@dataclass(frozen=True, slots=True)
class CudaOperands:
    """The memory of a product: flat arrays on the card."""

    c: Any  # float32 (batches · m · n), without gaps
    a: Any
    b: Any
    scratch: Any  # uint8
    accumulate: bool
    stream: Any
    rounded: Any = None  # memory for A in bfloat16 that several products share, or None
    is_rounded: bool = False  # whether something else has filled it
    factor: float = 1.0  # of the product; paths that `scale` take others, with a float32 B
    rounded_step: int = 0  # from row to row of `rounded`; 0: k


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaProductPath:
    """One way to compute products.

    takes    (problem) -> whether it can, and should, compute it
    bind     (problem, operands) -> Call
    scratch  (problem) -> bytes
    shares   whether it reads A in bfloat16 where the problem rounds, so that products can share it
    scales   whether it multiplies a product with a float32 B by `CudaOperands.factor`
    """

    name: str
    takes: Callable[[CudaProblem], bool]
    bind: Callable[[CudaProblem, CudaOperands], Call]
    scratch: Callable[[CudaProblem], int]
    shares: bool = False
    scales: bool = False
