"""One weight of a block, for every weight type with a decoder, as a WGSL function.

    fn weight(at: u32, j: u32) -> f32     weight j of the block that begins at byte `at` of `w`

`WordsBlock` runs the decoder (pyggml.quants.layout) and writes down, for each group of 32 weights,
the expression of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from pyggml._jit import BlockCode
from pyggml.backends.expressions import ExpressionBlock, Lanes
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP

TYPES = tuple(name for name, quant in QUANTS.items() if not isinstance(quant.decode, BlockCode))
_HELPERS = """
fn short(i: u32) -> u32 { return w_at(i) | (w_at(i + 1u) << 8u); }
fn word(i: u32) -> u32 { return short(i) | (short(i + 2u) << 16u); }
fn half(i: u32) -> f32 { return unpack2x16float(short(i)).x; }
fn half_e8m0(e: u32) -> f32 {
    return bitcast<f32>(select((e - 1u) << 23u, 0x00200000u << e, e < 2u));
}
"""


def _u(lane: str) -> str:
    return f"{lane}u" if lane.isdigit() else lane


class WordsBlock(ExpressionBlock):
    """Expressions of WGSL, and the tables that they name."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[int, ...]] = []

    def chosen(self, lane: str, n: int, below: str, other: str) -> str:
        return f"select({other}, {below}, {lane} < {n}u)"

    def moved(self, lane: str, n: int) -> str:
        return f"({lane} - {n}u)"

    # -- reading -------------------------------------------------------------------------------

    def bytes(self, offset: int, n: int = GROUP) -> Lanes:
        return Lanes("bytes", n, lambda lane: f"i32(w_at(at + {offset}u + {_u(lane)}))")

    def flags(self, offset: int, value: int) -> Lanes:
        def text(lane: str) -> str:
            byte = f"w_at(at + {offset}u + ({_u(lane)} >> 3u))"
            return f"(i32(({byte} >> ({_u(lane)} & 7u)) & 1u) * {value})"

        return Lanes("bytes", GROUP, text)

    def fields(self, offset: int, n_bytes: int, n_bits: int) -> Lanes:
        per_byte, mask = 8 // n_bits, (1 << n_bits) - 1

        def text(lane: str) -> str:
            byte = f"w_at(at + {offset}u + {_u(lane)} / {per_byte}u)"
            return f"i32(({byte} >> ({n_bits}u * ({_u(lane)} % {per_byte}u))) & {mask}u)"

        return Lanes("ints", 8 * n_bytes // n_bits, text)

    def f16(self, offset: int, n: int = 1) -> Lanes:
        return Lanes("floats", n, lambda lane: f"half(at + {offset}u + 2u * {_u(lane)})")

    def bf16(self, offset: int, n: int = 1) -> Lanes:
        def text(lane: str) -> str:
            return f"bitcast<f32>(short(at + {offset}u + 2u * {_u(lane)}) << 16u)"

        return Lanes("floats", n, text)

    def f32(self, offset: int, n: int = 1) -> Lanes:
        return Lanes(
            "floats", n, lambda lane: f"bitcast<f32>(word(at + {offset}u + 4u * {_u(lane)}))"
        )

    def half_e8m0(self, offset: int) -> Lanes:
        return Lanes("floats", 1, lambda lane: f"half_e8m0(w_at(at + {offset}u))")

    # -- arithmetic ----------------------------------------------------------------------------

    def bits(self, whole: Lanes, first: int, n: int, to: int = 0) -> Lanes:
        mask = (1 << n) - 1
        return whole._replace(
            text=lambda lane: f"((({whole.text(lane)} >> {first}u) & {mask}) << {to}u)"
        )

    def lookup(self, nibbles: Lanes, table: Sequence[int]) -> Lanes:
        values = tuple(v & 255 for v in table)
        if values not in self.tables:
            self.tables.append(values)
        name = f"table{self.tables.index(values)}"
        return nibbles._replace(text=lambda lane: f"{name}[{nibbles.text(lane)}]")

    def floats(self, whole: Lanes) -> Lanes:
        def text(lane: str) -> str:
            number = whole.text(lane)
            return f"f32(({number} ^ 128) - 128)" if whole.kind == "bytes" else f"f32({number})"

        return Lanes("floats", whole.n, text)


@cache
def weight_source(name: str) -> str:
    """The WGSL of `weight` for the weight type of this name, which reads bytes by `w_at(i)`."""
    block, decode = WordsBlock(), QUANTS[name].decode
    assert not isinstance(decode, BlockCode), f"{name} has no decoder"
    decode(block)
    lines = [_HELPERS]
    for i, table in enumerate(block.tables):
        values = ", ".join(map(str, table))
        lines.append(f"var<private> table{i}: array<i32, {len(table)}> = array({values});")
    lines += ["fn weight(at: u32, j: u32) -> f32 {", "    let lane = j & 31u;"]
    *some, last = sorted(block.groups)
    lines += [f"    if (j < {i + GROUP}u) {{ return {block.groups[i]('lane')}; }}" for i in some]
    return "\n".join([*lines, f"    return {block.groups[last]('lane')};", "}"])
