"""Four neighbouring weights of a block, for every weight type, as a WGSL function.

    fn weights(at: u32, j: u32) -> vec4<f32>     weights j … j + 3 of the block at byte `at` of `w`

`WordsBlock` runs the decoder (pyggml.quants.layout) and writes down, for each group of 32 weights,
the expression of four: their bytes are one word, and they share a scale.

Points of a type's grids are read from a buffer that a shader gets because it names it
(wgsl/shader.py): as a variable of each thread a table of 512 words took 10 s to compile on software
Vulkan.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from pyggml.graph.dtypes import DType
from pyggml.quants import QUANTS
from pyggml.quants.layout import EVEN_SIGNS, GROUP, ByteTable
from pyggml.quants.readers.expressions import ExpressionBlock, Lanes
from pyggml.quants.scales import parts_of

QUAD = 4  # neighbouring weights that are read at once; the first has an index divisible by 4
GRIDS = "grids_"  # before a weight type's name: the buffer of its grids, as shaders name it
_HELPERS = """
fn half(i: u32) -> f32 { return unpack2x16float(w_word(i)).x; }
fn half_e8m0(e: u32) -> f32 {
    return bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
}
fn even_signs(seven: i32, first: u32) -> vec4<i32> {
    let bits = (u32(seven) | (countOneBits(u32(seven)) << 7u)) >> first;
    return vec4<i32>((vec4(bits) >> vec4(0u, 1u, 2u, 3u)) & vec4(1u)) * 255;
}
"""


class One(str):
    """A lane that is a variable, but one number."""


def _is_one(lane: str) -> bool:
    return lane.isdigit() or isinstance(lane, One)


def _u(lane: str) -> str:
    return f"{lane}u" if lane.isdigit() else lane


def _all(lane: str, kind: str, value: int) -> str:
    """A number as often as the lane stands for numbers: once or four times."""
    number = f"{value}u" if kind == "u32" else f"{value}"
    return number if _is_one(lane) else f"vec4<{kind}>({number})"


def _each(lane: str, one: Callable[[str], str]) -> str:
    """`one` of a lane, or of four."""
    if _is_one(lane):
        return one(lane)
    return f"vec4({', '.join(one(f'({lane} + {i}u)') for i in range(QUAD))})"


def _floats(n: int, one: Callable[[str], str]) -> Lanes:
    return Lanes("floats", n, lambda lane: _each(lane, one))


class WordsBlock(ExpressionBlock):
    """Expressions of WGSL for the weight type `name`, and the tables and grids that they name.

    A lane named by a number, or a `One`, is one weight; a lane named by another variable is four
    from there on.
    """

    size = QUAD

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tables: list[tuple[int, ...]] = []
        self.grids: list[ByteTable] = []
        self._name = name

    def number(self, lane: str, value: int) -> str:
        return _all(lane, "i32", value)

    def shift(self, lane: str, n: int) -> str:
        return _all(lane, "u32", n)

    def of_all(self, lane: str, text: str) -> str:
        return text if _is_one(lane) else f"vec4<i32>({text})"

    def where(self, condition: str, a: str, b: str) -> str:
        return f"select({b}, {a}, {condition})"

    def as_float(self, lane: str, whole: str) -> str:
        return f"{'f32' if _is_one(lane) else 'vec4<f32>'}({whole})"

    def lane_before(self, lane: str, n: int) -> str:
        before = f"({lane} - {n}u)"
        return One(before) if _is_one(lane) else before

    # -- reading -------------------------------------------------------------------------------

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        def text(lane: str) -> str:
            if _is_one(lane):
                return f"i32(w_at(at + {offset}u + {_u(lane)}))"
            return f"vec4<i32>(unpack4xU8(w_word(at + {offset}u + {lane})))"

        return Lanes("bytes", n, text)

    def flags(self, offset: int, value: int) -> Lanes:
        def text(lane: str) -> str:
            def one(bit: str) -> str:
                return f"(i32((w_word(at + {offset}u) >> {_u(bit)}) & 1u) * {value})"

            return _each(lane, one)

        return Lanes("bytes", GROUP, text)

    def fields(self, offset: int, n_bytes: int, n_bits: int, n: int | None = None) -> Lanes:
        many, mask, per_word = -(-8 * n_bytes // n_bits), (1 << n_bits) - 1, 32 // n_bits

        def one(field: str) -> str:
            word, i = f"at + {offset}u", _u(field)
            if n_bytes > 4:
                word, i = f"{word} + 4u * ({i} / {per_word}u)", f"({i} % {per_word}u)"
            return f"i32((w_word({word}) >> ({n_bits}u * {i})) & {mask}u)"

        return Lanes("ints", n or many, lambda lane: _each(lane, one))

    def f16(self, offset: int, n: int = 1) -> Lanes:
        return _floats(n, lambda lane: f"half(at + {offset}u + 2u * {_u(lane)})")

    def bf16(self, offset: int, n: int = 1) -> Lanes:
        word = f"w_word(at + {offset}u + 2u * "
        return _floats(n, lambda lane: f"bitcast<f32>({word}{_u(lane)}) << 16u)")

    def f32(self, offset: int, n: int = 1) -> Lanes:
        return _floats(n, lambda lane: f"bitcast<f32>(w_word(at + {offset}u + 4u * {_u(lane)}))")

    def half_e8m0(self, offset: int) -> Lanes:
        return Lanes("floats", 1, lambda lane: f"half_e8m0(w_at(at + {offset}u))")

    def constant(self, value: float) -> Lanes:
        return Lanes("floats", 1, lambda lane: f"{value}f")

    # -- arithmetic ----------------------------------------------------------------------------

    def points(self, indices: Lanes, table: ByteTable) -> Lanes:
        """Four of one row, which lie in a word."""

        def text(lane: str) -> str:
            index = f"{indices.text(One(f'({lane} / {table.width}u)'))}"
            first = f"{lane} % {table.width}u"
            if table is EVEN_SIGNS:
                return f"even_signs({index}, {first})"
            row = f"{self._first_word(table)}u + u32({index}) * {table.width // QUAD}u"
            return f"vec4<i32>(unpack4xU8({GRIDS}{self._name}_at({row} + {first} / {QUAD}u)))"

        return Lanes("bytes", GROUP, text)

    def _first_word(self, table: ByteTable) -> int:
        """Where a table begins among the type's grids."""
        if table not in self.grids:
            self.grids.append(table)
        before = self.grids[: self.grids.index(table)]
        return sum(other.rows.size // QUAD for other in before)

    def half(self, ints: Lanes) -> Lanes:
        def text(lane: str) -> str:
            bits = ints.text(lane)
            each = [bits] if _is_one(lane) else [f"({bits}).{i}" for i in "xyzw"]
            halves = ", ".join(f"unpack2x16float(u32({one})).x" for one in each)
            return halves if _is_one(lane) else f"vec4({halves})"

        return Lanes("floats", ints.n, text)

    def lookup(self, nibbles: Lanes, table: Sequence[int]) -> Lanes:
        values = tuple(v & 255 for v in table)
        if values not in self.tables:
            self.tables.append(values)
        name = f"table{self.tables.index(values)}"
        suffix = {True: "", False: "_of_each"}
        return nibbles._replace(
            kind="bytes", text=lambda lane: f"{name}{suffix[_is_one(lane)]}({nibbles.text(lane)})"
        )


def _table(i: int, values: Sequence[int]) -> str:
    """Functions of an index, and of four."""
    words = [sum(v << 8 * j for j, v in enumerate(values[k : k + 4])) for k in range(0, 16, 4)]
    return f"""
var<private> words{i}: array<u32, 4> = array({", ".join(f"{word}u" for word in words)});
fn table{i}(i: i32) -> i32 {{ return i32((words{i}[i >> 2u] >> (8u * u32(i & 3))) & 255u); }}
fn table{i}_of_each(i: vec4<i32>) -> vec4<i32> {{
    return vec4(table{i}(i.x), table{i}(i.y), table{i}(i.z), table{i}(i.w));
}}"""


class Blocks(NamedTuple):
    """How the weights of a type lie: `n` of them in `n_bytes`. Those of plain types come in 32."""

    n: int
    n_bytes: int

    @property
    def groups(self) -> int:
        return self.n // GROUP


def blocks_of(dtype: DType) -> Blocks:
    if dtype.block == 1:
        return Blocks(GROUP, GROUP * dtype.block_bytes)
    return Blocks(dtype.block, dtype.block_bytes)


@cache
def grid_words(name: str) -> np.ndarray:
    """The rows of the grids that the `weights` of this type read, uint32."""
    block = WordsBlock(name)
    QUANTS[name].decode(block)
    for group in block.groups.values():
        group("lane")
    return np.concatenate([grid.rows.reshape(-1) for grid in block.grids]).view(np.uint32)


@cache
def weight_source(name: str, part: int | None = None) -> str:
    """The WGSL of `weights` for the weight type of this name, which reads `w_at` and `w_word`.

    part: of a weight that which this scale of its block makes; None: the whole"""
    block = WordsBlock(name)
    decoder = QUANTS[name].decode if part is None else parts_of(name)[part]
    decoder(block)
    lines = [_HELPERS, *(_table(i, table) for i, table in enumerate(block.tables))]
    lines += ["fn weights(at: u32, j: u32) -> vec4<f32> {", "    let lane = j & 31u;"]
    *firsts, last = sorted(block.groups)
    lines += [f"    if (j < {i + GROUP}u) {{ return {block.groups[i]('lane')}; }}" for i in firsts]
    return "\n".join([*lines, f"    return {block.groups[last]('lane')};", "}"])
