"""Attention in tiles, without the (T, S) matrix (Dao et al. 2022, 2023), whatever the tiles are.

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

First K and V are packed, up to the last key that any query sees: the rest of a cache is empty. A
task then takes a tile's queries of one head, and goes over the tiles of keys with a running maximum
m and a running sum (the paper's ℓ) of each query.

A kind of tiles is a subclass of ForwardTiles, and one of BackwardTiles (tiled_back.py). Fields are
its operands and its scratch, kernels its products and its softmax.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Float, Floats2, Floats3, Frame, Int, Ints2
from pyggml.jit.scratch import Array, Layout, Scratch, per_thread
from pyggml.jit.simd import fill
from pyggml.jit.tasks import TaskStage, launch, of_threads, stage, task_code, whole
from pyggml.kernels.attention.path import AttentionPath, AttentionProblem, Forward
from pyggml.kernels.attention.softmax import (
    BC,
    MASKED,
    ZERO,
    ScoreBlock,
    columns_in,
    divide_tile,
    group_ranges,
)
from pyggml.kernels.gemm.panels import LANES
from pyggml.sizes import round_up

# -- packing --------------------------------------------------------------------------------------


class KeyPacking(Frame):
    """How an operand (n, heads, D) is packed: a task has BC rows of a head."""

    WRITTEN = ("packed",)
    x: Floats3
    span: Ints2
    spare: Floats2  # a row for each thread


Packing = tuple[Code, KeyPacking]


@kernel
def rows_to_pack(f, task):
    """Of a task: the head, the first row, and how many rows of x are read in all."""
    n_blocks, n_used = (f.x.shape[0] + BC - 1) // BC, np.int64(0)
    for i in range(f.span.shape[0]):
        n_used = max(n_used, np.int64(f.span[i, 1]))
    return task // n_blocks, task % n_blocks * BC, n_used


def _packing_stages(packings: list[Packing], own: list[np.ndarray]) -> list[TaskStage]:
    counts = (f.values["x"].shape[1] * -(-len(f.values["x"]) // BC) for _, f in packings)
    return [tile_stage(code, f, n, own) for (code, f), n in zip(packings, counts, strict=True)]


def tile_stage(code: Code, f: Any, n_tasks: int, own: list[np.ndarray]) -> TaskStage:
    """A stage that touches the frame's arrays. own: those that are threads'; tasks write f.WRITTEN
    of the others."""
    arrays = {name: x for name, x in f.values.items() if isinstance(x, np.ndarray)}
    scratch = {n: x for n, x in arrays.items() if any(x is of_thread for of_thread in own)}
    touches = [whole(arrays[n], n not in f.WRITTEN) for n in arrays.keys() - scratch.keys()]
    return stage(code, f, n_tasks, *touches, *of_threads(scratch))


def own_of_threads(layout: Layout, scratch: Scratch) -> list[np.ndarray]:
    """The arrays of scratch that are threads'."""
    return [scratch[name] for name, x in layout.arrays.items() if x.of_threads]


# -- the tile -------------------------------------------------------------------------------------


class AttentionTiles(Frame):
    """What both passes have. Products take `group` of a tile's queries at once."""

    QUERIES: ClassVar[int]  # of a tile, whole groups
    GROUP: ClassVar[int]
    SCORES: ClassVar[tuple[int, int]]  # rows of S that exist at once, and floats of a row
    q: Floats3
    o: Floats3
    lse: Floats2
    span: Ints2
    scale: Float
    repeats: Int  # query heads to a key head
    n_queries: Int
    group: Int
    # of each thread
    s: Floats3  # SCORES
    starts: Ints2  # of each group, as group_ranges has them
    stops: Ints2
    spare: Floats2

    @kernel
    def begin(f, thread):
        """What a task does before its first product."""

    @kernel
    def end(f, thread):
        """What it does after its last one."""


class ForwardTiles(AttentionTiles):
    """A task takes one tile of queries of one head. The kernels of a kind are

    load(f, thread, head, first, n_rows)                 Q of a tile
    meet(f, thread, key_head, block, starts, stops, o)   of a tile of keys: S, P and o += P·V
    """

    WRITTEN = ("o", "lse")
    o_tile: Floats3  # (QUERIES, width)
    m: Floats2
    norm: Floats2


def _forward_task(f, task, thread):
    """A tile of queries of one head. The last tiles, which see most keys, come first, of all heads:
    what is left at the end is short, and threads that the number of heads divides among stay with
    their heads' keys."""
    n_tiles = (f.q.shape[0] + f.n_queries - 1) // f.n_queries
    n_heads = f.q.shape[1]
    head, first = task % n_heads, (n_tiles - 1 - task // n_heads) * f.n_queries
    n = min(f.n_queries, f.q.shape[0] - first)
    n_groups = (n + f.group - 1) // f.group
    n_rows = n_groups * f.group
    o, m, norm = f.o_tile[thread][:n_rows], f.m[thread], f.norm[thread]
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    f.load(thread, head, first, n_rows)
    fill(o.reshape(-1), ZERO)
    fill(m, MASKED)
    fill(norm, ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, f.group)
    f.begin(thread)
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(f.span, first, key, columns_in(start, stop, key, f.group))
        f.meet(thread, head // f.repeats, block, starts, stops, o)
    f.end(thread)
    divide_tile(f.o, f.lse, o, m, norm, head, first, n)


# -- binding --------------------------------------------------------------------------------------

Tiles = TypeVar("Tiles", bound=AttentionTiles)
Pack = Callable[[AttentionProblem, Any, Scratch], list[Packing]]  # of a pass's operands


def arrays_of_tile(tiles: type[AttentionTiles]) -> dict[str, Array]:
    """Scratch of both passes."""
    n_groups = round_up(tiles.QUERIES // tiles.GROUP, LANES)
    return {
        "s": per_thread(*tiles.SCORES),
        "starts": per_thread(n_groups, dtype=np.int32),
        "stops": per_thread(n_groups, dtype=np.int32),
    }


def bind_tiles(
    tiles: type[Tiles], p: AttentionProblem, a: Forward, scratch: Scratch, **fields: Any
) -> Tiles:
    """The frame; fields: what only one pass has."""
    own = {name: x for name, x in scratch.items() if name in tiles.fields}
    return tiles(
        q=a.q, o=a.o, lse=a.lse, span=a.span, scale=float(a.scale), repeats=p.repeats,
        n_queries=tiles.QUERIES, group=tiles.GROUP, **own, **fields,
    )  # fmt: skip


def call_of(
    layout: Layout, scratch: Scratch, packings: list[Packing], *stages: tuple[Code, Frame, int]
) -> Call:
    """The call that packs, and then runs code on frames, each with its number of tasks."""
    own = own_of_threads(layout, scratch)
    packing = _packing_stages(packings, own)
    return Call(launch, *packing, *(tile_stage(*each, own) for each in stages))


def tiled_forward(
    name: str,
    tiles: type[ForwardTiles],
    takes: Callable[[AttentionProblem], bool],
    arrays: Callable[[AttentionProblem], dict[str, Array]],
    pack: Pack,
    width: Callable[[int], int],
) -> AttentionPath[Forward]:
    """The path of a kind of tiles; arrays: its scratch; width: of a row of so many results."""
    code, rows = task_code(tiles)(_forward_task), round_up(tiles.QUERIES, LANES)

    def layout(p: AttentionProblem) -> Layout:
        o_tile = per_thread(tiles.QUERIES, width(p.value_size))
        sums = dict.fromkeys(("m", "norm"), per_thread(rows))
        return Layout(**arrays_of_tile(tiles), **arrays(p), o_tile=o_tile, **sums)

    def bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        f, n_tasks = bind_tiles(tiles, p, a, scratch), p.n_heads * -(-p.n_queries // tiles.QUERIES)
        return call_of(layout(p), scratch, pack(p, a, scratch), (code, f, n_tasks))

    return AttentionPath(name, True, takes, layout, bind)
