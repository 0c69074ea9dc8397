"""Low-rank updates of a model's tensors, and what a graph makes of them.

LoRA      y += s · B(A x)                                  Hu et al. 2021, arXiv:2106.09685
dropout   y += s · B(A drop(x)), in training alone         the same, section 4
DoRA      y  = m / ‖W + s·BA‖ ∘ (W x + s · B(A x))         Liu et al. 2024, arXiv:2402.09353
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from zlib import crc32

from pyggml.errors import AdapterError
from pyggml.graph.tensor import Tensor
from pyggml.ops import add, detach, div, dropout, mul, mul_mat, repeat_back, reshape, scale, sqrt
from pyggml.ops.layout.layout import cont, transpose


@dataclass(frozen=True, slots=True)
class Magnitude:
    """DoRA's lengths of the rows of an updated matrix.

    m         (n_out,) F32, trained
    squares   (n_out,) F32, ‖W_i‖² of the base matrix
    """

    m: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank update of one matrix: y += scale · B(A x), A (r, n_in), B (n_out, r).

    Experts: one A and one B for each, A (n_expert, r, n_in), B (n_expert, n_out, r).
    Tables: row i += scale · B A[i], A (n_rows, r), B (n, r).

    dropout     probability that an element of x is dropped in training; tables have none
    magnitude   DoRA's, of a matrix alone
    n_fixed     so many of the last ranks are to stay as they are (the start that PiSSA subtracts)
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    magnitude: Magnitude | None = None
    n_fixed: int = 0

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def input(self, x: Tensor, draw: Tensor | None) -> Tensor:
        """What A multiplies: x, dropped where there is a draw, that is in training."""
        if draw is None or not self.dropout:
            return x
        return dropout(x, draw, self.dropout, crc32(self.a.name.encode()))

    def row_factors(self, w: Tensor) -> Tensor:
        """DoRA's factor (n_out,) of each output: m_i / ‖W_i + s·(BA)_i‖.

        The length counts as fixed in gradients (section 4.3). No matrix of W's size is made:
        ‖W_i + s·(BA)_i‖² = ‖W_i‖² + Σ_j B_ij · (2s·A Wᵀ + s²·(A Aᵀ)Bᵀ)_ji.
        """
        assert self.magnitude is not None
        n_out, s = w.shape[0], self.scale
        cross = scale(mul_mat(w, self.a), 2 * s)  # (r, n_out)
        own = scale(mul_mat(self.b, mul_mat(self.a, self.a)), s * s)  # (r, n_out)
        products = mul(add(cross, own), cont(transpose(self.b)))
        sums = reshape(repeat_back(products, (1, n_out)), (n_out,))
        return div(self.magnitude.m, detach(sqrt(add(self.magnitude.squares, sums))))


# Full tensor name, such as "blk.0.attn_q.weight" -> its update.
LoraPairs = Mapping[str, LoraPair]


def tensors_of_adapters(adapters: Iterable[LoraPairs]) -> dict[str, Tensor]:
    """Every tensor of some adapters by the name that it has in an adapter's file.

    Raises AdapterError if two of them update one matrix: their names are the same.
    """
    tensors: dict[str, Tensor] = {}
    for pairs in adapters:
        for base, pair in pairs.items():
            if f"{base}.lora_a" in tensors:
                raise AdapterError(f"{base} has two updates, so its gradients have no clear name")
            tensors |= {f"{base}.lora_a": pair.a, f"{base}.lora_b": pair.b}
            if pair.magnitude is not None:
                tensors[f"{base}.lora_magnitude"] = pair.magnitude.m
    return tensors
