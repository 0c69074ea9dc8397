"""Instructions of products with bytes (gemm/packed_dots.py): shared memory that is filled, read and
written, products of four bytes. Numba's simulator has none of them.

Addresses count bytes from the start of an array in shared memory, as in ptx.py.
"""

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from pyggml.backends.cuda.code.jit import ANY, instruction
from pyggml.backends.cuda.code.ptx import (
    BYTE,
    FLOAT,
    FOUR_WORDS,
    LONG,
    SHORT,
    WORD,
    assemble,
    words_loader,
    words_storer,
)

_AT, _UINT = types.int64, types.uint32
_GLOBAL, _SHARED = 1, 3  # address spaces


def _pure(builder: Any, text: str, names: str, *operands: Any) -> Any:
    """Inline PTX whose result, a word, depends on its operands alone."""
    call = assemble(builder, text, names, operands, WORD, has_effect=False)
    call.attributes.add("readnone")
    return call


def _pointer(builder: Any, start: Any, at: Any, to: Any) -> Any:
    """A pointer to LLVM type `to`, `at` bytes from the start of an array in shared memory."""
    start = builder.bitcast(start, BYTE.as_pointer())
    start = builder.addrspacecast(start, BYTE.as_pointer(_SHARED))
    return builder.bitcast(builder.gep(start, [at]), to.as_pointer(_SHARED))


@instruction(_UINT, ANY, _AT)
def shared_word(builder, shared, at):
    """The word (uint32) at byte `at` of an array in shared memory."""
    return builder.load(_pointer(builder, shared, at, WORD))


@instruction(types.float32, ANY, _AT)
def shared_float(builder, shared, i):
    """Number i of an array of float32 in shared memory. i is not below 0, of which Numba
    would ask each time."""
    return builder.load(_pointer(builder, shared, builder.mul(i, ir.Constant(LONG, 4)), FLOAT))


shared_pair, shared_words = (words_loader(n, _pointer) for n in (2, 4))
put_shared_pair, put_shared_words = (words_storer(n, _pointer) for n in (2, 4))


@instruction(types.float32, _UINT)
def half_of(builder, word):
    """The float16 in the low half of a word, as float32."""
    return builder.fpext(builder.bitcast(builder.trunc(word, SHORT), ir.HalfType()), FLOAT)


@instruction(_UINT, _UINT)
def count_ones(builder, word):
    """How many bits of a word are 1."""
    return builder.ctpop(word)


@instruction(types.int32, _UINT, _UINT, types.int32)
def dot_bytes(builder, a, b, c):
    """c + the sum of four products of signed bytes of the words a and b."""
    return _pure(builder, "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", a, b, c)


@instruction(_UINT, _UINT, _UINT, _UINT)
def pick_bytes(builder, low, high, which):
    """Four of the bytes of two words; bits 4i to 4i + 2 of `which` say which is byte i. With bit
    4i + 3 it is that byte's top bit eight times."""
    return _pure(builder, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", low, high, which)


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

    @instruction(types.void, ANY, _AT, ANY, _AT)
    def copy(builder, shared, to, source, at):
        here = _pointer(builder, shared, to, BYTE)
        there = builder.add(builder.ptrtoint(source, LONG), at)
        assemble(builder, text, "r,l,~{memory}", [builder.ptrtoint(here, WORD), there])

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
    of = types.UniTuple(types.uint32, 8), types.UniTuple(types.float32, 4)

    @instruction(every, ANY, _AT, _AT, *of, every)
    def multiply(builder, shared, at, apart, words, factors, sums):
        start = builder.ptrtoint(_pointer(builder, shared, at, BYTE), WORD)
        apart = builder.trunc(apart, WORD)
        for n, word in enumerate(words):
            half, here = n // 4, builder.add(start, ir.Constant(WORD, 16 * n))
            operands = [word, factors[half], factors[2 + half]]
            two = assemble(builder, make, "=r,=r,r,f,f", operands, [WORD] * 2)
            for first in range(4 * (n & 1), 8 * sixteens, 8):
                own = [here, *two, *sums[first : first + 4]]
                sums[first : first + 4] = assemble(
                    builder, _MULTIPLY_SHARED, names, own, [FLOAT] * 4
                )
                here = builder.add(here, apart)
        return sums

    return multiply


def constants_loader(name: str, words: Any) -> Any:
    """load(i): words 4i to 4i + 3 of constants, uint32 (n,), that lie in a kernel's module once, in
    the card's memory: its 64 KiB of constants give a warp one word at a time."""

    @instruction(FOUR_WORDS, _AT)
    def load(builder, i):
        constants = builder.module.globals.get(name)
        if constants is None:
            array = ir.Constant(ir.ArrayType(WORD, words.size), words.tolist())
            constants = ir.GlobalVariable(builder.module, array.type, name, _GLOBAL)
            constants.initializer, constants.global_constant = array, True
            constants.linkage, constants.align = "internal", 16
        start = builder.bitcast(constants, ir.VectorType(WORD, 4).as_pointer(_GLOBAL))
        vector = builder.load(builder.gep(start, [i]))
        return [builder.extract_element(vector, ir.Constant(WORD, n)) for n in range(4)]

    return load
