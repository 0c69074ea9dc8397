"""All weight types by ggml's name, and the types of other tensors."""

from pyggml.errors import QuantError
from pyggml.graph.dtypes import F64, I8, I16, I32, I64, DType, dtype
from pyggml.quants.base import Quant
from pyggml.quants.types.blocks32 import Q4_0, Q5_0, Q8_0, Q8_1
from pyggml.quants.types.blocks32_min import Q4_1, Q5_1
from pyggml.quants.types.few_bits import Q1_0, Q2_0, TQ1_0, TQ2_0
from pyggml.quants.types.fp4 import MXFP4, NVFP4
from pyggml.quants.types.iq4 import IQ4_NL, IQ4_XS
from pyggml.quants.types.iq_grids import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from pyggml.quants.types.kquants_min import Q2_K, Q4_K, Q5_K
from pyggml.quants.types.kquants_sym import Q3_K, Q6_K
from pyggml.quants.types.plain import BF16, F16, F32

QUANTS: dict[str, Quant] = {
    q.dtype.name: q
    for q in (
        *(F32, F16, BF16, Q8_0, Q8_1, Q4_0, Q4_1, Q5_0, Q5_1),
        *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
        *(IQ4_XS, IQ4_NL, IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_M, IQ1_S),
        *(Q1_0, Q2_0, TQ1_0, TQ2_0, MXFP4, NVFP4),
    )
}


# Types of indices, counts and tables: read as they are, no operands of products, not written.
NUMBERS: tuple[DType, ...] = (F64, I8, I16, I32, I64)


def quant(name: str) -> Quant:
    """The declaration of this weight type. QuantError lists the known types."""
    d = dtype(name)
    declaration = QUANTS.get(d.name)
    if declaration is None:
        what = "holds numbers, not weights" if d in NUMBERS else "is not for tensors in files"
        raise QuantError(f"the type {d.name} {what}; weight types are {', '.join(QUANTS)}")
    return declaration
