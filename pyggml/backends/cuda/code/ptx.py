"""Instructions that Numba has no name for: loads of several bytes, and NVIDIA's tensor cores.

Each is a device function. Numba's simulator has no PTX: simulator.py has what takes its place, and
products take a path without tensor cores (`TENSOR_CORES` is False).

Addresses count bytes from the start of a flat array; a load of n bytes starts at a multiple of n.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.targetconfig import ConfigStack

from pyggml.backends.cuda.code.jit import device, intrinsic
from pyggml.backends.cuda.runtime.simulator import HAS_PTX

TENSOR_CORES = HAS_PTX

_BYTE, _SHORT, _WORD, _LONG = (ir.IntType(n) for n in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_TWO_WORDS: Any = types.Tuple([types.uint32] * 2)
_FOUR_WORDS: Any = types.Tuple([types.uint32] * 4)


def _pointer(context: Any, builder: Any, kind: Any, place: Any, to: Any) -> Any:
    """A pointer of LLVM type `to`; place: an array, and a byte of it."""
    array, at = place
    start = builder.ptrtoint(context.make_array(kind)(context, builder, array).data, _LONG)
    return builder.inttoptr(builder.add(start, at), to.as_pointer())


def shared_address(context: Any, builder: Any, kind: Any, place: Any) -> Any:
    """The 32-bit address of a byte of an array in shared memory. That of the array is found
    once, and what is added to it takes no 64-bit arithmetic."""
    array, at = place
    start = builder.ptrtoint(context.make_array(kind)(context, builder, array).data, _LONG)
    convert = "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }"
    form = ir.FunctionType(_WORD, [_LONG])
    base = builder.asm(form, convert, "=r,l", [start], False)
    return builder.add(base, builder.trunc(at, _WORD))


def assemble(builder: Any, text: str, results: list, operands: list, names: str) -> list:
    """Inline PTX with several results of one LLVM type."""
    kind = ir.LiteralStructType(results)
    form = ir.FunctionType(kind, [o.type for o in operands])
    packed = builder.asm(form, text, names, operands, True)
    return [builder.extract_value(packed, i) for i in range(len(results))]


def _of_bytes(name: str, kind: Any, result: Any, widened: Any = None) -> Any:
    """(raw, at): the number of an LLVM type at byte `at`, of which the type `result` is made."""

    def load(typing, raw, at):
        def emit(context, builder, signature, arguments):
            x = builder.load(_pointer(context, builder, raw, arguments, kind))
            return widened(builder, x) if widened else x

        return result(raw, types.int64), emit

    load.__name__ = name
    return intrinsic(load)


def _to_word(builder: Any, x: Any) -> Any:
    return builder.zext(x, _WORD)


load_half = _of_bytes("load_half", ir.HalfType(), types.float32, lambda b, x: b.fpext(x, _FLOAT))
load_byte = _of_bytes("load_byte", _BYTE, types.uint32, _to_word)
load_short = _of_bytes("load_short", _SHORT, types.uint32, _to_word)
load_word = _of_bytes("load_word", _WORD, types.uint32)


def _load_words(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    n = len(signature.return_type)
    kind = ir.VectorType(_WORD, n)
    vector = builder.load(_pointer(context, builder, signature.args[0], arguments, kind))
    words = [builder.extract_element(vector, ir.Constant(_WORD, i)) for i in range(n)]
    return context.make_tuple(builder, signature.return_type, words)


@intrinsic
def load_words(typing, raw, at):
    """The 16 bytes at `at` as four uint32."""
    return _FOUR_WORDS(raw, types.int64), _load_words


@intrinsic
def load_pair(typing, raw, at):
    """The 8 bytes at `at` as two uint32."""
    return _TWO_WORDS(raw, types.int64), _load_words


def _store_words(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array, at, *words = arguments
    vector = ir.Constant(ir.VectorType(_WORD, len(words)), ir.Undefined)
    for i, word in enumerate(words):
        vector = builder.insert_element(vector, word, ir.Constant(_WORD, i))
    builder.store(vector, _pointer(context, builder, signature.args[0], (array, at), vector.type))
    return context.get_dummy_value()


@intrinsic
def store_words(typing, raw, at, a, b, c, d):
    """Four uint32 to the 16 bytes at `at`."""
    return types.void(raw, types.int64, *[types.uint32] * 4), _store_words


@intrinsic
def store_pair(typing, raw, at, a, b):
    """Two uint32 to the eight bytes at `at`."""
    return types.void(raw, types.int64, *[types.uint32] * 2), _store_words


@intrinsic
def store_word(typing, raw, at, word):
    """A uint32 to the four bytes at `at`."""

    def emit(context, builder, signature, arguments):
        array, at, word = arguments
        builder.store(word, _pointer(context, builder, raw, (array, at), _WORD))
        return context.get_dummy_value()

    return types.void(raw, types.int64, types.uint32), emit


@intrinsic
def as_float(typing, word):
    """The float32 of these bits (uint32)."""
    return types.float32(types.uint32), lambda _, b, __, words: b.bitcast(words[0], _FLOAT)


@intrinsic
def bits_of(typing, x):
    """The bits of a float32, as uint32."""
    return types.uint32(types.float32), lambda _, b, __, floats: b.bitcast(floats[0], _WORD)


def _two_of(name: str, number: str) -> Any:
    def two(typing, first, second):
        def emit(context, builder, signature, arguments):
            first, second = arguments
            form = ir.FunctionType(_WORD, [_FLOAT, _FLOAT])
            text = f"cvt.rn.{number}x2.f32 $0, $2, $1;"
            return builder.asm(form, text, "=r,f,f", [first, second], False)

        return types.uint32(types.float32, types.float32), emit

    two.__name__ = name
    return intrinsic(two)


# two floats rounded (ties to even), as uint32: the first in the low bits
two_bf16 = _two_of("two_bf16", "bf16")
two_f16 = _two_of("two_f16", "f16")


def _of_one_float(name: str, instruction: str) -> Any:
    def of_one_float(typing, x):
        def emit(context, builder, signature, arguments):
            form = ir.FunctionType(_FLOAT, [_FLOAT])
            return builder.asm(form, f"{instruction} $0, $1;", "=f,f", [*arguments], False)

        return types.float32(types.float32), emit

    of_one_float.__name__ = name
    return intrinsic(of_one_float)


power_of_two = _of_one_float("power_of_two", "ex2.approx.ftz.f32")  # to two units of the last place
reciprocal = _of_one_float("reciprocal", "rcp.approx.ftz.f32")  # to one
inverse_root = _of_one_float("inverse_root", "rsqrt.approx.ftz.f32")  # to two
logarithm_of_two = _of_one_float("logarithm_of_two", "lg2.approx.ftz.f32")  # to 2⁻²² of one


def _add_tile_of(name: str, number: str) -> Any:
    """sums[i] += A·B of a warp: mma.sync.m16n8k16 with float32 sums (…, 4).

    sums[i] is four floats, a four and b two uint32 of two numbers each, laid out over the warp's
    lanes as the PTX manual says: lane l = 4g + t holds rows g and g + 8, columns 2t and 2t + 1.
    What Numba makes of four loads and stores would take most of a kernel's compilation.
    """
    operation = f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 "
    text = operation + "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    names = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"

    def add(typing, sums, i, a, b0, b1):
        def emit(context, builder, signature, arguments):
            array, i, a, b0, b1 = arguments
            data = context.make_array(sums)(context, builder, array).data
            first = builder.gep(data, [builder.mul(i, ir.Constant(_LONG, 4))])
            places = [builder.gep(first, [ir.Constant(_LONG, e)]) for e in range(4)]
            operands = [*cgutils.unpack_tuple(builder, a, 4), b0, b1, *map(builder.load, places)]
            results = assemble(builder, text, [_FLOAT] * 4, operands, names)
            for number, place in zip(results, places, strict=True):
                builder.store(number, place)
            return context.get_dummy_value()

        word = types.uint32
        return types.void(sums, types.int64, _FOUR_WORDS, word, word), emit

    add.__name__ = name
    return intrinsic(add)


add_tile = _add_tile_of("add_tile", "bf16")
add_tile_of_f16 = _add_tile_of("add_tile_of_f16", "f16")


def _load_matrices(suffix: str) -> tuple[Any, Any]:
    """(shared, at) and (shared, at, flip): four 8×8 matrices of 16-bit numbers. Lane l gives
    the address of row l % 8 of matrix l // 8: byte `at`, in the second the bits `flip` of the
    address turned over."""

    def emit(context, builder, signature, arguments):
        address = shared_address(context, builder, signature.args[0], arguments[:2])
        if len(arguments) == 3:
            address = builder.xor(address, builder.trunc(arguments[2], _WORD))
        text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0,$1,$2,$3}}, [$4];"
        words = assemble(builder, text, [_WORD] * 4, [address], "=r,=r,=r,=r,r")
        return context.make_tuple(builder, signature.return_type, words)

    @intrinsic
    def load(typing, shared, at):
        return _FOUR_WORDS(shared, types.int64), emit

    @intrinsic
    def load_flipped(typing, shared, at, flip):
        return _FOUR_WORDS(shared, types.int64, types.int64), emit

    return load, load_flipped


load_matrices, load_flipped_matrices = _load_matrices("")
load_matrices_transposed, load_flipped_matrices_transposed = _load_matrices(".trans")


@intrinsic
def copy_16(typing, shared, to, source, at, n_bytes):
    """Start a copy of 16 bytes to shared memory; of them n_bytes are read, the rest are 0."""

    def emit(context, builder, signature, arguments):
        to_array, to, from_array, at, n = arguments
        address = shared_address(context, builder, shared, (to_array, to))
        pointer = _pointer(context, builder, source, (from_array, at), _BYTE)
        operands = [address, builder.ptrtoint(pointer, _LONG), n]
        form = ir.FunctionType(ir.VoidType(), [_WORD, _LONG, _WORD])
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        builder.asm(form, text, "r,l,r", operands, True)
        return context.get_dummy_value()

    return types.void(shared, types.int64, source, types.int64, types.int32), emit


@intrinsic
def take_ticket(typing, tickets, at, last):
    """tickets[at], which becomes one more, 0 after `last`. What was written before it
    is seen by all that read after it. Numba's fence would do the same, but wait longer."""

    def emit(context, builder, signature, arguments):
        array, at, last = arguments
        place = builder.mul(at, ir.Constant(_LONG, 4))
        pointer = _pointer(context, builder, tickets, (array, place), _WORD)
        operands = [builder.ptrtoint(pointer, _LONG), last]
        form = ir.FunctionType(_WORD, [_LONG, _WORD])
        text = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
        return builder.asm(form, text, "=r,l,r,~{memory}", operands, True)

    return types.uint32(tickets, types.int64, types.uint32), emit


def plain(text: str, since: tuple[int, int] = (0, 0)) -> Any:
    """An instruction without operands; nothing on cards before the compute capability."""

    @intrinsic
    def instruction(typing):
        def emit(context, builder, signature, arguments):
            form = ir.FunctionType(ir.VoidType(), [])
            if ConfigStack().top().compute_capability >= since:
                builder.asm(form, text, "~{memory}", [], True)
            return context.get_dummy_value()

        return types.void(), emit

    return instruction


commit_copies = plain("cp.async.commit_group;")
await_copies = plain("cp.async.wait_group 0;")
await_all_but_one = plain("cp.async.wait_group 1;")
await_all_but_two = plain("cp.async.wait_group 2;")


@device
def bf16_bits(x):
    """A float rounded to bfloat16 (ties to even), as uint16; NaN stays NaN."""
    return np.uint16(two_bf16(x, np.float32(0)) & np.uint32(0xFFFF))


@device
def put_four_bf16(out, i, a, b, c, d):
    """out[i …] = four floats rounded to bfloat16; out (uint16) and i are aligned to four."""
    store_pair(out, 2 * i, two_bf16(a, b), two_bf16(c, d))


@device
def put_eight_bf16(out, i, a, b, c, d, e, f, g, h):
    """The same of eight."""
    words = two_bf16(a, b), two_bf16(c, d), two_bf16(e, f), two_bf16(g, h)
    store_words(out, 2 * i, words[0], words[1], words[2], words[3])


@device
def put_eight(out, i, a, b, c, d, e, f, g, h):
    """out[i …] = eight floats; out (float32) and i are aligned to four."""
    store_words(out, 4 * i, bits_of(a), bits_of(b), bits_of(c), bits_of(d))
    store_words(out, 4 * i + 16, bits_of(e), bits_of(f), bits_of(g), bits_of(h))


@device
def _put_two_floats(out, at, a, b):
    store_pair(out, 4 * at, bits_of(a), bits_of(b))


@device
def _put_two_bf16(out, at, a, b):
    store_word(out, 2 * at, two_bf16(a, b))


def put_two(in_bf16: bool) -> Any:
    """What writes two neighbours to an array of bfloat16, or else of float32; `at` is even."""
    return _put_two_bf16 if in_bf16 else _put_two_floats
