"""Both gradients of a gated unit, and the unit itself, in one kernel: swiglu of gate and up.

    D_gate = [dy·up·silu'(gate) | its product with B of gate]
    D_up   = [dy·silu(gate)     | its product with B of up]
    h      = silu(gate)·up, for the gradient of the A that reads it

Both D may be one: [gradient of gate | gradient of up | their products].

Each of gate, up and dy is read once, where three kernels would read eight matrices. The numbers lie
as in wide.py. All matrices are BF16.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import cluster_ptx
from pyggml.backends.cuda.code.blocks import is_last
from pyggml.backends.cuda.code.cluster_ptx import MOST_BLOCKS
from pyggml.backends.cuda.code.formulas import QUICK, device_formula
from pyggml.backends.cuda.code.fours import eights
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.lora.operands import in_words
from pyggml.backends.cuda.ops.lora.thin_tiles import (
    ROWS,
    TILE_COLUMNS,
    adder,
    clear_tiles,
    hold,
    put_held,
    put_tiles,
    tiles_of,
)
from pyggml.backends.cuda.ops.lora.wide import (
    COLUMNS,
    BlockForm,
    add_up,
    columns,
    form_of,
    no_barrier,
    no_cluster,
    sharer,
    tickets_of,
    total_tiles,
    width,
)
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import launch
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.ops.activation.glu import SWIGLU_GRADIENTS
from pyggml.sizes import round_up

# Of gate, up and dy: (the gradient of gate, that of up, the unit's value).
gradients_of_unit = device_formula(SWIGLU_GRADIENTS, QUICK)


@device
def eight_gradients(gate, up, dy):
    a, b = gradients_of_unit(gate[0], up[0], dy[0]), gradients_of_unit(gate[1], up[1], dy[1])
    c, d = gradients_of_unit(gate[2], up[2], dy[2]), gradients_of_unit(gate[3], up[3], dy[3])
    e, f = gradients_of_unit(gate[4], up[4], dy[4]), gradients_of_unit(gate[5], up[5], dy[5])
    g, h = gradients_of_unit(gate[6], up[6], dy[6]), gradients_of_unit(gate[7], up[7], dy[7])
    return (
        in_words((a[0], b[0], c[0], d[0], e[0], f[0], g[0], h[0])),
        in_words((a[1], b[1], c[1], d[1], e[1], f[1], g[1], h[1])),
        in_words((a[2], b[2], c[2], d[2], e[2], f[2], g[2], h[2])),
    )


@cache
def _ends(tiles_of_gate: int, tiles_of_up: int, form: BlockForm) -> tuple[Any, Any, Any]:
    """(place, begin, finish) of blocks that share rows. In a cluster D is one."""
    groups, warps, *_ = form
    n_gate, n_up = tiles_of_gate * TILE_COLUMNS, tiles_of_up * TILE_COLUMNS
    if not form.in_cluster:
        of_parts = warps, ROWS * groups * max(n_gate, n_up)

        @device
        def finish(
            d_gate, d_up, sums, more, tickets, gates, ups, barrier, first, m, furthers, steps
        ):
            parts = cuda.shared.array(of_parts, np.float32)
            ticket = cuda.shared.array(1, np.uint32)
            total_tiles(sums, parts, gates, tiles_of_gate, groups, warps, first, m)
            cuda.syncthreads()
            total_tiles(more, parts, ups, tiles_of_up, groups, warps, first, m)
            if is_last(ticket, tickets, cuda.blockIdx.y, cuda.gridDim.x):
                add_up(d_gate, d_gate, False, sums, groups, first, m, n_gate, furthers[0], steps[0])
                add_up(d_up, d_up, False, more, groups, first, m, n_up, furthers[1], steps[1])

        return no_cluster, no_barrier, finish
    begin, share_products = sharer(warps, n := n_gate + n_up)
    of_parts = warps, ROWS * n

    @device
    def finish_in_cluster(
        d_gate, d_up, sums, more, tickets, gates, ups, barrier, first, m, furthers, steps
    ):
        parts = cuda.shared.array(of_parts, np.float32)
        put_tiles(parts, gates, tiles_of_gate, 1, 0, n)
        put_tiles(parts, ups, tiles_of_up, 1, n_gate, n)
        cuda.syncthreads()
        cluster_ptx.await_cluster()  # until then another block may not have begun
        share_products(parts, barrier, d_gate, d_gate, False, first, m, furthers[0], steps[0])

    return cluster_ptx.clusters_of(MOST_BLOCKS), begin, finish_in_cluster


@cache
def _kernel(tiles_of_gate: int, tiles_of_up: int, form: BlockForm) -> Any:
    (groups, warps, *_), (most_threads, least_blocks) = form, form.bounds
    load, add_tiles = eights(True), adder(False, groups)
    place, begin_block, finish = _ends(tiles_of_gate, tiles_of_up, form)
    sums_of_gate, sums_of_up = groups * tiles_of_gate, groups * tiles_of_up
    of_gate, of_up, of_words = (sums_of_gate, 4), (sums_of_up, 4), (3 * groups, 8)

    @partial(kernel, most_threads=most_threads, least_blocks=least_blocks)
    def gradients(
        d_gate, d_up, h, sums, more, tickets, gate, up, dy, b_gate, b_up, m, k, furthers, steps
    ):  # fmt: skip
        place()
        barrier = cuda.shared.array(1, np.uint64)
        gates = cuda.local.array(of_gate, np.float32)
        ups = cuda.local.array(of_up, np.float32)
        words = cuda.local.array(of_words, np.uint32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, mine = lane >> 2, 8 * (lane & 3)
        first = np.int64(cuda.blockIdx.y) * (ROWS * groups)
        clear_tiles(gates, sums_of_gate)
        clear_tiles(ups, sums_of_up)
        begin_block(barrier)
        follow()
        begin, apart = cuda.blockIdx.x * warps + warp, cuda.gridDim.x * warps
        for start in range(COLUMNS * begin, k, COLUMNS * apart):
            column = min(start + mine, k - 8)
            inside = np.uint32(0xFFFFFFFF) if start + mine < k else np.uint32(0)
            for half in range(2 * groups):
                at = min(first + group + 8 * half, m - 1) * k + column
                three = eight_gradients(load(gate, at), load(up, at), load(dy, at))
                for i in range(3):
                    hold(words, i * groups + (half >> 1), half & 1, three[i], inside)
            add_tiles(gates, words, 0, b_gate, tiles_of_gate, column)
            add_tiles(ups, words, 1, b_up, tiles_of_up, column)
            for half in range(2 * groups):
                row, of_half, g = first + group + 8 * half, half & 1, half >> 1
                if row < m and start + mine < k:
                    put_held(d_gate, row * steps[0] + column, words, g, of_half)
                    put_held(d_up, row * steps[1] + column, words, groups + g, of_half)
                    put_held(h, row * k + column, words, 2 * groups + g, of_half)
        finish(d_gate, d_up, sums, more, tickets, gates, ups, barrier, first, m, furthers, steps)

    return follower(gradients)


def _widths(node: Tensor) -> tuple[int, int]:
    """Further columns of D_gate and of D_up."""
    b_gate, b_up = node.src[3:]
    return columns(b_gate.shape[1]), columns(b_up.shape[1])


def sides(n: int, ranks: Sequence[int], joined: bool) -> tuple[int, int]:
    """Numbers from row to row of D_gate and of D_up, of n columns; of a joined one both are its."""
    each = [n + columns(rank) for rank in ranks]
    gate, up = (sum(each), sum(each)) if joined else each
    return width(gate), width(up)


def _form(node: Tensor) -> BlockForm:
    m, k = node.src[0].shape
    form = form_of(m, k, sum(_widths(node)), steps=1)
    return form if node.params["joined"] else form._replace(steps=1, in_cluster=False)


def _parts(node: Tensor) -> list[int]:
    """Bytes of the products of all blocks with the factors of gate and of up."""
    form, (m, k) = _form(node), node.src[0].shape
    return [round_up(form.scratch(m, k, n), ALIGNMENT) for n in _widths(node)]


def _scratch(node: Tensor, compute: Compute) -> int:
    return sum(_parts(node))


def _bind(site: CudaSite) -> Call:
    (m, k), widths = site.node.src[0].shape, _widths(site.node)
    middle = _parts(site.node)[0]
    products = [p.view(np.float32) for p in (site.scratch[:middle], site.scratch[middle:])]
    factors = [
        tiles_of([b], [t.shape[1]], [scale], (1, t.shape[1]))
        for b, t, scale in zip(
            site.src[3:], site.node.src[3:], site.node.params["scales"], strict=True
        )
    ]
    form = _form(site.node)
    run = _kernel(widths[0] // TILE_COLUMNS, widths[1] // TILE_COLUMNS, form)
    joined, furthers = site.node.params["joined"], (k, k)
    *of_up, unit = (site.out[k:], *site.saved) if joined else site.saved
    if joined:  # those of up count from where it begins
        furthers = 2 * k, k + widths[0]
    grid = form.n_parts(m, k), form.n_blocks(m)
    return launch(
        run, grid, 32 * form.n_warps, site.stream, site.out,
        *of_up, unit, *products, tickets_of(site, m), *site.src[:3], *factors, m, k, furthers,
        sides(k, [b.shape[1] for b in site.node.src[3:]], joined),
    )  # fmt: skip


GRADIENTS = CudaKernel(_bind, scratch=_scratch)
