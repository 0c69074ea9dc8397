"""Register tiles: one declaration for each type of number that products multiply.

A microkernel keeps a tile of C in registers: mr rows of nv vectors of sums. Each step takes a word
of every row of A and of every column of B, and adds the inner product of the two to a sum. A word
is 32 bits along the depth: one float32, a pair of bfloat16, or four bytes.

A is packed in groups of mr rows, interleaved as (words, mr): its words are broadcast.
B is packed in panels of nv vectors of columns, as (words, panel).

pyggml.kernels.gemm.panels packs floats and pairs, pyggml.kernels.gemm.int8 bytes. Thin products do
not pack B (pyggml.kernels.gemm.thin), nor attention A (pyggml.kernels.attention.flash_tile).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llvmlite import ir

from pyggml.jit.isa import CHOSEN
from pyggml.jit.llvm import I8, by_quads, fma, multiply_bytes, signed_quads
from pyggml.kernels.gemm.bfloat16 import dot_pairs, dot_widened_pairs, multiply_matrices
from pyggml.sizes import round_up


class TileShape(NamedTuple):
    """The numbers of a tile that kernels use."""

    mr: int  # rows of a group of A
    panel: int  # columns of a panel of B
    per_word: int  # numbers in a word


@dataclass(frozen=True, slots=True)
class Tile:
    """mr rows of nv vectors. inner(builder, a, b, sums) emits sums + the products of words a, b.

    Where the CPU multiplies matrices (NEON), `square` emits sums (2, 2) + two words of two rows
    times two of two columns; mr is even, and so is any depth in words.
    """

    mr: int
    nv: int
    per_word: int
    inner: Callable[[Any, Any, Any, Any], Any]
    lanes: int = CHOSEN.lanes
    square: Callable[[Any, Any, Any, Any], Any] | None = None

    @property
    def panel(self) -> int:
        """Columns of the tile."""
        return self.nv * self.lanes

    @property
    def padded_mr(self) -> int:
        """mr, rounded up to whole vectors."""
        return round_up(self.mr, self.lanes)

    @property
    def shape(self) -> TileShape:
        return TileShape(self.mr, self.panel, self.per_word)

    def words(self, depth: int) -> int:
        """Words of `depth` numbers; pairs are padded with zeros to whole vectors."""
        if self.per_word == 1:
            return depth
        return round_up(depth, self.per_word * self.lanes) // self.per_word

    def packed_words(self, n_rows: int, depth: int) -> int:
        """Words of A (n_rows, depth) in whole groups."""
        return round_up(n_rows, self.mr) * self.words(depth)


# -- the tiles of this CPU ------------------------------------------------------------------------


class Sizes(NamedTuple):
    """(mr, nv) of the tile of each type of number."""

    floats: tuple[int, int]
    pairs: tuple[int, int]
    bytes: tuple[int, int]


# By ISA. Registers hold the mr · nv sums, nv vectors of B and a broadcast of A; those of bytes hold
# each sum twice: a block's as integers, that of all blocks as floats. Where there are 16, VNNI's
# floats lie in memory meanwhile: (6, 2) then makes 415 GFLOP/s, (6, 1) 357 (Zen 5 at 256 bits).
SIZES: dict[str, Sizes] = {
    "amx": Sizes(floats=(12, 2), pairs=(12, 2), bytes=(12, 1)),
    "avx512bf16": Sizes(floats=(6, 4), pairs=(6, 4), bytes=(6, 2)),
    "avx512vnni": Sizes(floats=(12, 2), pairs=(12, 2), bytes=(12, 1)),
    "avxvnni": Sizes(floats=(6, 2), pairs=(6, 2), bytes=(6, 2)),
    "avx512": Sizes(floats=(12, 2), pairs=(12, 2), bytes=(12, 1)),
    "avx2": Sizes(floats=(6, 2), pairs=(6, 2), bytes=(6, 1)),
    "neonbf16": Sizes(floats=(6, 4), pairs=(6, 4), bytes=(6, 2)),
    "neoni8mm": Sizes(floats=(6, 4), pairs=(6, 4), bytes=(6, 2)),
    "neondot": Sizes(floats=(6, 4), pairs=(6, 4), bytes=(6, 2)),
    "neon": Sizes(floats=(6, 4), pairs=(6, 4), bytes=(6, 2)),
    "generic": Sizes(floats=(4, 2), pairs=(4, 2), bytes=(4, 1)),
    "numpy": Sizes(floats=(4, 2), pairs=(4, 2), bytes=(4, 1)),
}
_OURS = SIZES[CHOSEN.name]


def _dot_bytes(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """a signed, b as by_quads wants it, sums in int32."""
    return by_quads(builder, b, a, sums)


def _dot_signed_bytes(builder: Any, a: Any, b: Any, sums: Any) -> Any:
    """The same of signed a and b."""
    numbers = ir.VectorType(I8, 4 * sums.type.count)
    return signed_quads(builder, builder.bitcast(b, numbers), builder.bitcast(a, numbers), sums)


FLOAT_TILE = Tile(*_OURS.floats, per_word=1, inner=fma)
PAIR_TILE = Tile(
    *_OURS.pairs, per_word=2, inner=dot_pairs if CHOSEN.bf16 else dot_widened_pairs,
    square=multiply_matrices if CHOSEN.bf16 and CHOSEN.neon else None,
)  # fmt: skip
BYTE_TILE = Tile(
    *_OURS.bytes, per_word=4, inner=_dot_signed_bytes if CHOSEN.byte_pairs else _dot_bytes,
    square=multiply_bytes if CHOSEN.i8mm else None,
)  # fmt: skip
THIN_TILE = Tile(4, 2, per_word=1, inner=fma)  # fits every register file
# Where there are 32 registers: beside a product the rows of a group of A, and of a gradient of A or
# B all of a rank of 8, so that what it is summed over is read once.
BESIDE_TILE, OUTER_TILE = (
    replace(THIN_TILE, mr=n) if CHOSEN.lanes == 16 else THIN_TILE for n in (6, 8)
)  # fmt: skip

# The kernels of attention choose between these two as they run: they have one size. Their depths
# are those of the keys that are seen, which may be odd.
ATTENTION_FLOATS = FLOAT_TILE
ATTENTION_PAIRS = replace(PAIR_TILE, mr=FLOAT_TILE.mr, nv=FLOAT_TILE.nv, square=None)
