"""Attention in tiles, forward, whatever the tiles are (pyggml.kernels.attention.tiles).

s_ij = scale · q_i·k_j for span_i0 <= j < span_i1, else −∞
p_ij = exp(s_ij − lse_i),  lse_i = log Σ_j exp(s_ij),  o_i = Σ_j p_ij v_j

A task goes over the tiles of keys with a running maximum m and a running sum (the paper's ℓ) of
each query.
"""

from collections.abc import Callable

from pyggml.graph.call import Call
from pyggml.jit import kernel
from pyggml.jit.frames import Floats2, Floats3
from pyggml.jit.scratch import Layout, Scratch, per_thread
from pyggml.jit.simd import fill
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
from pyggml.kernels.attention.tile_products import add_to_queries, scores
from pyggml.kernels.attention.tiles import (
    AttentionTiles,
    arrays_of_tile,
    bind_tiles,
    call_of,
    queries_from,
)
from pyggml.kernels.gemm.panels import LANES
from pyggml.sizes import round_up


class ForwardTiles(AttentionTiles):
    """A task takes one tile of queries of one head. Of its kind is the kernel

    softmax(f, thread, i, s, o, m, block, starts, stops)   P of the queries at row i, from their S
    """

    WRITTEN = ("o", "lse")
    # of each thread
    o_tile: Floats3
    m: Floats2
    norm: Floats2


@kernel
def _meet(f, thread, key_head, block, starts, stops, o):
    """A tile of keys: S, P and o += P·V, some queries at a time."""
    for i in range(0, o.shape[0], f.sizes().together):
        own, start, stop = queries_from(f.common, block, starts, stops, i)
        o_here, rows = o[i : i + f.sizes().together], f.q_rows[thread][i:]
        s = f.s[thread][: o_here.shape[0]]
        scores(f.common, s, rows, f.packed_kt[key_head], block.key, start, stop)
        p = f.softmax(thread, i, s, o_here, f.m[thread][i:], own, start, stop)
        add_to_queries(f.common, o_here, p, f.packed_v[key_head], block.key, start, stop)


def _forward_task(f, task, thread):
    """A tile of queries of one head. The last tiles, which see most keys, come first, of all heads:
    what is left at the end is short, and threads that the number of heads divides among stay with
    their heads' keys."""
    n_queries, group = f.sizes().queries, f.sizes().group
    n_tiles, n_heads = (f.q.shape[0] + n_queries - 1) // n_queries, f.q.shape[1]
    head, first = task % n_heads, (n_tiles - 1 - task // n_heads) * n_queries
    n = min(n_queries, f.q.shape[0] - first)
    n_groups = (n + group - 1) // group
    n_rows = n_groups * group
    o, m, norm = f.o_tile[thread][:n_rows], f.m[thread], f.norm[thread]
    starts, stops = f.starts[thread][:n_groups], f.stops[thread][:n_groups]
    rows = f.q_rows[thread][:n_rows]
    f.common.load_rows(rows, f.q, first, head, f.q.shape[0], f.spare[thread])
    fill(o.reshape(-1), ZERO)
    fill(m, MASKED)
    fill(norm, ZERO)
    start, stop = group_ranges(starts, stops, f.span, first, group)
    f.begin(thread)
    for key in range(start // BC * BC, stop, BC):
        block = ScoreBlock(f.span, first, key, columns_in(start, stop, key, group))
        _meet(f, thread, head // f.repeats, block, starts, stops, o)
    f.end(thread)
    divide_tile(f.o, f.lse, o, m, norm, head, first, n)


def tiled_forward(
    name: str, tiles: type[ForwardTiles], takes: Callable[[AttentionProblem], bool]
) -> AttentionPath[Forward]:
    """The path of a kind of tiles."""
    sizes = tiles.SIZES

    def layout(p: AttentionProblem) -> Layout:
        o_tile = per_thread(sizes.queries, sizes.width(p.value_size))
        packed_v = sizes.packed_keys(p, p.value_size)
        sums = dict.fromkeys(("m", "norm"), per_thread(round_up(sizes.queries, LANES)))
        return Layout(**arrays_of_tile(tiles, p), packed_v=packed_v, o_tile=o_tile, **sums)

    def bind(p: AttentionProblem, a: Forward, scratch: Scratch) -> Call:
        f, n_tasks = bind_tiles(tiles, p, a, scratch), p.n_heads * -(-p.n_queries // sizes.queries)
        return call_of(layout(p), scratch, p, _forward_task, f, n_tasks)

    return AttentionPath(name, True, takes, layout, bind)
