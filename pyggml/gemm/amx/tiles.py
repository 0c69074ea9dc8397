"""The tile instructions, and the microkernel that is made of them.

configure      ready the tiles of this thread: every task must, since threads come and go
release        let go of them: what a thread's switch stores is small again
micro_product  C[SIDE, SIDE] (+)= A[SIDE, k·STEP] · B[k·STEP, SIDE]

A tile of A is 16 rows of 32 bfloat16. A tile of B is 16 rows of 16 pairs: two numbers of k beside
each other, 16 columns. A tile of C is 16 × 16 float32. Both factors are bfloat16, sums are float32.

Where the CPU has no tiles, plain vector code does what the instructions do: that tests everything
but the instructions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from pyggml._isa import CHOSEN
from pyggml._jit import cgutils, intrinsic, types
from pyggml._llvm import F32, I8, I32, I64, broadcast, declared, every, fma

TILE_BYTES = 1024  # 16 rows of 64 bytes
STEP = 32  # numbers of k in a tile
SIDE = 32  # rows and columns of C: 2 × 2 tiles

# Palette 1. Of each of the 8 tiles: bytes of a row (uint16, from byte 16), rows (from byte 48).
CONFIGURATION = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])

# One step of k: (tile of A or B, register it is loaded to) or (sums, register of A, of B). While
# the core's other hyperthread is busy there seem to be hardly any spare registers to rename tiles
# to: with eight live a step takes 124 ns, with these six 75, though B's first tile is loaded twice.
_ORDER: tuple[tuple[str, int] | tuple[int, int, int], ...] = (
    ("a0", 4), ("b0", 5), (0, 4, 5), ("b1", 5), (1, 4, 5), ("a1", 4), (3, 4, 5), ("b0", 5),
    (2, 4, 5),
)  # fmt: skip
_AHEAD = 2  # steps that A is fetched before it is loaded: six tiles let the CPU see less far

_BYTE = I8.as_pointer()
_ROW = ir.VectorType(I32, 16)
_SUMS = ir.VectorType(F32, 16)


def _place(b: Any, base: Any, offset: Any) -> Any:
    """Pointer to the byte `offset` after an address."""
    return b.inttoptr(b.add(base, offset), _BYTE)


def _times(b: Any, value: Any, n: int) -> Any:
    return b.mul(value, ir.Constant(I64, n))


# -- instructions ---------------------------------------------------------------------------------


class _Tiles(ABC):
    """Eight registers; `stride` is the step from row to row in bytes."""

    def __init__(self, builder: Any) -> None:
        self.b = builder

    @abstractmethod
    def zero(self, tile: int) -> None: ...

    @abstractmethod
    def load(self, tile: int, pointer: Any, stride: Any) -> None: ...

    @abstractmethod
    def store(self, tile: int, pointer: Any, stride: Any) -> None: ...

    @abstractmethod
    def multiply(self, sums: int, a: int, b: int) -> None:
        """sums += a · b"""


class _Registers(_Tiles):
    """The CPU's. LLVM wants their numbers as constants."""

    def _call(self, name: str, *arguments: Any) -> None:
        given = [ir.Constant(I8, a) if isinstance(a, int) else a for a in arguments]
        code = declared(self.b, f"llvm.x86.{name}", ir.VoidType(), [a.type for a in given])
        self.b.call(code, given)

    def zero(self, tile: int) -> None:
        self._call("tilezero", tile)

    def load(self, tile: int, pointer: Any, stride: Any) -> None:
        self._call("tileloadd64", tile, pointer, stride)

    def store(self, tile: int, pointer: Any, stride: Any) -> None:
        self._call("tilestored64", tile, pointer, stride)

    def multiply(self, sums: int, a: int, b: int) -> None:
        self._call("tdpbf16ps", sums, a, b)


class _Emulated(_Tiles):
    """Memory of the function, and vector code; the even and the odd numbers of k are summed apart,
    as the instruction does, but denormal numbers are kept."""

    def __init__(self, builder: Any) -> None:
        super().__init__(builder)
        memory = cgutils.alloca_once(builder, ir.ArrayType(I8, 8 * TILE_BYTES))
        self._memory = builder.ptrtoint(memory, I64)

    def _row(self, tile: int, row: Any) -> Any:
        """Address of a row."""
        return self.b.add(self._memory, self.b.add(_times(self.b, row, 64), I64(tile * TILE_BYTES)))

    def _vector(self, address: Any, offset: int = 0, kind: Any = _ROW) -> Any:
        value = self.b.load(self.b.inttoptr(self.b.add(address, I64(offset)), kind.as_pointer()))
        value.align = 4
        return value

    def _put(self, value: Any, address: Any) -> None:
        stored = self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()))
        stored.align = 4

    def zero(self, tile: int) -> None:
        with cgutils.for_range(self.b, I64(16)) as loop:
            self._put(every(_ROW, 0), self._row(tile, loop.index))

    def load(self, tile: int, pointer: Any, stride: Any) -> None:
        of = self.b.ptrtoint(pointer, I64)
        with cgutils.for_range(self.b, I64(16)) as loop:
            row = self._vector(self.b.add(of, self.b.mul(loop.index, stride)))
            self._put(row, self._row(tile, loop.index))

    def store(self, tile: int, pointer: Any, stride: Any) -> None:
        to = self.b.ptrtoint(pointer, I64)
        with cgutils.for_range(self.b, I64(16)) as loop:
            row = self._vector(self._row(tile, loop.index))
            self._put(row, self.b.add(to, self.b.mul(loop.index, stride)))

    def multiply(self, sums: int, a: int, b: int) -> None:
        with cgutils.for_range(self.b, I64(16)) as loop:
            pairs = self._row(a, loop.index)
            parts = [every(_SUMS, 0.0), every(_SUMS, 0.0)]
            for p in range(16):
                scalar = self.b.load(
                    self.b.inttoptr(self.b.add(pairs, I64(4 * p)), I32.as_pointer())
                )
                x, y = broadcast(self.b, scalar, _ROW), self._vector(self._row(b, I64(p)))
                parts = [
                    fma(self.b, half(x), half(y), old)
                    for half, old in zip((self._even, self._odd), parts, strict=True)
                ]
            to = self._row(sums, loop.index)
            old = self._vector(to, kind=_SUMS)
            self._put(self.b.fadd(old, self.b.fadd(*parts)), to)

    def _even(self, pairs: Any) -> Any:
        """The first numbers of pairs as float32: a bfloat16 is the upper half of one."""
        return self.b.bitcast(self.b.shl(pairs, every(_ROW, 16)), _SUMS)

    def _odd(self, pairs: Any) -> Any:
        return self.b.bitcast(self.b.and_(pairs, every(_ROW, 0xFFFF0000)), _SUMS)


@intrinsic
def configure(typing: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if CHOSEN.tiles:
            kind = ir.VectorType(I8, len(CONFIGURATION))
            memory = cgutils.alloca_once_value(builder, ir.Constant(kind, list(CONFIGURATION)))
            code = declared(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_BYTE])
            builder.call(code, [builder.bitcast(memory, _BYTE)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typing: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if CHOSEN.tiles:
            builder.call(declared(builder, "llvm.x86.tilerelease", ir.VoidType(), []), [])
        return context.get_dummy_value()

    return types.void(), codegen


# -- the microkernel -----------------------------------------------------------------------------


def _corners(b: Any, c: Any, ldc: Any) -> list[Any]:
    """Where the four tiles of C lie."""
    return [
        _place(b, c, b.add(_times(b, ldc, 16 * i), ir.Constant(I64, 64 * j)))
        for i in (0, 1) for j in (0, 1)
    ]  # fmt: skip


def _fetch(b: Any, pointer: Any, to_write: bool) -> None:
    """Have this line, which need not exist, brought into the first cache."""
    code = declared(b, "llvm.prefetch.p0i8", ir.VoidType(), [_BYTE, I32, I32, I32])
    b.call(code, [pointer, *(ir.Constant(I32, int(n)) for n in (to_write, 3, 1))])


def _emit_step(
    b: Any, tiles: _Tiles, i: Any, a: Any, lda: Any, panel: Any, lines: Sequence
) -> None:
    """Step i of k; between its instructions the lines are fetched."""
    below, a_at = b.add(a, _times(b, lda, 16)), _times(b, i, 2 * STEP)
    b_at, line = _times(b, i, 2 * TILE_BYTES), ir.Constant(I64, 64)
    operands = {
        "a0": (_place(b, a, a_at), lda),
        "a1": (_place(b, below, a_at), lda),
        "b0": (_place(b, panel, b_at), line),
        "b1": (_place(b, panel, b.add(b_at, ir.Constant(I64, TILE_BYTES))), line),
    }
    each = -(-len(lines) // len(_ORDER))
    for turn, (what, *registers) in enumerate(_ORDER):
        if isinstance(what, str):
            tiles.load(registers[0], *operands[what])
        else:
            tiles.multiply(what, *registers)
        for address, to_write in lines[turn * each : (turn + 1) * each]:
            _fetch(b, b.inttoptr(address, _BYTE), to_write)


def _lines(b: Any, i: Any, a: Any, lda: Any, c: Any, ldc: Any) -> list[tuple[Any, bool]]:
    """What step i fetches: a row of C, and A's lines of a later step."""
    row = b.add(c, b.mul(b.and_(i, ir.Constant(I64, SIDE - 1)), ldc))
    ahead = b.add(a, _times(b, b.add(i, ir.Constant(I64, _AHEAD)), 2 * STEP))
    rows = (b.add(ahead, _times(b, lda, m)) for m in range(SIDE))
    second = b.add(row, ir.Constant(I64, 64))
    return [(row, True), (second, True), *((place, False) for place in rows)]


@intrinsic
def micro_product(
    typing: Any, a: Any, lda: Any, b: Any, c: Any, ldc: Any, k: Any, accumulate: Any
) -> Any:
    """C (+)= A · B; addresses, lda and ldc in bytes, k in steps. C is overwritten unless accumulate
    is not 0.

    a: rows of bfloat16; b: (k, 2) tiles without gaps, of the left and the right 16 columns.
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, lda, b, c, ldc, k, accumulate = arguments
        tiles = _Registers(builder) if CHOSEN.tiles else _Emulated(builder)
        corners = _corners(builder, c, ldc)
        with builder.if_else(builder.icmp_signed("!=", accumulate, I64(0))) as (old, new):
            with old:
                for tile, corner in enumerate(corners):
                    tiles.load(tile, corner, ldc)
            with new:
                for tile in range(4):
                    tiles.zero(tile)
        with cgutils.for_range(builder, k) as loop:
            i = loop.index
            lines = _lines(builder, i, a, lda, c, ldc) if CHOSEN.tiles else ()
            _emit_step(builder, tiles, i, a, lda, b, lines)
        for tile, corner in enumerate(corners):
            tiles.store(tile, corner, ldc)
        return context.get_dummy_value()

    return types.void(*(types.intp,) * 7), codegen
