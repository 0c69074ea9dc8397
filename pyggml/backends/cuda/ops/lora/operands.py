"""Operands of a formula whose value a kernel needs: F32 or BF16, eight neighbours at a time."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import QUICK, lanes_of
from pyggml.backends.cuda.code.fours import eights
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.glu import GRADIENTS, UNITS
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.weights.unpack import round_to_bfloat16
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Tensor

Types = tuple[bool, ...]  # of each operand: whether it is BF16
FORMULAS = UNITS | GRADIENTS


def formula_of(node: Tensor) -> str:
    """The name of the formula that a node computes of its operands; "" if it has one operand."""
    return node.params.get("formula", "")


def types_of(operands: Sequence[Tensor]) -> Types:
    return tuple(t.dtype is BF16 for t in operands)


def three(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """As many as a loader takes."""
    return (*arrays, arrays[0], arrays[0])[:3]


def is_ready(operands: Sequence[Tensor], node: Tensor) -> bool:
    """Whether the value is in memory, in bfloat16."""
    return not formula_of(node) and operands[0].dtype is BF16


@cache
def loader_of(formula: str, types: Types) -> Any:
    """load(x, y, z, at): eight neighbours of the formula's value, or of x if its name is empty; at
    is a multiple of eight."""
    first, second, third = (eights(t) for t in (*types, False, False)[:3])
    lanes: Any = lanes_of(FORMULAS[formula], 8, QUICK) if formula else None
    if formula in UNITS:

        @device
        def load_two(x, y, z, at):
            return lanes(first(x, at), second(y, at), ())

        return load_two
    if formula:

        @device
        def load_three(x, y, z, at):
            return lanes(first(x, at), second(y, at), third(z, at), ())

        return load_three

    @device
    def load(x, y, z, at):
        return first(x, at)

    return load


@device
def in_words(e):
    """Eight floats rounded to bfloat16, as four words."""
    return (
        ptx.two_bf16(e[0], e[1]),
        ptx.two_bf16(e[2], e[3]),
        ptx.two_bf16(e[4], e[5]),
        ptx.two_bf16(e[6], e[7]),
    )


@cache
def _kernel(formula: str, types: Types) -> Any:
    load = loader_of(formula, types)

    @kernel
    def round_formula(out, x, y, z):
        for i in range(cuda.grid(1), out.size // 8, cuda.gridsize(1)):
            w = in_words(load(x, y, z, 8 * i))
            ptx.store_words(out, 16 * i, w[0], w[1], w[2], w[3])

    return round_formula


def rounded_formula(
    out: Any, arrays: Sequence[Any], formula: str, types: Types, stream: Any
) -> Call:
    """A call that rounds a formula's value to bfloat16 in out (uint16), of a multiple of eight."""
    if not formula:
        return round_to_bfloat16(out, arrays[0], stream)
    return per_element(_kernel(formula, types), out.size // 8, stream, out, *three(arrays))
