"""Numbers in memory that all threads of the process share: read and written whole, in one order.

An address is that of 64 bits; compiled code gets it by the name of the memory that it lies in
(`word`), so that code kept on disk holds no address.
"""

import platform
from typing import Any

from llvmlite import ir
from numba import types

from pyggml.jit.llvm import I32, I64, declare_intrinsic, instruction

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


@instruction(types.int64(types.int64))
def load(builder: Any, i: Any) -> Any:
    """Word i."""
    return builder.load_atomic(word(builder, i), _ORDER, _BYTES)


def _writes(order: str) -> Any:
    @instruction(types.void(types.int64, types.int64))
    def write(builder: Any, i: Any, value: Any) -> None:
        builder.store_atomic(value, word(builder, i), order, _BYTES)

    return write


store = _writes(_ORDER)  # store(i, value): word i, before this thread reads on
write = _writes("release")  # write(i, value): word i, after what this thread wrote so far


@instruction(types.int64(types.int64, types.int64))
def swap(builder: Any, i: Any, value: Any) -> Any:
    """Write word i; what it was before."""
    return builder.atomic_rmw("xchg", word(builder, i), value, _ORDER)


@instruction(types.int64(*(types.int64,) * 3))
def exchange_if(builder: Any, i: Any, old: Any, value: Any) -> Any:
    """Write word i if it is the old one still; what it was before."""
    pair = builder.cmpxchg(word(builder, i), old, value, _ORDER, _ORDER)
    return builder.extract_value(pair, 0)


@instruction(types.int64(types.intp, types.int64))
def add_at(builder: Any, address: Any, value: Any) -> Any:
    """Add to the word at an address, of any memory; what it was before."""
    there = builder.inttoptr(address, I64.as_pointer())
    return builder.atomic_rmw("add", there, value, _ORDER)


@instruction(types.int64(types.intp, types.int64, types.int64))
def exchange_at(builder: Any, address: Any, old: Any, value: Any) -> Any:
    """`exchange_if` of the word at an address."""
    there = builder.inttoptr(address, I64.as_pointer())
    return builder.extract_value(builder.cmpxchg(there, old, value, _ORDER, _ORDER), 0)


@instruction(types.void())
def pause(builder: Any) -> None:
    """Let a core that waits for another's write take a breath, 5 to 50 ns."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        name, operands = "llvm.x86.sse2.pause", []
    elif machine in ("arm64", "aarch64"):  # YIELD does nothing on most of them
        name, operands = "llvm.aarch64.isb", [I32(15)]
    else:
        return
    code = declare_intrinsic(builder, name, ir.VoidType(), [o.type for o in operands])
    builder.call(code, operands)
