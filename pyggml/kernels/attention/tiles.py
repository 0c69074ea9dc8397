"""Attention in tiles (Dao et al. 2022, 2023): what both passes have, whatever the tiles are.

First K and V are packed, up to the last key that any query sees: the rest of a cache is empty. A
task then takes a tile's queries of one head, and goes over the tiles of BC keys. What both passes
do is compiled once, for their common class: packing, and the products of a tile.

A kind of tiles is a TileSizes and kernels, in classes of which its frames inherit:

load_rows(f, rows, x, first, head, n_used, spare)          rows of one head of x
pack(f, packed, x, first, n, head, n_used, spare)          X:  columns are features
pack_transposed(f, packed, x, first, head, n_used, spare)  Xᵀ of BC rows: columns are tokens
multiply(f, a, row, step, b, c, ldc, depth, adding)        C (group, panel) (+)= A · B
sizes(f)                                                   the TileSizes, constants for LLVM

The first operand of a product lies in rows, the second in panels of so many columns
(pyggml.kernels.gemm.tile); both in words, which hold one number each or two, neighbours along k.
Rows from `n_used` on, and what fills up panels, are zeros. In `multiply` depth, and A's steps from
row to row and along k, count words.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.tasks import TaskStage, frame_code, launch, of_threads, stage, whole
from pyggml.kernels.attention.path import AttentionProblem, Forward
from pyggml.kernels.attention.softmax import BC, ScoreBlock
from pyggml.kernels.gemm.panels import LANES
from pyggml.sizes import round_up


class TileSizes(NamedTuple):
    """The numbers of a kind of tiles.

    queries   of a tile: whole groups
    group     rows of the first operand that a product takes
    together  queries whose scores are there at once
    panel     columns of the second operand
    per_word  numbers in a word
    step      numbers of k that products begin and end with
    lanes     words of a vector: rows are padded to whole ones
    pad       words after each row and panel: a power of two apart, they would meet in few sets
    parts     of a number of Q and K, from which scores are made
    """

    queries: int
    group: int
    together: int
    panel: int
    per_word: int
    step: int
    lanes: int
    pad: int = 0
    parts: int = 1

    @property
    def lds(self) -> int:
        """Floats from row to row of scores: whole groups of keys."""
        return round_up(round_up(BC, self.group), self.lanes) + self.pad

    @property
    def ldp(self) -> int:
        """Words from row to row of probabilities, pairs of keys."""
        return round_up(round_up(BC, self.group), self.lanes) // 2 + self.pad

    def width(self, d: int) -> int:
        """d features in whole panels."""
        return round_up(d, self.panel)

    def row_words(self, d: int, parts: int = 1) -> int:
        """Words of a row of D numbers, in whole vectors."""
        return parts * round_up(d, self.per_word * self.lanes) // self.per_word

    def rows(self, d: int, parts: int = 1) -> Array:
        """A tile's rows of one head, of each thread."""
        return per_thread(self.queries, self.row_words(d, parts) + self.pad)

    def panel_shape(self, n: int, d: int) -> tuple[int, int]:
        """(panels, words of a panel) of X (n, d)."""
        return self.width(d) // self.panel, n // self.per_word * self.panel + self.pad

    def packed_keys(self, p: AttentionProblem, d: int) -> Array:
        """X (S, HK, d) packed."""
        return Array((p.n_key_heads, *self.panel_shape(round_up(p.n_keys, BC), d)))

    def transposed_keys(self, p: AttentionProblem, d: int, parts: int = 1) -> Array:
        """Xᵀ packed."""
        n_panels = round_up(p.n_keys, BC) // self.panel
        return Array((p.n_key_heads, n_panels, self.row_words(d, parts) * self.panel + self.pad))

    def spare(self, d: int) -> Array:
        """What each thread packs with."""
        rows = self.lanes * (self.row_words(d, self.parts) + self.pad)
        return per_thread(round_up(rows + 2 * (self.width(d) + self.lanes), LANES))


class AttentionTiles(Frame):
    """The frame of a pass. Its stages are packing and, tile by tile, all else."""

    SIZES: ClassVar[TileSizes]
    OWN: ClassVar[dict[str, tuple[int, int]]] = {}  # shapes of what threads have besides
    WRITTEN: ClassVar[tuple[str, ...]]
    sizes: ClassVar[Any]  # and the other kernels of a kind
    load_rows: ClassVar[Any]
    pack: ClassVar[Any]
    pack_transposed: ClassVar[Any]
    multiply: ClassVar[Any]
    q: Floats3
    k: Floats3
    v: Floats3
    o: Floats3
    lse: Floats2
    span: Ints2
    scale: Float
    repeats: Int  # query heads to a key head
    packed_kt: Floats3  # Kᵀ; of the others, those that a pass reads
    packed_k: Floats3
    packed_v: Floats3
    packed_vt: Floats3
    # of each thread
    q_rows: Floats3
    s: Floats3  # rows of scores
    starts: Ints2  # of each group, as group_ranges has them
    stops: Ints2
    spare: Floats2

    @kernel
    def begin(f, thread):
        """What a task does before its first product."""

    @kernel
    def end(f, thread):
        """What it does after its last one."""


def pack_task(f, task, thread):
    """BC rows of a head's keys and values."""
    n_blocks, n_used = (f.k.shape[0] + BC - 1) // BC, np.int64(0)
    for i in range(f.span.shape[0]):
        n_used = max(n_used, np.int64(f.span[i, 1]))
    head, first = task // n_blocks, task % n_blocks * BC
    if first < n_used:
        spare = f.spare[thread]
        for x, packed in ((f.k, f.packed_kt), (f.v, f.packed_vt)):
            if packed.size > 0:
                f.pack_transposed(packed[head], x, first, head, n_used, spare)
        for x, packed in ((f.k, f.packed_k), (f.v, f.packed_v)):
            if packed.size > 0:
                f.pack(panels_from(f, packed[head], first), x, first, BC, head, n_used, spare)


@kernel
def panels_from(f, packed, first):
    """The part of panels of packed rows of X that begins with row `first`."""
    return packed[:, first // f.sizes().per_word * f.sizes().panel :]


@kernel
def queries_from(f, block, starts, stops, i):
    """Of the queries at row i of a tile, those whose scores are there at once: their scores, and
    the keys that each of their groups sees."""
    first, last = i // f.sizes().group, (i + f.sizes().together) // f.sizes().group
    own = ScoreBlock(block.span, block.first + i, block.key, block.window)
    return own, starts[first:last], stops[first:last]


# -- binding --------------------------------------------------------------------------------------

Tiles = TypeVar("Tiles", bound=AttentionTiles)
_PACKED = "packed_kt", "packed_k", "packed_v", "packed_vt"


def arrays_of_tile(tiles: type[AttentionTiles], p: AttentionProblem) -> dict[str, Array]:
    """Scratch of both passes."""
    sizes, own = tiles.SIZES, {name: per_thread(*shape) for name, shape in tiles.OWN.items()}
    n_groups = per_thread(round_up(sizes.queries // sizes.group, LANES), dtype=np.int32)
    return {
        "packed_kt": sizes.transposed_keys(p, p.head_size, sizes.parts),
        "q_rows": sizes.rows(p.head_size, sizes.parts),
        "s": per_thread(sizes.together, sizes.lds),
        "starts": n_groups,
        "stops": n_groups,
        "spare": sizes.spare(max(p.head_size, p.value_size)),
    } | own


def bind_tiles(
    tiles: type[Tiles], p: AttentionProblem, a: Forward, scratch: Scratch, **fields: Any
) -> Tiles:
    """The frame; fields: what only one pass has."""
    own = {name: x for name, x in scratch.items() if name in tiles.fields}
    own = dict.fromkeys(_PACKED, np.zeros((0, 0, 0), np.float32)) | own
    return tiles(
        q=a.q, k=a.k, v=a.v, o=a.o, lse=a.lse, span=a.span,
        scale=float(a.scale), repeats=p.repeats, **own, **fields,
    )  # fmt: skip


def call_of(
    layout: Layout, scratch: Scratch, p: AttentionProblem, task: Callable[..., None],
    f: AttentionTiles, n_tasks: int, *further: TaskStage,
) -> Call:  # fmt: skip
    """The call that packs keys and values, runs so many tasks, and then further stages."""
    tiles, values = type(f), {n: x for n, x in f.values.items() if isinstance(x, np.ndarray)}
    own = {n: x for n, x in values.items() if n in layout.arrays and layout[n].of_threads}
    packed = [whole(values[name], False) for name in _PACKED if values[name].size]
    reads = [whole(x) for x in (f.values["k"], f.values["v"], f.values["span"])]
    spare = of_threads({"spare": scratch["spare"]})
    n_packs = p.n_key_heads * -(-p.n_keys // BC)
    pack = stage(frame_code(pack_task, tiles.COMMON or tiles), f, n_packs, *reads, *packed, *spare)
    names = (n for n, x in values.items() if n not in (*own, "k", "v") and x.size)
    touches = [whole(values[n], n not in tiles.WRITTEN) for n in names]
    return Call(
        launch,
        pack,
        stage(frame_code(task, tiles), f, n_tasks, *touches, *of_threads(own)),
        *further,
    )
