"""Operands of a formula whose value a kernel needs: F32 or BF16, four neighbours at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from pyggml.backends.cuda.driver import cuda, device, kernel
from pyggml.backends.cuda.fours import loader, put_four_bf16
from pyggml.backends.cuda.glu import OF_THREE, OF_TWO
from pyggml.backends.cuda.launch import per_element
from pyggml.backends.cuda.unpack import rounded
from pyggml.call import Call
from pyggml.dtypes import BF16
from pyggml.tensors import Tensor

Types = tuple[bool, ...]  # of each operand: whether it is BF16
FORMULAS = frozenset((*OF_TWO, *OF_THREE))


def formula_of(node: Tensor) -> str:
    """The formula that a node computes of its operands; none: it has one operand."""
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
    """load(x, y, z, at): four neighbours of the formula's value; at is a multiple of four."""
    first, second, third = (loader(t) for t in (*types, False, False)[:3])
    if formula in OF_TWO:
        of_two = OF_TWO[formula]

        @device
        def load_two(x, y, z, at):
            a, b = first(x, at), second(y, at)
            return of_two(a[0], b[0]), of_two(a[1], b[1]), of_two(a[2], b[2]), of_two(a[3], b[3])

        return load_two
    if formula in OF_THREE:
        of_three = OF_THREE[formula]

        @device
        def load_three(x, y, z, at):
            a, b, c = first(x, at), second(y, at), third(z, at)
            return (
                of_three(a[0], b[0], c[0]),
                of_three(a[1], b[1], c[1]),
                of_three(a[2], b[2], c[2]),
                of_three(a[3], b[3], c[3]),
            )

        return load_three

    @device
    def load(x, y, z, at):
        return first(x, at)

    return load


@cache
def _kernel(formula: str, types: Types) -> Any:
    load = loader_of(formula, types)

    @kernel
    def round_formula(out, x, y, z):
        for i in range(cuda.grid(1), out.size // 4, cuda.gridsize(1)):
            a, b, c, d = load(x, y, z, 4 * i)
            put_four_bf16(out, 4 * i, a, b, c, d)

    return round_formula


def rounded_formula(
    out: Any, arrays: Sequence[Any], formula: str, types: Types, stream: Any
) -> Call:
    """A call that rounds a formula's value to bfloat16 in out (uint16), a multiple of four long."""
    if not formula:
        return rounded(out, arrays[0], stream)
    return per_element(_kernel(formula, types), out.size // 4, stream, out, *three(arrays))
