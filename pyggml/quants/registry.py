"""All weight types by ggml's name, which are those that the files of `types/` declare; and the
types of other tensors."""

from pyggml.errors import QuantError
from pyggml.files.declared import declared_in
from pyggml.graph.dtypes import DTYPES, F64, I8, I16, I32, I64, DType, dtype
from pyggml.quants import types
from pyggml.quants.base import Quant

_BY_DTYPE = {q.dtype: q for q in declared_in(types.__name__, types.__path__, Quant)}

# In the order of ggml's table of types.
QUANTS: dict[str, Quant] = {d.name: _BY_DTYPE[d] for d in DTYPES.values() if d in _BY_DTYPE}

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
