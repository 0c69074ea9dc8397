"""Functions without branches as LLVM's code: Numba takes a millisecond to compile each of their
statements, of which products of packed weights have thousands.

Such a function assigns names, calls instructions and other such functions, and returns numbers.
Whole numbers stay as wide as NumPy has them: two uint32 make a uint32, where Numba's make a uint64.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from textwrap import dedent
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils

from pyggml.backends.cuda.code.jit import intrinsic

_OF_INTEGERS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.BitAnd: "and_", ast.BitOr: "or_",
    ast.BitXor: "xor", ast.LShift: "shl",
}  # fmt: skip
_OF_FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul"}
_TYPES = {np.int32: types.int32, np.uint32: types.uint32, np.int64: types.int64,
          np.float32: types.float32}  # fmt: skip


def floats(n: int) -> Any:
    """Numba's type of n float32."""
    return types.UniTuple(types.float32, n)


def straight(function: Callable, returns: Any) -> Any:
    """The function as an instruction that kernels call; returns: Numba's type of its result."""

    def run(typing: Any, *arguments: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            lines = _Lines(context, builder)
            result = lines.run(function, list(map(lines.parts, arguments, values)))
            return lines.whole(result)[1]

        return returns(*arguments), emit

    first, own = inspect.signature(run).parameters, inspect.signature(function).parameters
    named = inspect.Signature([first["typing"], *own.values()])
    vars(run)["__signature__"] = named  # which Numba asks for
    return intrinsic(run)


@cache
def _definition_of(function: Callable) -> ast.FunctionDef:
    """The function, of its `text` where it was made of one."""
    text = vars(function).get("text") or dedent(inspect.getsource(function))
    (definition,) = ast.parse(text).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


@cache
def _names_of(function: Callable) -> dict[str, Any]:
    variables = inspect.getclosurevars(function)
    return {**variables.globals, **variables.nonlocals}


class _Lines:
    """What emits functions. A value is a type with LLVM's value, a tuple of values as a list, or
    what Python has: a number, a function, a module."""

    def __init__(self, context: Any, builder: Any) -> None:
        self._context, self._builder = context, builder

    def run(self, function: Callable, given: list[Any]) -> Any:
        definition, names = _definition_of(function), dict(_names_of(function))
        names |= zip((a.arg for a in definition.args.args), given, strict=True)
        for line in definition.body:
            match line:
                case ast.Assign(targets=[ast.Name(id=name)], value=of):
                    names[name] = self._value(names, of)
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=of):
                    words = (target.id for target in targets if isinstance(target, ast.Name))
                    names |= zip(words, self._value(names, of), strict=True)
                case ast.AugAssign(target=ast.Name(id=name), op=op, value=of):
                    names[name] = self._of_two(op, names[name], self._value(names, of))
                case ast.Return(value=ast.expr() as of):
                    return self._value(names, of)
                case ast.Expr(value=ast.Constant()):  # a docstring
                    pass
                case _:
                    raise TypeError(f"{function.__name__} is not straight: {ast.unparse(line)}")
        raise TypeError(f"{function.__name__} returns nothing")

    def _value(self, names: dict[str, Any], node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=number):
                return number
            case ast.Name(id=name):
                return names[name]
            case ast.Attribute(value=of, attr=name):
                return getattr(self._value(names, of), name)
            case ast.Tuple(elts=parts):
                return [self._value(names, part) for part in parts]
            case ast.Subscript(value=of, slice=at):
                return self._value(names, of)[self._value(names, at)]
            case ast.UnaryOp(op=op, operand=of):
                return self._of_one(op, self._value(names, of))
            case ast.BinOp(left=left, op=op, right=right):
                return self._of_two(op, self._value(names, left), self._value(names, right))
            case ast.IfExp(test=test, body=body, orelse=other):
                kind, x, y = self._same(self._value(names, body), self._value(names, other))
                return kind, self._builder.select(self._is_so(self._value(names, test)), x, y)
            case ast.Compare(left=left, ops=[ast.Lt() | ast.Eq() as op], comparators=[right]):
                _, x, y = self._same(self._value(names, left), self._value(names, right))
                sign = "<" if isinstance(op, ast.Lt) else "=="
                return types.boolean, self._builder.icmp_unsigned(sign, x, y)
            case ast.Call(func=function, args=arguments):
                called = self._value(names, function)
                return self._call(called, [self._value(names, one) for one in arguments])
        raise TypeError(f"not straight: {ast.unparse(node)}")

    def _with_type(self, value: Any, otherwise: Any = types.int64) -> tuple[Any, Any]:
        """Of a number of Python the type is `otherwise`."""
        if isinstance(value, tuple):
            return value
        kind = _TYPES.get(type(value), otherwise)
        return kind, self._context.get_constant(kind, value)

    def _is_so(self, value: Any) -> Any:
        kind, x = self._with_type(value)
        return x if kind is types.boolean else self._builder.icmp_signed("!=", x, x.type(0))

    def _same(self, left: Any, right: Any) -> tuple[Any, Any, Any]:
        """Two numbers, and the type that both have."""
        kinds = [v[0] if isinstance(v, tuple) else _TYPES.get(type(v)) for v in (left, right)]
        kind = next(filter(None, kinds), types.int64)
        (kind, x), (other, y) = self._with_type(left, kind), self._with_type(right, kind)
        if kind != other:
            raise TypeError(f"{kind} and {other} in one operation")
        return kind, x, y

    def _of_one(self, op: ast.unaryop, value: Any) -> Any:
        kind, x = self._with_type(value)
        if isinstance(op, ast.Invert):
            return kind, self._builder.not_(x)
        if kind is types.float32:  # of which NVVM has no negative
            return kind, self._builder.fsub(x.type(-0.0), x)
        return kind, self._builder.neg(x)

    def _of_two(self, op: ast.operator, left: Any, right: Any) -> Any:
        kind, x, y = self._same(left, right)
        if isinstance(op, ast.RShift):
            return kind, (self._builder.ashr if kind.signed else self._builder.lshr)(x, y)
        name = (_OF_FLOATS if kind is types.float32 else _OF_INTEGERS)[type(op)]
        return kind, getattr(self._builder, name)(x, y)

    def _call(self, function: Any, given: list[Any]) -> Any:
        if function in _TYPES:
            kind = _TYPES[function]
            of, x = self._with_type(given[0], kind)
            return kind, self._context.cast(self._builder, x, of, kind)
        if hasattr(function, "py_func"):
            return self.run(function.py_func, given)
        kinds, values = zip(*map(self.whole, given), strict=True)
        signature, emit = function._defn(None, *kinds)
        cast = [
            self._context.cast(self._builder, *both)
            for both in zip(values, kinds, signature.args, strict=True)
        ]
        result = emit(self._context, self._builder, signature, cast)
        return self.parts(signature.return_type, result)

    def parts(self, kind: Any, value: Any) -> Any:
        """The value; of a tuple those of its parts."""
        if not isinstance(kind, types.BaseTuple):
            return kind, value
        return list(map(self.parts, kind.types, cgutils.unpack_tuple(self._builder, value)))

    def whole(self, value: Any) -> Any:
        """What `parts` takes apart."""
        if not isinstance(value, list):
            return self._with_type(value)
        kinds, values = zip(*map(self.whole, value), strict=True)
        kind = types.Tuple(kinds)
        return kind, self._context.make_tuple(self._builder, kind, values)
