"""Numbers in memory that all threads of the process share: read and written whole, in one order.

An address is that of 64 bits; compiled code gets it by the name of the memory that it lies in
(`word`), so that code kept on disk holds no address.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pyggml.jit.llvm import I32, I64, declare_intrinsic

SYMBOL = "pyggml_pool"  # the name by which compiled code finds the words
_ORDER = "seq_cst"
_BYTES = 8


def word(builder: Any, i: Any) -> Any:
    """Pointer to word i of the memory."""
    module = builder.module
    memory = module.globals.get(SYMBOL)
    if memory is None:
        memory = ir.GlobalVariable(module, I64, SYMBOL)
        memory.linkage = "external"
    return builder.gep(memory, [i])


@intrinsic
def load(typing: Any, i: Any) -> Any:
    """Word i."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(word(builder, arguments[0]), _ORDER, _BYTES)

    return types.int64(types.int64), codegen


def _writes(order: str) -> Any:
    def write(typing: Any, i: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store_atomic(arguments[1], word(builder, arguments[0]), order, _BYTES)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return intrinsic(write)


store = _writes(_ORDER)  # store(i, value): word i, before this thread reads on
write = _writes("release")  # write(i, value): word i, after what this thread wrote so far


@intrinsic
def swap(typing: Any, i: Any, value: Any) -> Any:
    """Write word i; what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("xchg", word(builder, arguments[0]), arguments[1], _ORDER)

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchange_if(typing: Any, i: Any, old: Any, value: Any) -> Any:
    """Write word i if it is the old one still; what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i, old, value = arguments
        pair = builder.cmpxchg(word(builder, i), old, value, _ORDER, _ORDER)
        return builder.extract_value(pair, 0)

    return types.int64(*(types.int64,) * 3), codegen


@intrinsic
def add_at(typing: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address, of any memory; what it was before."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        there = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", there, arguments[1], _ORDER)

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def exchange_at(typing: Any, address: Any, old: Any, value: Any) -> Any:
    """`exchange_if` of the word at an address."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, old, value = arguments
        there = builder.inttoptr(address, I64.as_pointer())
        return builder.extract_value(builder.cmpxchg(there, old, value, _ORDER, _ORDER), 0)

    return types.int64(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typing: Any) -> Any:
    """Let a core that waits for another's write take a breath, 5 to 50 ns."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            name, operands = "llvm.x86.sse2.pause", []
        elif machine in ("arm64", "aarch64"):  # YIELD does nothing on most of them
            name, operands = "llvm.aarch64.isb", [I32(15)]
        else:
            return context.get_dummy_value()
        pause = declare_intrinsic(builder, name, ir.VoidType(), [o.type for o in operands])
        builder.call(pause, operands)
        return context.get_dummy_value()

    return types.void(), codegen
