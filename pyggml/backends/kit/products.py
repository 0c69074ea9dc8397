"""Products on a device, before they have memory.

C[z, m, n] (+)= Σ_k A[z, m, k] · B[z, n, k]      mul_mat(w, x): A = x, B = w
                                                 out_prod(a, b): A = bᵀ, B = aᵀ
"""

from dataclasses import dataclass

from pyggml.graph.dtypes import F32, DType
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Factor:
    """Where the numbers of a factor lie, counted in elements from its first.

    batches  steps of the two axes of batches
    repeats  how many batches of C, along each, take one of the factor
    row      step from row to row: of A along m, of B along n
    k        step along the axis that is summed over; of a packed type one of the two is 1
    """

    row: int
    k: int
    batches: tuple[int, int] = (0, 0)
    repeats: tuple[int, int] = (1, 1)
    dtype: DType = F32

    @property
    def steps(self) -> tuple[int, int, int, int]:
        return (*self.batches, self.row, self.k)


def factor_of(t: Tensor, batches: tuple[int, int], is_transposed: bool) -> Factor:
    """Rows and columns of t, the last two axes; the earlier ones are batches."""
    steps = [s // t.dtype.block_bytes for s in t.strides]
    if t.dtype.quantised:
        steps = [t.shape[-1], 1]  # weights are counted, not bytes
    row, k = (steps[-1], steps[-2]) if is_transposed else (steps[-2], steps[-1])
    own_batches = (1,) * (4 - len(t.shape)) + t.shape[:-2]
    along = (0,) * (4 - len(t.shape)) + (*steps[:-2],)
    repeats = tuple(many // max(few, 1) for many, few in zip(batches, own_batches, strict=True))
    return Factor(row, k, (along[0], along[1]), (repeats[0], repeats[1]), t.dtype)


def gaps_in(*tensors: Tensor) -> str | None:
    """What a kernel lacks that wants all rows one behind the other; None if they lie so."""
    apart = next((t for t in tensors if not t.is_contiguous), None)
    return None if apart is None else f"the rows of {apart!r} have gaps between them"


@dataclass(frozen=True, slots=True)
class SizedProduct:
    """Sizes and factors; each device adds how it computes one."""

    m: int
    n: int
    k: int
    a: Factor
    b: Factor
    batches: tuple[int, int] = (1, 1)


def sides_of(node: Tensor) -> tuple[int, int, int, Factor, Factor, tuple[int, int]]:
    """What a `SizedProduct` has of a node's: mul_mat, out_prod, and those that add to a result."""
    assert node.op is not None
    b, a = node.src[-2:]
    is_transposed = node.op.name.startswith("out_prod")
    outer, inner = (1,) * (4 - len(node.shape)) + node.shape[:-2]
    m, n = node.shape[-2:]
    k = a.shape[-2] if is_transposed else a.shape[-1]
    of_a, of_b = (factor_of(t, (outer, inner), is_transposed) for t in (a, b))
    return m, n, k, of_a, of_b, (outer, inner)
