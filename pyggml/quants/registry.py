"""All tensor types that can be unpacked, by ggml's name."""

from __future__ import annotations

from pyggml.dtypes import dtype
from pyggml.errors import QuantError
from pyggml.quants.base import Quant
from pyggml.quants.blocks32 import Q4_0, Q5_0, Q8_0
from pyggml.quants.kquants_min import Q4_K, Q5_K
from pyggml.quants.kquants_sym import Q6_K
from pyggml.quants.plain import BF16, F16, F32

QUANTS: dict[str, Quant] = {
    q.dtype.name: q for q in (F32, F16, BF16, Q8_0, Q4_0, Q5_0, Q4_K, Q5_K, Q6_K)
}


def quant(name: str) -> Quant:
    """The declaration of this tensor type; QuantError lists the known ones if there is none."""
    found = QUANTS.get(dtype(name).name)
    if found is None:
        raise QuantError(
            f"tensors of type {name} cannot be unpacked; known are {', '.join(QUANTS)}"
        )
    return found
