"""Gradients of a gated unit with those of the thin factors around it, where rows are many.

    D    = [dgate | dup | dgate·B of gate | dup·B of up]      as gated.py has it
    dB of gate += dgateᵀ·u, dB of up += dupᵀ·u                u = x·Aᵀ of each
    dA of down += vᵀ·h                                        v = dy·B of down

Numbers of D are multiplied while they are in registers, and the unit h is never written. So no
block has all columns of a row: one has 256 of them, a warp 32, of many rows. It writes its part of
D's further columns, and of the three sums; a second launch adds the parts up, in their order.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.fours import eights, load_four
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.lora.gated import eight_gradients
from pyggml.backends.cuda.ops.lora.nodes import GATED_GRADIENTS, GRADIENT_OF_A, GRADIENT_OF_B
from pyggml.backends.cuda.ops.lora.thin_sums import pair, place_in_eights
from pyggml.backends.cuda.ops.lora.thin_tiles import (
    ROWS,
    TILE_COLUMNS,
    from_columns,
    hold,
    put_held,
)
from pyggml.backends.cuda.ops.lora.wide import COLUMNS, MANY_ROWS, columns
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_element
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.tensor import Tensor, zeros
from pyggml.ops import add_inplace
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.sizes import round_up

_WARPS, _BLOCKS = 8, 264  # of a block; blocks that a large card has room for at once
_WIDTH = COLUMNS * _WARPS  # columns of a block
_MOST_COLUMNS = 16  # further ones of each product


@cache
def _kernel(n_tiles: int) -> Any:
    load, n = eights(True), n_tiles * TILE_COLUMNS
    of_parts, of_b, of_sums = (2, _WARPS, ROWS, 2 * n), (2 * n_tiles, 4), (6 * n_tiles, 4)
    of_v, of_right = (2 * n_tiles, 4), (3 * n_tiles, 2)

    @partial(kernel, most_threads=32 * _WARPS, least_blocks=2 if n_tiles == 1 else 1)
    def gradients(d, v, sums, gate, up, dy, factors, rights, sizes):
        """v (blocks of columns, m, 2n), sums (blocks of rows, 3, k, n): parts."""
        m, k, n_rows, d_step = sizes
        parts = cuda.shared.array(of_parts, np.float32)
        b, total = cuda.local.array(of_b, np.uint32), cuda.local.array(of_sums, np.float32)
        right, words = cuda.local.array(of_right, np.uint32), cuda.local.array((3, 8), np.uint32)
        thin = cuda.local.array(of_v, np.float32)
        lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        group, two = lane >> 2, 2 * (lane & 3)
        column = np.int64(cuda.blockIdx.x) * _WIDTH + COLUMNS * warp + 4 * two
        near_column, is_column = min(column, k - 8), column < k
        follow()
        _hold_factors(b, factors, near_column, n_tiles)
        for i in range(6 * n_tiles):
            for e in range(4):
                total[i, e] = ZERO
        begin = np.int64(cuda.blockIdx.y) * n_rows
        for first in range(begin, min(begin + n_rows, m), ROWS):
            for half in range(2):
                row = first + group + 8 * half
                at = min(row, m - 1) * k + near_column
                three = eight_gradients(load(gate, at), load(up, at), load(dy, at))
                is_inside = is_column and row < m
                inside = np.uint32(0xFFFFFFFF) if is_inside else np.uint32(0)
                for i in range(3):
                    hold(words, i, half, three[i], inside)
                if is_inside:
                    put_held(d, row * d_step + column, words, 0, half)
                    put_held(d, row * d_step + k + column, words, 1, half)
            for i in range(3):
                x, step = rights[i]
                for tile in range(n_tiles):
                    at = TILE_COLUMNS * tile + group
                    right[i * n_tiles + tile, 0] = pair(x, at, first + two, step, m)
                    right[i * n_tiles + tile, 1] = pair(x, at, first + two + 8, step, m)
            _multiply(thin, total, words, b, right, n_tiles)
            here = (first - begin) // ROWS & 1  # while others still read the last ones
            for i in range(2 * n_tiles):
                for e in range(4):
                    row, at = group + 8 * (e >> 1), TILE_COLUMNS * i + two + (e & 1)
                    parts[here, warp, row, at] = thin[i, e]
            cuda.syncthreads()
            for e in range(cuda.threadIdx.x, ROWS * 2 * n, 32 * _WARPS):
                row, at, part = e // (2 * n), e % (2 * n), ZERO
                for other in range(_WARPS):
                    part += parts[here, other, row, at]
                if first + row < m:
                    v[(cuda.blockIdx.x * m + first + row) * (2 * n) + at] = part
        _put_sums(sums, total, cuda.blockIdx.y, column - 4 * two, k, n_tiles)

    return follower(gradients)


@device
def _hold_factors(b, factors, column, n_tiles):
    """b = a lane's numbers of both B, in words: of eight columns, row g of each tile."""
    group = (cuda.threadIdx.x & 31) >> 2
    for i in range(2):
        factor, rank, scale = factors[i]
        for tile in range(n_tiles):
            at = TILE_COLUMNS * tile + group
            of_it = scale if at < rank else ZERO
            w = from_columns(factor, min(at, rank - 1), column, (1, rank), of_it)
            for e in range(4):
                b[i * n_tiles + tile, e] = w[e]


@device
def _multiply(thin, total, words, b, right, n_tiles):
    """thin = the held rows of D times B; total += these rows, transposed, times the right ones."""
    for i in range(2 * n_tiles):
        for e in range(4):
            thin[i, e] = ZERO
    for i in range(3):
        for half in range(2):
            at = 4 * half
            a0, a1, a2, a3 = words[i, at], words[i, at + 1], words[i, at + 2], words[i, at + 3]
            transposed = (
                ptx.transpose_8x8(a0),
                ptx.transpose_8x8(a2),
                ptx.transpose_8x8(a1),
                ptx.transpose_8x8(a3),
            )
            for tile in range(n_tiles):
                j = i * n_tiles + tile
                if i < 2:
                    ptx.add_tile(thin, j, (a0, a1, a2, a3), b[j, 2 * half], b[j, 2 * half + 1])
                ptx.add_tile(total, 2 * j + half, transposed, right[j, 0], right[j, 1])


@device
def _put_sums(sums, total, part, column, k, n_tiles):
    """A lane has columns 2j and 2j + 1 of each eight of its warp's, which begin at `column`."""
    lane, n = cuda.threadIdx.x & 31, n_tiles * TILE_COLUMNS
    group, two = lane >> 2, 2 * (lane & 3)
    for i in range(3):
        for tile in range(n_tiles):
            for half in range(2):
                for e in range(4):
                    at = column + place_in_eights(group, half, e)
                    place = ((part * 3 + i) * k + at) * n + tile * TILE_COLUMNS + two + (e & 1)
                    if at < k:
                        sums[place] = total[2 * (i * n_tiles + tile) + half, e]


@kernel
def _add_parts(d, of_gate, of_up, of_down, v, sums, sizes, ranks):
    """D's further columns, and the three gradients, to which it adds."""
    m, k, n, n_slabs, n_ranges, step = sizes
    of_v, of_sums = m * n // 2, 3 * k * n // 4
    for i in range(cuda.grid(1), of_v + of_sums, cuda.gridsize(1)):
        at, of, apart, n_parts = i, v, of_v, n_slabs
        if i >= of_v:
            at, of, apart, n_parts = i - of_v, sums, of_sums, n_ranges
        a, b, c, e = ZERO, ZERO, ZERO, ZERO
        for part in range(n_parts):
            more = load_four(of, 4 * (part * apart + at))
            a, b, c, e = a + more[0], b + more[1], c + more[2], e + more[3]
        if i < of_v:
            row, column = 4 * at // (2 * n), 4 * at % (2 * n)
            ptx.put_four_bf16(d, row * step + 2 * k + column, a, b, c, e)
        else:
            which, column, first = 4 * at // (k * n), 4 * at // n % k, 4 * at % n
            four = a, b, c, e
            for j in range(4):
                if first + j < ranks[which]:
                    if which == 0:
                        of_gate[column * ranks[0] + first + j] += four[j]
                    elif which == 1:
                        of_up[column * ranks[1] + first + j] += four[j]
                    else:
                        of_down[(first + j) * k + column] += four[j]


def _sizes(m: int, k: int) -> tuple[int, int, int]:
    """(Blocks of columns, blocks of rows, rows of these)."""
    n_slabs = -(-k // _WIDTH)
    n_rows = round_up(-(-m // max(1, _BLOCKS // n_slabs)), ROWS)
    return n_slabs, -(-m // n_rows), n_rows


def _ranks(m: Match) -> list[int]:
    return [m.b_gate.shape[1], m.b_up.shape[1], m.da.shape[0]]


def _serves(m: Match, compute: Compute) -> bool:
    """Whether rows are many, D is one, and all products have as many further columns, few."""
    each = {*map(columns, _ranks(m))}
    whole = all(t.src[0].is_contiguous and t.src[0].dtype is F32 for t in (m.to_a, m.to_b, m.to_c))
    few = len(each) == 1 and max(each) <= _MOST_COLUMNS and not m.da.params.get("formula")
    return (
        ptx.TENSOR_CORES
        and few
        and whole
        and m.joint.params["joined"]
        and m.joint.shape[0] >= MANY_ROWS
    )


def _scratch(node: Tensor, compute: Compute) -> int:
    joint = node.params["of"].nodes[0]
    (m, k), n = joint.src[0].shape, columns(joint.src[3].shape[1])
    n_slabs, n_ranges, _ = _sizes(m, k)
    return F32.block_bytes * n * (2 * n_slabs * m + 3 * n_ranges * k)


def _bind(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    joint, of_a, to_a, *of_b = sites
    node, (of_gate, of_up) = joint.node, sorted(
        zip(of_b[::2], of_b[1::2], strict=True), key=lambda b: b[0].node.params["column"]
    )  # fmt: skip
    (m, k), step = node.src[0].shape, node.shape[1]
    ranks = node.src[3].shape[1], node.src[4].shape[1], of_a.node.shape[0]
    n, (n_slabs, n_ranges, n_rows) = columns(ranks[0]), _sizes(m, k)
    parts = joint.scratch.view(np.float32)
    v, sums = parts[: 2 * n * n_slabs * m], parts[2 * n * n_slabs * m :]
    factors = tuple(
        (b, rank, np.float32(scale))
        for b, rank, scale in zip(joint.src[3:], ranks, node.params["scales"], strict=False)
    )
    rights = tuple(
        (site.src[i][site.node.params["first"] :], site.node.src[i].shape[1])
        for site, i in ((of_gate[0], 0), (of_up[0], 0), (of_a, 0))
    )
    return in_turn(
        launch(
            _kernel(n // TILE_COLUMNS), (n_slabs, n_ranges), 32 * _WARPS, joint.stream, joint.out,
            v, sums, *joint.src[:3], factors, rights, (m, k, n_rows, step),
        ),
        per_element(
            _add_parts, m * n // 2 + 3 * k * n // 4, joint.stream, joint.out, of_gate[1].src[0],
            of_up[1].src[0], to_a.src[0], v, sums, (m, k, n, n_slabs, n_ranges, step), ranks,
        ),
    )  # fmt: skip


def _sample(rng: np.random.Generator) -> Graph:
    """Of rows that no block has whole sixteens of, and more columns than a block has."""
    m, k, ranks = MANY_ROWS + 3, 280, (5, 8, 7)
    gate, up, dy = (packed_leaf(rng, (m, k), "BF16") for _ in range(3))
    u, d = packed_leaf(rng, (m, 16), "BF16"), packed_leaf(rng, (m, 72), "BF16")
    factors = [drawn(rng, k, rank) for rank in ranks[:2]]
    joint = GATED_GRADIENTS(gate, up, dy, *factors, scales=(0.5, 3.0), joined=True)
    da = GRADIENT_OF_A(d, joint.saved[0], first=64, rank=ranks[2])
    further = [add_inplace(zeros((ranks[2], k)), da)]
    for i, rank in enumerate(ranks[:2]):
        db = GRADIENT_OF_B(u, joint, first=8 * i, shape=(k, rank), column=k * i)
        further.append(add_inplace(zeros((k, rank)), db))
    return Graph.of(joint, *further)


GATED_SUMS = Fusion(
    Pattern("""
        joint = gated_gradients(gate, up, dy, b_gate, b_up)
        unit = saved(joint)
        da = gradient_of_a(d, unit)
        to_a = add(so_far_a, da)
        db = gradient_of_b(u, joint)
        to_b = add(so_far_b, db)
        dc = gradient_of_b(u, joint)
        to_c = add(so_far_c, dc)
    """, reach=64),
    _serves, _bind, _sample, scratch=_scratch, adds=True,
)  # fmt: skip
