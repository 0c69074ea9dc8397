"""The tile instructions, and the microkernel that is made of them.

configure      make the tiles of this thread usable; every task does, as threads come and go
release        give them up, so that switching between threads stores little again
micro_product  C (SIDE, SIDE) (+)= A (SIDE, k · STEP) · B (k · STEP, SIDE)

A tile of A is 16 rows of 32 bfloat16. A tile of B is 16 rows of 16 pairs: two numbers of k beside
each other, 16 columns. A tile of C is 16 × 16 float32. A panel of B is its tiles without gaps: of
each step of k, that of the left 16 columns, then that of the right ones.

Where the CPU has no tiles, plain vector code does what the instructions do: that tests everything
but the instructions.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from llvmlite import ir

from pyggml.jit import cgutils, instruction, kernel, types
from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import F32, I8, I32, I64, broadcast, declare_intrinsic, every, fma

TILE_BYTES = 1024  # 16 rows of 64 bytes
STEP = 32  # numbers of k in a tile
SIDE = 32  # rows and columns of C: 2 × 2 tiles

# Palette 1. Of each of the 8 tiles: bytes of a row (uint16, from byte 16), rows (from byte 48).
CONFIGURATION = bytes([1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8])

# Step i of k, in order: (tile of A or B, the register it is loaded to), or (sums, registers of A
# and B). b1 is loaded a step before it is used, the first one before the loop.
#
# Measured on Sapphire Rapids, operands in the first cache: while the core's other hyperthread is
# idle, a step takes 33 to 36 ns in any order. While it is busy, the time depends on how many
# registers are used: eight 125 ns, these seven 90, six 90 with one more load. Each load and each
# product seems to take a spare register until it retires, and few are left then.
_ORDER: tuple[tuple[str, int] | tuple[int, int, int], ...] = (
    ("a0", 4), ("b0", 5), (1, 4, 6), (0, 4, 5), ("a1", 4), (3, 4, 6), ("b1", 6), (2, 4, 5),
)  # fmt: skip
_AHEAD = 1  # steps that A is fetched before it is loaded


class RowAddress(NamedTuple):
    """Where a matrix lies: the address of its first number, and the bytes from row to row."""

    address: int
    stride: int


@kernel
def rows_of(x):
    """Where a matrix lies whose rows have no gaps."""
    return RowAddress(x.ctypes.data, x.strides[0])


_BYTE = I8.as_pointer()
_ROW = ir.VectorType(I32, 16)
_SUMS = ir.VectorType(F32, 16)


def _pointer(b: Any, base: Any, offset: Any) -> Any:
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
        code = declare_intrinsic(self.b, f"llvm.x86.{name}", ir.VoidType(), [a.type for a in given])
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


@instruction(types.void())
def configure(builder: Any) -> None:
    if CHOSEN.tiles:
        kind = ir.VectorType(I8, len(CONFIGURATION))
        memory = cgutils.alloca_once_value(builder, ir.Constant(kind, list(CONFIGURATION)))
        code = declare_intrinsic(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_BYTE])
        builder.call(code, [builder.bitcast(memory, _BYTE)])


@instruction(types.void())
def release(builder: Any) -> None:
    if CHOSEN.tiles:
        builder.call(declare_intrinsic(builder, "llvm.x86.tilerelease", ir.VoidType(), []), [])


# -- the microkernel ------------------------------------------------------------------------------


def _corners(b: Any, c: Any, ldc: Any) -> list[Any]:
    """Where the four tiles of C lie."""
    return [
        _pointer(b, c, b.add(_times(b, ldc, 16 * i), ir.Constant(I64, 64 * j)))
        for i in (0, 1) for j in (0, 1)
    ]  # fmt: skip


def _emit_fetch(b: Any, address: Any, to_write: bool) -> None:
    """Have this line, which need not exist, brought into the first cache."""
    code = declare_intrinsic(b, "llvm.prefetch.p0i8", ir.VoidType(), [_BYTE, I32, I32, I32])
    rest = (ir.Constant(I32, int(n)) for n in (to_write, 3, 1))
    b.call(code, [b.inttoptr(address, _BYTE), *rest])


class _Operands:
    """A's rows and B's panel."""

    def __init__(self, builder: Any, a: Any, lda: Any, panel: Any) -> None:
        self.b, self._a, self._lda, self._panel = builder, a, lda, panel

    def load(self, tiles: _Tiles, name: str, register: int, step: Any) -> None:
        """Load one of the tiles a0, a1, b0 and b1 of a step."""
        operand, number = name[0], int(name[1])
        if operand == "a":
            row = self.b.add(self._a, _times(self.b, self._lda, 16 * number))
            tiles.load(register, _pointer(self.b, row, _times(self.b, step, 2 * STEP)), self._lda)
        else:
            start = self.b.add(_times(self.b, step, 2 * TILE_BYTES), I64(number * TILE_BYTES))
            tiles.load(register, _pointer(self.b, self._panel, start), I64(64))

    def lines(self, step: Any) -> list[Any]:
        """The addresses of A's lines of a step."""
        start = self.b.add(self._a, _times(self.b, step, 2 * STEP))
        return [self.b.add(start, _times(self.b, self._lda, row)) for row in range(SIDE)]


def _emit_step(b: Any, tiles: _Tiles, i: Any, last: Any, operands: _Operands, c_row: Any) -> None:
    """Step i of k. On the way, a row of C and A's lines of a later step are fetched."""
    following = b.add(i, I64(1))
    following = b.select(b.icmp_signed("<", i, last), following, last)
    fetched: list[tuple[Any, bool]] = []
    if CHOSEN.tiles:
        fetched += [(c_row, True), (b.add(c_row, I64(64)), True)]
        fetched += [(line, False) for line in operands.lines(b.add(i, I64(_AHEAD)))]
    each = -(-len(fetched) // len(_ORDER))
    for turn, (what, *registers) in enumerate(_ORDER):
        if isinstance(what, str):
            operands.load(tiles, what, registers[0], following if what == "b1" else i)
        else:
            tiles.multiply(what, *registers)
        for address, to_write in fetched[turn * each : (turn + 1) * each]:
            _emit_fetch(b, address, to_write)


@instruction(
    lambda c, a, panel, k, accumulate: types.void(c, a, types.intp, types.intp, types.boolean)
)
def micro_product(builder: Any, c: Any, a: Any, panel: Any, k: Any, accumulate: Any) -> None:
    """C (+)= A · B, of float32 and bfloat16. c and a are RowAddresses, the panel is an address, k
    counts steps, one or more. C is overwritten unless `accumulate`."""
    (c, ldc), (a, lda) = (cgutils.unpack_tuple(builder, x) for x in (c, a))
    tiles = _Registers(builder) if CHOSEN.tiles else _Emulated(builder)
    operands, corners = _Operands(builder, a, lda, panel), _corners(builder, c, ldc)
    with builder.if_else(accumulate) as (old, new):
        with old:
            for tile, corner in enumerate(corners):
                tiles.load(tile, corner, ldc)
        with new:
            for tile in range(4):
                tiles.zero(tile)
    operands.load(tiles, "b1", 6, I64(0))
    last = builder.sub(k, I64(1))
    with cgutils.for_range(builder, k) as loop:
        row = builder.and_(loop.index, ir.Constant(I64, SIDE - 1))
        c_row = builder.add(c, builder.mul(row, ldc))
        _emit_step(builder, tiles, loop.index, last, operands, c_row)
    for tile, corner in enumerate(corners):
        tiles.store(tile, corner, ldc)
