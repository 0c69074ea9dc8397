"""Instructions of products with bytes (gemm/packed_dots.py): shared memory read and written by the
byte, products of four bytes, and the order of kernels. Numba's simulator has none of them.

Addresses count bytes from the start of an array in shared memory, as in ptx.py.
"""

from __future__ import annotations

from typing import Any

from pyggml.backends.cuda.driver import SIMULATED

if not SIMULATED:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    from pyggml.backends.cuda.ptx import plain

    _BYTE, _SHORT, _WORD, _LONG = (ir.IntType(n) for n in (8, 16, 32, 64))
    _FLOAT, _ANY = ir.FloatType(), _BYTE.as_pointer()
    _SHARED = 3  # an address space

    def _pure(builder: Any, text: str, result: Any, names: str, operands: Any) -> Any:
        """Inline PTX whose result depends on its operands alone."""
        form = ir.FunctionType(result, [o.type for o in operands])
        call = builder.asm(form, text, names, operands, False)
        call.attributes.add("readnone")
        return call

    def _shared(context: Any, builder: Any, kind: Any, place: Any, to: Any) -> Any:
        """What lies at a byte of an array in shared memory, of LLVM type `to`."""
        return builder.load(_shared_pointer(context, builder, kind, place, to))

    def _shared_pointer(context: Any, builder: Any, kind: Any, place: Any, to: Any) -> Any:
        array, at = place
        start = builder.bitcast(context.make_array(kind)(context, builder, array).data, _ANY)
        start = builder.addrspacecast(start, _BYTE.as_pointer(_SHARED))
        return builder.bitcast(builder.gep(start, [at]), to.as_pointer(_SHARED))

    def _shared_number(to: Any, widen: str, result: Any) -> Any:
        @intrinsic
        def load(typing, shared, at):
            def emit(context, builder, signature, arguments):
                found = _shared(context, builder, shared, arguments, to)
                wide = _WORD if result is types.uint32 else _FLOAT
                return getattr(builder, widen)(found, wide) if widen else found

            return result(shared, types.int64), emit

        return load

    def _shared_words(n: int) -> Any:
        @intrinsic
        def load(typing, shared, at):
            def emit(context, builder, signature, arguments):
                kind = ir.VectorType(_WORD, n)
                vector = _shared(context, builder, shared, arguments, kind)
                places = (ir.Constant(_WORD, i) for i in range(n))
                words = [builder.extract_element(vector, i) for i in places]
                return context.make_tuple(builder, signature.return_type, words)

            return types.Tuple([types.uint32] * n)(shared, types.int64), emit

        return load

    # What lies at byte `at` of an array in shared memory: uint32, of a half float32.
    shared_byte = _shared_number(_BYTE, "zext", types.uint32)
    shared_short = _shared_number(_SHORT, "zext", types.uint32)
    shared_half = _shared_number(ir.HalfType(), "fpext", types.float32)
    shared_word = _shared_number(_WORD, "", types.uint32)
    shared_pair, shared_words = _shared_words(2), _shared_words(4)

    def _put_shared(context: Any, builder: Any, kind: Any, arguments: Any) -> Any:
        array, at, *words = arguments
        vector = ir.Constant(ir.VectorType(_WORD, len(words)), ir.Undefined)
        for i, word in enumerate(words):
            vector = builder.insert_element(vector, word, ir.Constant(_WORD, i))
        to = _shared_pointer(context, builder, kind, (array, at), vector.type)
        builder.store(vector, to)
        return context.get_dummy_value()

    @intrinsic
    def put_shared_pair(typing, shared, at, a, b):
        """Two uint32 to the eight bytes at `at` of shared memory."""

        def emit(context, builder, signature, arguments):
            return _put_shared(context, builder, shared, arguments)

        return types.void(shared, types.int64, types.uint32, types.uint32), emit

    @intrinsic
    def put_shared_words(typing, shared, at, a, b, c, d):
        """Four uint32 to the 16 bytes at `at` of shared memory."""

        def emit(context, builder, signature, arguments):
            return _put_shared(context, builder, shared, arguments)

        word = types.uint32
        return types.void(shared, types.int64, word, word, word, word), emit

    @intrinsic
    def dot_bytes(typing, a, b, c):
        """c + the sum of four products of signed bytes of the words a and b."""

        def emit(context, builder, signature, arguments):
            text = "dp4a.s32.s32 $0, $1, $2, $3;"
            return _pure(builder, text, _WORD, "=r,r,r,r", arguments)

        return types.int32(types.uint32, types.uint32, types.int32), emit

    @intrinsic
    def pick_bytes(typing, low, high, which):
        """Four of the bytes of two words; bits 4i to 4i + 2 of `which` say which is byte i."""

        def emit(context, builder, signature, arguments):
            return _pure(builder, "prmt.b32 $0, $1, $2, $3;", _WORD, "=r,r,r,r", arguments)

        return types.uint32(types.uint32, types.uint32, types.uint32), emit

    await_grid = plain("griddepcontrol.wait;")
    release_grid = plain("griddepcontrol.launch_dependents;")
