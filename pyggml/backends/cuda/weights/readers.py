"""Weights of a block, for every weight type, as device functions.

    weight_of    weight(raw, at, j): weight j of the block at byte `at` of raw (uint8), float32
    part_of      part(raw, at, j): of that weight the part that one scale of the block makes
    four_of      four(raw, at, j): weights j to j + 3, for j a multiple of 4
    eights_of    eights(out, i, raw, at, lane): of each group of 32 the eight weights from `lane`
                 on, a multiple of 8, to out from element i on

`PythonBlock` runs the type's decoder (pyggml.quants.layout) and writes down, for each group of 32
weights, the expression of one of them. `weight` and `four` branch by group: threads of a warp that
take the 32 weights of one group take the same branch. `eights` does all groups, without a branch.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP, ByteTable, Decoder
from pyggml.quants.readers.expressions import ExpressionBlock, Lanes
from pyggml.quants.scales import parts_of


class PythonBlock(ExpressionBlock):
    """Expressions of Python, for a device function, and the tables that they name. A lane may be a
    sum: what needs it whole, puts it in brackets."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[ByteTable] = []

    def number(self, lane: str, value: int) -> str:
        return str(value)

    def where(self, condition: str, a: str, b: str) -> str:
        return f"({a} if {condition} else {b})"

    def as_float(self, lane: str, whole: str) -> str:
        return f"np.float32(np.int32({whole}))"  # 64 bits take much longer to convert

    def lane_before(self, lane: str, n: int) -> str:
        return f"({lane} - {n})"

    # -- reading -------------------------------------------------------------------------------

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        return Lanes("bytes", n, lambda lane: f"np.int32(raw[at + {offset} + {lane}])")

    def flags(self, offset: int, value: int) -> Lanes:
        def text(lane: str) -> str:
            byte = f"np.int32(raw[at + {offset} + ({lane} >> 3)])"
            return f"((({byte} >> ({lane} & 7)) & 1) * {value})"

        return Lanes("bytes", GROUP, text)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Lanes:
        many, mask = -(-8 * n_bytes // n_bits), (1 << n_bits) - 1

        def of_byte(lane: str) -> str:
            per_byte = 8 // n_bits
            byte = f"np.int32(raw[at + {offset} + ({lane}) // {per_byte}])"
            return f"(({byte} >> ({n_bits} * (({lane}) % {per_byte}))) & {mask})"

        def of_shorts(lane: str) -> str:
            return f"np.int32(load_short(raw, at + {offset} + 2 * ({lane})))"

        def of_word(lane: str) -> str:
            word = f"load_short(raw, at + {offset})"
            if n_bytes > 2:
                word = f"({word} | (load_short(raw, at + {offset + 2}) << np.uint32(16)))"
            return f"np.int32(({word} >> np.uint32({n_bits} * ({lane}))) & np.uint32({mask}))"

        text = of_shorts if n_bits == 16 else of_word if 8 % n_bits else of_byte
        return Lanes("ints", n or many, text)

    def f16(self, offset: int, n: int = 1) -> Lanes:
        return Lanes("floats", n, lambda lane: f"load_half(raw, at + {offset} + 2 * ({lane}))")

    def bf16(self, offset: int, n: int = 1) -> Lanes:
        def text(lane: str) -> str:
            return f"as_float(load_short(raw, at + {offset} + 2 * ({lane})) << np.uint32(16))"

        return Lanes("floats", n, text)

    def f32(self, offset: int, n: int = 1) -> Lanes:
        return Lanes(
            "floats", n, lambda lane: f"as_float(load_word(raw, at + {offset} + 4 * ({lane})))"
        )

    def half_e8m0(self, offset: int) -> Lanes:
        return Lanes("floats", 1, lambda lane: f"half_e8m0(np.uint32(raw[at + {offset}]))")

    def constant(self, value: float) -> Lanes:
        return Lanes("floats", 1, lambda lane: f"np.float32({value})")

    # -- arithmetic ----------------------------------------------------------------------------

    def points(self, indices: Lanes, table: ByteTable) -> Lanes:
        name, width = self._table(table), table.width

        def text(lane: str) -> str:
            index = indices.text(f"({lane}) // {width}")
            return f"np.int32({name}[{index}, ({lane}) % {width}])"

        return Lanes("bytes", GROUP, text)

    def _table(self, table: ByteTable) -> str:
        """The name of a table in expressions: a variable, as Numba would put a copy of a constant
        array into a card's 64 KiB of constants wherever one is named."""
        if table not in self.tables:
            self.tables.append(table)
        return f"grid{self.tables.index(table)}"

    def grids(self) -> list[str]:
        """The first lines of a function: each table gets its variable."""
        return [f"    grid{i} = table{i}" for i in range(len(self.tables))]

    def lookup(self, nibbles: Lanes, table: Sequence[int]) -> Lanes:
        halves = (
            sum((v & 255) << 8 * i for i, v in enumerate(half)) for half in (table[:8], table[8:])
        )
        low, high = (f"np.uint64({half:#x})" for half in halves)

        def text(lane: str) -> str:
            return f"byte_of({low}, {high}, {nibbles.text(lane)})"

        return nibbles._replace(kind="bytes", text=text)

    def half(self, ints: Lanes) -> Lanes:
        return Lanes("floats", ints.n, lambda lane: f"half_of({ints.text(lane)})")


class EightLanes(PythonBlock):
    """Expressions of eight neighbours, lanes "lane+0" to "lane+7". What they share has a name, and
    is computed in `lines`, which come first.

    Neighbours lie on one side of every bound that a decoder asks for.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._block_bytes = block_bytes
        self._names: dict[str, str] = {}

    def _name(self, text: str) -> str:
        if text.isidentifier():
            return text
        if text not in self._names:
            self._names[text] = f"v{len(self._names)}"
            self.lines.append(f"    {self._names[text]} = {text}")
        return self._names[text]

    def chosen(self, lane: str, n: int, below: str, other: str) -> str:
        return f"({below} if {lane.partition('+')[0]} < {n} else {other})"

    def within(
        self, lane: str, n: int, below: Callable[[str], str], other: Callable[[str], str]
    ) -> str:
        """Both sides are loaded before one is chosen, so both need a lane within their bounds."""
        if lane.isdigit():
            return super().within(lane, n, below, other)
        first, _, i = lane.partition("+")
        if n == 4:  # the eight are the four of both
            return below(f"0+{i}") if int(i) < n else other(f"0+{int(i) - n}")
        inside = f"({first} & {n - 1})+{i}"
        return self.chosen(lane, n, below(inside), other(inside))

    def points(self, indices: Lanes, table: ByteTable) -> Lanes:
        """The eight are of one row of the table, or of two."""
        name, width = self._table(table), table.width

        def text(lane: str) -> str:
            first, _, i = lane.rpartition("+")
            row = f"({first}) // {width} + {int(i) // width}"
            return f"np.int32({name}[{self._name(indices.text(row))}, {int(i) % width}])"

        return Lanes("bytes", GROUP, text)

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        size = gcd(4, self._block_bytes, offset)  # bytes of a load
        load = {4: "load_word", 2: "load_short", 1: "load_byte"}[size]

        def text(lane: str) -> str:
            if lane.isdigit():
                return self._name(f"np.int32(load_byte(raw, at + {offset + int(lane)}))")
            first, _, i = lane.rpartition("+")
            at, byte = offset + int(i) // size * size, int(i) % size
            word = self._name(f"{load}(raw, at + {at} + {first})")
            return f"np.int32({word} >> np.uint32({8 * byte}) & np.uint32(255))"

        return Lanes("bytes", n, text)

    def f16(self, offset: int, n: int = 1) -> Lanes:
        floats = super().f16(offset, n)
        return floats._replace(text=lambda lane: self._name(floats.text(lane)))

    def lane(self, floats: Lanes, i: int) -> Lanes:
        one = super().lane(floats, i)
        return one._replace(text=lambda lane: self._name(one.text(lane)))

    def _of_halves(self, texts: Sequence[str]) -> str:
        return self._name(super()._of_halves(texts))


@device
def byte_of(low, high, i):
    """Byte i of 16: the first eight in `low`, the others in `high`, lowest bits first."""
    half = low if i < 8 else high
    return np.int32((half >> np.uint64(8 * (i & 7))) & np.uint64(255))


@device
def half_e8m0(e):
    """2^(e − 128) for e (uint32) from 0 to 255; the lowest two are subnormal."""
    one, above = np.uint32(0x00200000), np.uint32(23)
    return ptx.as_float(one << e if e < np.uint32(2) else (e - np.uint32(1)) << above)


@device
def half_of(bits):
    """The float16 with these bits, from 0 to 65535, as float32."""
    magnitude = bits & 0x7FFF
    if magnitude < 0x0400:  # subnormal
        value = np.float32(magnitude) * np.float32(2.0**-24)
    elif magnitude >= 0x7C00:  # infinity, NaN
        value = ptx.as_float(np.uint32((magnitude << 13) + 0x70000000))
    else:
        value = ptx.as_float(np.uint32((magnitude << 13) + 0x38000000))
    return -value if bits & 0x8000 else value


class ReaderSource(NamedTuple):
    """A function in Python, and the tables that it names table0, table1, …"""

    text: str
    tables: list[ByteTable]


def source_of(decoder: Decoder, count: int = 1) -> ReaderSource:
    """`weight(raw, at, j)`; of several weights, a tuple."""
    block = PythonBlock()
    decoder(block)
    lanes = ["lane", *(f"(lane + {i})" for i in range(1, count))]
    lines = ["def weight(raw, at, j):", *block.grids(), "    lane = j & 31"]
    *firsts, last = sorted(block.groups)
    for i in firsts:
        lines += [f"    if j < {i + GROUP}:", f"        return {_values(block.groups[i], lanes)}"]
    lines.append(f"    return {_values(block.groups[last], lanes)}")
    return ReaderSource("\n".join(lines), block.tables)


def _source_of_eights(decoder: Decoder, block_bytes: int) -> ReaderSource:
    """`eights(out, i, raw, at, lane)`."""
    block = EightLanes(block_bytes)
    decoder(block)
    lanes = [f"lane+{i}" for i in range(8)]
    for i in sorted(block.groups):
        values = _values(block.groups[i], lanes)
        block.lines.append(f"    put_eight(out, i + {i} + lane, {values})")
    lines = ["def eights(out, i, raw, at, lane):", *block.grids(), *block.lines]
    return ReaderSource("\n".join(lines), block.tables)


def _values(group: Callable[[str], str], lanes: Sequence[str]) -> str:
    return ", ".join(group(lane) for lane in lanes)


def with_named_numbers(source: str) -> tuple[str, dict[str, Any]]:
    """A source of Python with a name for each whole number of a type, and for the types; and what
    they name. To Numba a name is one statement, `np.uint32(8)` four."""
    named: dict[str, Any] = {}

    def name_number(typed: re.Match[str]) -> str:
        kind, number = typed.groups()
        named[f"{kind}_{number}"] = getattr(np, kind)(int(number, 0))
        return f"{kind}_{number}"

    def name_type(typed: re.Match[str]) -> str:
        named[typed[1]] = getattr(np, typed[1])
        return f"{typed[1]}("

    text = re.sub(r"\bnp\.(u?int\d+)\((0x[0-9a-f]+|\d+)\)", name_number, source)
    return re.sub(r"\bnp\.(\w+)\(", name_type, text), named


def _compile(source: ReaderSource, name: str, function: str, **scope: Any) -> Any:
    """The device function of this name in a source for the weights of a type."""
    scope |= {f"table{i}": table.rows.view(np.uint8) for i, table in enumerate(source.tables)}
    text, numbers = with_named_numbers(source.text)
    instructions = ("load_byte", "load_half", "load_short", "load_word", "as_float")
    scope |= {**numbers, **{word: getattr(ptx, word) for word in instructions}}
    scope |= {"byte_of": byte_of, "half_e8m0": half_e8m0, "half_of": half_of}
    exec(compile(text, f"<{function} of {name}>", "exec"), scope)
    return device(scope[function])


@cache
def weight_of(name: str) -> Any:
    """The device function of one weight of the type of this name."""
    return _compile(source_of(QUANTS[name].decode), name, "weight")


@cache
def part_of(name: str, k: int) -> Any:
    """The same of the part of a weight that scale k of its block makes."""
    return _compile(source_of(parts_of(name)[k]), name, "weight")


@cache
def four_of(name: str) -> Any:
    """The device function of four weights of a type with blocks."""
    return _compile(source_of(QUANTS[name].decode, 4), name, "weight")


def eights_of(name: str, put_eight: Any) -> Any:
    """The device function of the eights of a type with blocks.

    put_eight(out, i, a, …, h): out[i …] = eight floats
    """
    source = _source_of_eights(QUANTS[name].decode, QUANTS[name].dtype.block_bytes)
    return _compile(source, name, "eights", put_eight=put_eight)
