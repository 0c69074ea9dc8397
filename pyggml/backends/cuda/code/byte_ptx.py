"""Instructions of products with bytes (gemm/packed_dots.py): shared memory that is filled, read and
written, products of four bytes. Numba's simulator has none of them.

Addresses count bytes from the start of an array in shared memory, as in ptx.py.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from pyggml.backends.cuda.code.jit import intrinsic
from pyggml.backends.cuda.code.ptx import assemble

_BYTE, _SHORT, _WORD, _LONG = (ir.IntType(n) for n in (8, 16, 32, 64))
_FLOAT, _ANY = ir.FloatType(), _BYTE.as_pointer()
_GLOBAL, _SHARED = 1, 3  # address spaces


def _pure(builder: Any, text: str, result: Any, names: str, operands: Any) -> Any:
    """Inline PTX whose result depends on its operands alone."""
    form = ir.FunctionType(result, [o.type for o in operands])
    call = builder.asm(form, text, names, operands, False)
    call.attributes.add("readnone")
    return call


def _load_shared(context: Any, builder: Any, kind: Any, place: Any, to: Any) -> Any:
    """What lies at a byte of an array in shared memory, of LLVM type `to`."""
    return builder.load(_shared_pointer(context, builder, kind, place, to))


def _shared_pointer(context: Any, builder: Any, kind: Any, place: Any, to: Any) -> Any:
    array, at = place
    start = builder.bitcast(context.make_array(kind)(context, builder, array).data, _ANY)
    start = builder.addrspacecast(start, _BYTE.as_pointer(_SHARED))
    return builder.bitcast(builder.gep(start, [at]), to.as_pointer(_SHARED))


@intrinsic
def shared_word(typing, shared, at):
    """The word (uint32) at byte `at` of an array in shared memory."""

    def emit(context, builder, signature, arguments):
        return _load_shared(context, builder, shared, arguments, _WORD)

    return types.uint32(shared, types.int64), emit


def _shared_words(n: int) -> Any:
    @intrinsic
    def load(typing, shared, at):
        def emit(context, builder, signature, arguments):
            kind = ir.VectorType(_WORD, n)
            vector = _load_shared(context, builder, shared, arguments, kind)
            places = (ir.Constant(_WORD, i) for i in range(n))
            words = [builder.extract_element(vector, i) for i in places]
            return context.make_tuple(builder, signature.return_type, words)

        return types.Tuple([types.uint32] * n)(shared, types.int64), emit

    return load


# The words (uint32) from byte `at` of an array in shared memory on.
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
def half_of(typing, word):
    """The float16 in the low half of a word, as float32."""

    def emit(context, builder, signature, arguments):
        half = builder.bitcast(builder.trunc(arguments[0], _SHORT), ir.HalfType())
        return builder.fpext(half, _FLOAT)

    return types.float32(types.uint32), emit


@intrinsic
def count_ones(typing, word):
    """How many bits of a word are 1."""

    def emit(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint32(types.uint32), emit


@cache
def copier(n_bytes: int) -> Any:
    """copy(shared, to, source, at): begin to copy n_bytes to shared memory, as all lanes of a
    warp call it, each with the places of its own first 16 bytes."""
    one = "cp.async.cg.shared.global [$0 + {0}], [$1 + {0}], 16;"
    lines = [one.format(i) for i in range(0, n_bytes - 511, 512)]
    if n_bytes % 512:
        last, n_lanes = n_bytes // 512 * 512, n_bytes % 512 // 16
        lines += ["{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid;"]
        lines += [f"setp.lt.u32 p, l, {n_lanes}; @p {one.format(last)} }}"]
    return _copies(" ".join(lines))


def _copies(text: str) -> Any:
    """copy(shared, to, source, at) by this PTX, to address $0 of shared memory, from $1."""

    @intrinsic
    def copy(typing, shared, to, source, at):
        def emit(context, builder, signature, arguments):
            to_array, to, from_array, at = arguments
            here = _shared_pointer(context, builder, shared, (to_array, to), _BYTE)
            start = context.make_array(source)(context, builder, from_array).data
            there = builder.add(builder.ptrtoint(start, _LONG), at)
            operands = [builder.ptrtoint(here, _WORD), there]
            form = ir.FunctionType(ir.VoidType(), [_WORD, _LONG])
            builder.asm(form, text, "r,l,~{memory}", operands, True)
            return context.get_dummy_value()

        return types.void(shared, types.int64, source, types.int64), emit

    return copy


# copy(shared, to, source, at): begin to copy so many bytes to shared memory
copy_8, copy_16 = (
    _copies(f"cp.async.{way}.shared.global [$0], [$1], {size};")
    for way, size in (("ca", 8), ("cg", 16))
)


EXCESS = 32896.0  # of weights that are not exact, see _weights_of


def _weights_of(is_exact: bool) -> str:
    """The text that makes two words $0 and $1 of two bfloat16 of the signed bytes of a word $2: $3
    · byte + $4. A byte as the second one of a float's bits makes it 2¹⁵ + 2⁷ + byte, of which $4
    has what is too much, times $3, unless is_exact."""
    lines = ["{ .reg .b32 t, p<4>; xor.b32 t, $2, 0x80808080;"]
    for e in range(4):
        lines += [f"prmt.b32 p{e}, t, 0x47000000, {0x7504 + 16 * e:#x};"]
        lines += [f"sub.rn.f32 p{e}, p{e}, 0f47008000;"] if is_exact else []
        lines += [f"fma.rn.f32 p{e}, p{e}, $3, $4;"]
    lines += ["cvt.rn.bf16x2.f32 $0, p1, p0; cvt.rn.bf16x2.f32 $1, p3, p2; }"]
    return " ".join(lines)


_MULTIPLY_SHARED = (
    "{ .reg .b32 a<4>; ld.shared.v4.b32 {a0,a1,a2,a3}, [$4]; "
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0,$1,$2,$3},{a0,a1,a2,a3},{$5,$6},{$7,$8,$9,$10}; }"
)


@cache
def group_multiplier(is_exact: bool, sixteens: int) -> Any:
    """multiply(shared, at, apart, words, factors, sums): the sums of a group of 32 weights of each
    lane, eight words of bytes, by A, of which a lane's words for each of these begin at byte `at`,
    those of the next sixteen rows `apart` from there. factors: two scales, of each half of the
    words, and two that are least. sums: of each sixteen, of even and of odd words, four."""
    make, names = _weights_of(is_exact), "=f,=f,=f,=f,r,r,r,f,f,f,f"
    every = types.UniTuple(types.float32, 8 * sixteens)

    @intrinsic
    def multiply(typing, shared, at, apart, words, factors, sums):
        def emit(context, builder, signature, arguments):
            array, at, apart, words, factors, sums = arguments
            place = _shared_pointer(context, builder, shared, (array, at), _BYTE)
            start, apart = builder.ptrtoint(place, _WORD), builder.trunc(apart, _WORD)
            of, sums = cgutils.unpack_tuple(builder, factors), cgutils.unpack_tuple(builder, sums)
            for n, word in enumerate(cgutils.unpack_tuple(builder, words)):
                half, here = n // 4, builder.add(start, ir.Constant(_WORD, 16 * n))
                operands = [word, of[half], of[2 + half]]
                two = assemble(builder, make, [_WORD] * 2, operands, "=r,=r,r,f,f")
                for first in range(4 * (n & 1), 8 * sixteens, 8):
                    own = [here, *two, *sums[first : first + 4]]
                    sums[first : first + 4] = assemble(
                        builder, _MULTIPLY_SHARED, [_FLOAT] * 4, own, names
                    )
                    here = builder.add(here, apart)
            return context.make_tuple(builder, signature.return_type, sums)

        of = types.UniTuple(types.uint32, 8), types.UniTuple(types.float32, 4)
        return every(shared, types.int64, types.int64, *of, every), emit

    return multiply


def constants_loader(name: str, words: Any) -> Any:
    """load(i): words 4i to 4i + 3 of constants, uint32 (n,), that lie in a kernel's module once, in
    the card's memory: its 64 KiB of constants give a warp one word at a time."""

    @intrinsic
    def load(typing, i):
        def emit(context, builder, signature, arguments):
            constants = builder.module.globals.get(name)
            if constants is None:
                array = ir.Constant(ir.ArrayType(_WORD, words.size), words.tolist())
                constants = ir.GlobalVariable(builder.module, array.type, name, _GLOBAL)
                constants.initializer, constants.global_constant = array, True
                constants.linkage, constants.align = "internal", 16
            four = ir.VectorType(_WORD, 4)
            start = builder.bitcast(constants, four.as_pointer(_GLOBAL))
            vector = builder.load(builder.gep(start, [arguments[0]]))
            numbers = [builder.extract_element(vector, ir.Constant(_WORD, n)) for n in range(4)]
            return context.make_tuple(builder, signature.return_type, numbers)

        return types.Tuple([types.uint32] * 4)(types.int64), emit

    return load


@intrinsic
def shared_float(typing, shared, i):
    """Number i of an array of float32 in shared memory. i is not below 0, of which Numba
    would ask each time."""

    def emit(context, builder, signature, arguments):
        array, i = arguments
        at = builder.mul(i, ir.Constant(_LONG, 4))
        return _load_shared(context, builder, shared, (array, at), _FLOAT)

    return types.float32(shared, types.int64), emit


@intrinsic
def dot_bytes(typing, a, b, c):
    """c + the sum of four products of signed bytes of the words a and b."""

    def emit(context, builder, signature, arguments):
        text = "dp4a.s32.s32 $0, $1, $2, $3;"
        return _pure(builder, text, _WORD, "=r,r,r,r", arguments)

    return types.int32(types.uint32, types.uint32, types.int32), emit


@intrinsic
def pick_bytes(typing, low, high, which):
    """Four of the bytes of two words; bits 4i to 4i + 2 of `which` say which is byte i. With bit
    4i + 3 it is that byte's top bit eight times."""

    def emit(context, builder, signature, arguments):
        return _pure(builder, "prmt.b32 $0, $1, $2, $3;", _WORD, "=r,r,r,r", arguments)

    return types.uint32(types.uint32, types.uint32, types.uint32), emit
