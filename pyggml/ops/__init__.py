"""Every family of ops is imported here, so that OPS is complete; the builders are exported."""

from pyggml.ops.arith import add, add1, add_inplace, div, mul, neg, scale, sub
from pyggml.ops.layout import cont, cpy, dup, permute, reshape, transpose
from pyggml.ops.repeat import repeat, repeat_back
from pyggml.tensor import OPS

__all__ = [
    "OPS",
    "add",
    "add1",
    "add_inplace",
    "cont",
    "cpy",
    "div",
    "dup",
    "mul",
    "neg",
    "permute",
    "repeat",
    "repeat_back",
    "reshape",
    "scale",
    "sub",
    "transpose",
]
