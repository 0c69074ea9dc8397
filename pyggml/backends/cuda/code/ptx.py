"""Instructions that Numba has no name for: loads of several bytes, and NVIDIA's tensor cores.

Each is a device function. Numba's simulator has no PTX: simulator.py has what takes its place, and
products take a path without tensor cores (`TENSOR_CORES` is False).

Addresses count bytes from the start of a flat array; a load of n bytes starts at a multiple of n.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.targetconfig import ConfigStack

from pyggml.backends.cuda.code.jit import ANY, device, instruction
from pyggml.backends.cuda.runtime.simulator import HAS_PTX

TENSOR_CORES = HAS_PTX

BYTE, SHORT, WORD, LONG = (ir.IntType(n) for n in (8, 16, 32, 64))
FLOAT = ir.FloatType()
_AT, _UINT, _NUMBER = types.int64, types.uint32, types.float32
FOUR_WORDS: Any = types.UniTuple(types.uint32, 4)


def _pointer(builder: Any, start: Any, at: Any, to: Any) -> Any:
    """A pointer to LLVM type `to`, `at` bytes from `start`."""
    return builder.inttoptr(builder.add(builder.ptrtoint(start, LONG), at), to.as_pointer())


def assemble(
    builder: Any, text: str, names: str, operands: Any, returns: Any = None, has_effect: bool = True
) -> Any:
    """Inline PTX. returns: the LLVM type of the result, or a list of those of several."""
    several, nothing = isinstance(returns, list), ir.VoidType()
    kind = ir.LiteralStructType(returns) if several else returns or nothing
    form = ir.FunctionType(kind, [o.type for o in operands])
    result = builder.asm(form, text, names, [*operands], has_effect)
    if several:
        return [builder.extract_value(result, i) for i in range(len(returns))]
    return None if kind is nothing else result


def shared_address(builder: Any, start: Any, at: Any = None) -> Any:
    """The 32-bit address of a byte of an array in shared memory. That of the array is found
    once, and what is added to it takes no 64-bit arithmetic."""
    convert = "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }"
    start = builder.ptrtoint(start, LONG)
    base = assemble(builder, convert, "=r,l", [start], WORD, has_effect=False)
    return base if at is None else builder.add(base, builder.trunc(at, WORD))


def _instruction_named(name: str, returns: Any, *takes: Any) -> Callable[[Callable[..., Any]], Any]:
    """The same decorator, of one function for several instructions."""

    def declare(emit: Callable[..., Any]) -> Any:
        emit.__name__ = name
        return instruction(returns, *takes)(emit)

    return declare


def _of_bytes(name: str, kind: Any, result: Any, widened: Any = None) -> Any:
    """(raw, at): the number of an LLVM type at byte `at`, of which the type `result` is made."""

    @_instruction_named(name, result, ANY, _AT)
    def load(builder, raw, at):
        x = builder.load(_pointer(builder, raw, at, kind))
        return widened(builder, x) if widened else x

    return load


def _to_word(builder: Any, x: Any) -> Any:
    return builder.zext(x, WORD)


load_half = _of_bytes("load_half", ir.HalfType(), types.float32, lambda b, x: b.fpext(x, FLOAT))
load_byte = _of_bytes("load_byte", BYTE, types.uint32, _to_word)
load_short = _of_bytes("load_short", SHORT, types.uint32, _to_word)
load_word = _of_bytes("load_word", WORD, types.uint32)


def words_loader(n: int, pointer: Callable[..., Any]) -> Any:
    """(array, at): n uint32 from byte `at` on. pointer: as `_pointer`, of the array's memory."""

    @instruction(types.UniTuple(types.uint32, n), ANY, _AT)
    def load(builder, raw, at):
        vector = builder.load(pointer(builder, raw, at, ir.VectorType(WORD, n)))
        return [builder.extract_element(vector, ir.Constant(WORD, i)) for i in range(n)]

    return load


def words_storer(n: int, pointer: Callable[..., Any]) -> Any:
    """(array, at, …): n uint32 to byte `at` on."""

    @instruction(types.void, ANY, _AT, *[types.uint32] * n)
    def store(builder, raw, at, *words):
        vector = ir.Constant(ir.VectorType(WORD, n), ir.Undefined)
        for i, word in enumerate(words):
            vector = builder.insert_element(vector, word, ir.Constant(WORD, i))
        builder.store(vector, pointer(builder, raw, at, vector.type))

    return store


load_pair, load_words = (words_loader(n, _pointer) for n in (2, 4))
store_pair, store_words = (words_storer(n, _pointer) for n in (2, 4))


@instruction(types.void, ANY, _AT, _UINT)
def store_word(builder, raw, at, word):
    """A uint32 to the four bytes at `at`."""
    builder.store(word, _pointer(builder, raw, at, WORD))


@instruction(_NUMBER, _UINT)
def as_float(builder, word):
    """The float32 of these bits (uint32)."""
    return builder.bitcast(word, FLOAT)


@instruction(_UINT, _NUMBER)
def bits_of(builder, x):
    """The bits of a float32, as uint32."""
    return builder.bitcast(x, WORD)


def _words_of(builder: Any, value: Any) -> Iterator[Any]:
    """A word of each number and of each array's address."""
    if isinstance(value, list):
        for one in value:
            yield from _words_of(builder, one)
    elif isinstance(value.type, ir.PointerType):
        yield builder.ptrtoint(value, WORD)
    elif isinstance(value.type, ir.IntType):
        yield (builder.trunc if value.type.width > 32 else builder.zext)(value, WORD)
    else:
        yield builder.bitcast(value, WORD)


@instruction(_UINT, ANY)
def bits_of_all(builder, values):
    """The bits of all numbers and arrays' addresses of a tuple, put together in one word."""
    return reduce(builder.xor, _words_of(builder, values))


def two_in(builder: Any, number: str, first: Any, second: Any) -> Any:
    """Two floats rounded to such 16-bit numbers (ties to even), the first in the low bits."""
    text = f"cvt.rn.{number}x2.f32 $0, $2, $1;"
    return assemble(builder, text, "=r,f,f", [first, second], WORD, has_effect=False)


def _two_of(name: str, number: str) -> Any:
    @_instruction_named(name, _UINT, _NUMBER, _NUMBER)
    def two(builder, first, second):
        return two_in(builder, number, first, second)

    return two


two_bf16, two_f16 = _two_of("two_bf16", "bf16"), _two_of("two_f16", "f16")


def _of_one_float(name: str, operation: str) -> Any:
    @_instruction_named(name, _NUMBER, _NUMBER)
    def of_one_float(builder, x):
        text = f"{operation}.approx.ftz.f32 $0, $1;"
        return assemble(builder, text, "=f,f", [x], FLOAT, has_effect=False)

    return of_one_float


power_of_two = _of_one_float("power_of_two", "ex2")  # to two units of the last place
reciprocal = _of_one_float("reciprocal", "rcp")  # to one
inverse_root = _of_one_float("inverse_root", "rsqrt")  # to two
logarithm_of_two = _of_one_float("logarithm_of_two", "lg2")  # to 2⁻²² of one


def _add_tile_of(number: str) -> Any:
    """sums[i] += A·B of a warp: mma.sync.m16n8k16 with float32 sums (…, 4).

    sums[i] is four floats, a four and b two uint32 of two numbers each, laid out over the warp's
    lanes as the PTX manual says: lane l = 4g + t holds rows g and g + 8, columns 2t and 2t + 1.
    What Numba makes of four loads and stores would take most of a kernel's compilation.
    """
    operation = f"mma.sync.aligned.m16n8k16.row.col.f32.{number}.{number}.f32 "
    text = operation + "{$0,$1,$2,$3},{$4,$5,$6,$7},{$8,$9},{$10,$11,$12,$13};"
    names = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"

    @instruction(types.void, ANY, _AT, FOUR_WORDS, _UINT, _UINT)
    def add(builder, sums, i, a, b0, b1):
        first = builder.gep(sums, [builder.mul(i, ir.Constant(LONG, 4))])
        places = [builder.gep(first, [ir.Constant(LONG, e)]) for e in range(4)]
        operands = [*a, b0, b1, *map(builder.load, places)]
        results = assemble(builder, text, names, operands, [FLOAT] * 4)
        for number, place in zip(results, places, strict=True):
            builder.store(number, place)

    return add


@instruction(_UINT, _UINT)
def transpose_8x8(builder, word):
    """An 8×8 matrix of 16-bit numbers, two of a row in each lane, transposed."""
    text = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
    return assemble(builder, text, "=r,r", [word], WORD)


add_tile, add_tile_of_f16 = _add_tile_of("bf16"), _add_tile_of("f16")


def _load_matrices(suffix: str) -> tuple[Any, Any]:
    """(shared, at) and (shared, at, flip): four 8×8 matrices of 16-bit numbers. Lane l gives
    the address of row l % 8 of matrix l // 8: byte `at`, in the second the bits `flip` of the
    address turned over."""
    text = f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{$0,$1,$2,$3}}, [$4];"

    def load(builder, shared, at, *flip):
        address = shared_address(builder, shared, at)
        if flip:
            address = builder.xor(address, builder.trunc(flip[0], WORD))
        return assemble(builder, text, "=r,=r,=r,=r,r", [address], [WORD] * 4)

    plain, flipped = (instruction(FOUR_WORDS, ANY, *[_AT] * n) for n in (1, 2))
    return plain(load), flipped(load)


load_matrices, load_flipped_matrices = _load_matrices("")
load_matrices_transposed, load_flipped_matrices_transposed = _load_matrices(".trans")


@instruction(types.void, ANY, _AT, ANY, _AT, types.int32)
def copy_16(builder, shared, to, source, at, n_bytes):
    """Start a copy of 16 bytes to shared memory; of them n_bytes are read, the rest are 0."""
    address = shared_address(builder, shared, to)
    there = builder.ptrtoint(_pointer(builder, source, at, BYTE), LONG)
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    assemble(builder, text, "r,l,r", [address, there, n_bytes])


@instruction(_UINT, ANY, _AT, _UINT)
def take_ticket(builder, tickets, at, last):
    """tickets[at], which becomes one more, 0 after `last`. What was written before it
    is seen by all that read after it. Numba's fence would do the same, but wait longer."""
    pointer = _pointer(builder, tickets, builder.mul(at, ir.Constant(LONG, 4)), WORD)
    text = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
    operands = [builder.ptrtoint(pointer, LONG), last]
    return assemble(builder, text, "=r,l,r,~{memory}", operands, WORD)


def plain(text: str, since: tuple[int, int] = (0, 0)) -> Any:
    """An instruction without operands; nothing on cards before the compute capability."""

    @instruction(types.void)
    def without_operands(builder):
        if ConfigStack().top().compute_capability >= since:
            assemble(builder, text, "~{memory}", [])

    return without_operands


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
