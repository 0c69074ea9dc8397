"""The output layer and its loss on Intel's tiles: logits are used where they are made.

It is attention (pyggml.kernels.attention.amx), with positions for queries, and W's rows for both
keys and values. With z = h·wᵀ, for each position t:

    m = max_v z_v    rest = Σ_v∉targets e^(z_v − m)    o = Σ_v∉targets e^(z_v − m) · w_v

Loss and gradient follow as in pyggml.ops.loss.head_slices. Where a target's p is nearly 1, rounding
e^(z − m) to bfloat16 would cost more than p − 1 is. So o leaves the targets out, and their terms
are added at the end in float32.

A cell is a part of the vocabulary and a share of the positions. It is computed a block of W's rows
at a time. A block is unpacked once, for logits and gradient, and met by the positions, SIDE at a
time. The parts are added up at the end. A task takes one of the LEGS of a cell's blocks, of the
cell that has come least far: no thread is held up by a slow one, which in the end has fewer legs.
"""

from typing import NamedTuple

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.jit import kernel
from pyggml.jit.atomics import add_at, exchange_at, pause
from pyggml.jit.frames import (
    Bool,
    Floats1,
    Floats2,
    Floats3,
    Frame,
    Int,
    Ints2,
    Longs2,
    Shorts1,
    Shorts3,
)
from pyggml.jit.isa import CHOSEN
from pyggml.jit.scratch import Array, Scratch, per_thread
from pyggml.jit.simd import exp32, fill
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels import gemm
from pyggml.kernels.attention.row_softmax import raise_maximum, row_exponentials, row_top
from pyggml.kernels.attention.softmax import MASKED, ZERO
from pyggml.kernels.gemm.amx.rows import (
    LANES,
    LINE,
    PACKED_ROWS,
    PIECE,
    leading,
    matrix,
    pack_rows,
    packed_size,
    panel_bytes,
    unpack_panels,
)
from pyggml.kernels.gemm.amx.tiles import (
    SIDE,
    STEP,
    RowAddress,
    configure,
    micro_product,
    release,
    rows_of,
)
from pyggml.kernels.gemm.frames import BlockMatrix, block_matrix, columns_from, rows_from
from pyggml.kernels.gemm.microkernel import call_block, fetch
from pyggml.kernels.gemm.panels import rounded_up, split
from pyggml.kernels.kernel import Compute
from pyggml.ops.loss.head_slices import Goals
from pyggml.quants import UNPACK
from pyggml.sizes import round_up

_LEAST = np.float32(np.finfo(np.float32).tiny)  # that `rest` is taken to be
PARTS = 8  # of the vocabulary: a number of sums of o that does not depend on the threads
LEGS = 8  # of a cell, one after the other
# A block's panels, for logits and gradient, stay in the second cache; the more rows it has, the
# less often o is met.
FEWEST_ROWS, MOST_ROWS, BLOCK_BYTES = 128, 256, 1 << 20


class HeadTiles(Frame):
    """One chunk of positions."""

    h: Floats1  # (n, K)
    targets: Ints2  # (n, targets of a position)
    n: Int
    k: Int
    w: BlockMatrix
    rounds: Bool  # whether W's unpacker writes bfloat16
    n_vocab: Int
    block: Int  # rows of W
    gradient: Bool
    n_shares: Int  # of the positions
    legs: Longs2  # of each cell, in a line: 2 for each leg that is done, 1 while a thread is at one
    packed_h: Shorts1
    target_logits: Floats2
    # of each part
    m: Floats2
    rest: Floats2
    o: Floats3
    # of each thread
    rows: Shorts3  # of W, as bfloat16
    numbers: Floats2
    transposed: Shorts3  # the block's panels for logits
    pairs: Shorts3  # and for the gradient
    s: Floats3  # logits of SIDE positions and the block's rows
    p: Shorts3  # its exponentials, as bfloat16


# -- tasks ----------------------------------------------------------------------------------------


@task_code(HeadTiles)
def _pack_task(f, task, thread):
    """PACKED_ROWS positions. Legs begin anew."""
    if task == 0:
        f.legs[:] = 0
    pack_rows(f.packed_h, f.h, f.k, False, f.n, f.k, task, f.numbers[thread])


@kernel
def _take_softmax(f, part, group, v, n, thread):
    """From logits to exponentials: P, their sums, and what a rising maximum does to rest and o."""
    s, p, m, rest, o = f.s[thread], f.p[thread], f.m[part], f.rest[part], f.o[part]
    columns, first, start = rounded_up(n, SIDE), group * SIDE, np.int64(0)
    for i in range(SIDE):  # maxima ahead of what waits for them
        top = row_top(s[i].ctypes.data, columns, start, n, np.float32(1))
        if top > m[first + i]:
            raise_maximum(o[first + i], m, rest, first + i, top)
    for i in range(SIDE):
        t, to = first + i, p[i].ctypes.data
        if t < f.n:
            for j in range(f.targets.shape[1]):
                if v <= f.targets[t, j] < v + n:
                    f.target_logits[t, j] = s[i, f.targets[t, j] - v]
                    s[i, f.targets[t, j] - v] = MASKED
        rest[t] += row_exponentials(to, s[i].ctypes.data, columns, start, n, np.float32(1), m[t])


@kernel
def _meet_group(f, part, group, v, n, thread):
    """A group of positions meets the block of n rows from v on."""
    s, p, o = f.s[thread], f.p[thread], f.o[part, group * SIDE :]
    lda = 2 * leading(f.k)
    h = RowAddress(f.packed_h.ctypes.data + group * SIDE * lda, lda)
    for j in range(0, n, SIDE):
        b = f.transposed[thread, j // SIDE].ctypes.data
        micro_product(rows_of(s[:, j:]), h, b, (f.k + STEP - 1) // STEP, False)
    _take_softmax(f, part, group, v, n, thread)
    if f.gradient:
        for j in range(0, f.k, SIDE):
            to, b = rows_of(o[:, j:]), f.pairs[thread, j // SIDE].ctypes.data
            for i in range(SIDE):  # the square that comes next
                fetch(to.address + i * to.stride + 4 * SIDE, 4 * SIDE)
            micro_product(to, rows_of(p), b, (n + STEP - 1) // STEP, True)


@kernel
def _take_leg(f):
    """The cell that has come least far, of those no thread is at; its next leg. There is one, or
    will be: tasks are as many as legs."""
    while True:
        cell, done = -1, 2 * LEGS
        for i in range(f.legs.shape[0]):
            now = add_at(f.legs[i].ctypes.data, 0)
            if now < done and now % 2 == 0:
                cell, done = i, now
        if cell >= 0 and exchange_at(f.legs[cell].ctypes.data, done, done + 1) == done:
            return cell, done // 2
        pause()


@task_code(HeadTiles)
def _leg_task(f, task, thread):
    cell, leg = _take_leg(f)
    part, n_groups = cell // f.n_shares, (f.n + SIDE - 1) // SIDE
    groups = split(n_groups, f.n_shares, cell % f.n_shares)
    n_blocks = (f.n_vocab + f.block - 1) // f.block
    blocks = split(n_blocks, f.m.shape[0], part)
    in_leg = split(blocks[1] - blocks[0], LEGS, leg)
    for t in range(groups[0] * SIDE, groups[1] * SIDE if leg == 0 else 0):
        f.m[part, t], f.rest[part, t] = MASKED, ZERO
        fill(f.o[part, t], ZERO)
    configure()
    for v in range((blocks[0] + in_leg[0]) * f.block, (blocks[0] + in_leg[1]) * f.block, f.block):
        n = min(f.block, f.n_vocab - v)
        w, transposed, pairs = rows_from(f.w, v), f.transposed[thread], f.pairs[thread]
        unpack_panels(f, thread, transposed, pairs, w, n, f.k, f.gradient)
        for group in range(groups[0], groups[1]):
            _meet_group(f, part, group, v, n, thread)
    release()
    add_at(f.legs[cell].ctypes.data, 1)


class HeadSums(Frame):
    """What the parts of a chunk are added up to."""

    losses: Floats1
    tops: Floats1
    dh: Floats2
    targets: Ints2
    shares: Floats2
    weights: Floats1
    w: BlockMatrix  # whose unpacker writes float32
    gradient: Bool
    target_logits: Floats2
    m: Floats2
    rest: Floats2
    o: Floats3
    numbers: Floats2


@task_code(HeadSums)
def _sum_task(f, t, thread):
    """Loss, greatest logit and gradient of one position."""
    top, rest, k = MASKED, ZERO, f.targets.shape[1]
    for part in range(f.m.shape[0]):
        top = max(top, f.m[part, t])
    for part in range(f.m.shape[0]):
        rest += f.rest[part, t] * exp32(f.m[part, t] - top)
    rest = max(rest, _LEAST)
    norm, q_rest, weight = rest, f.shares[t, k], f.weights[t]
    for s in range(k):
        norm += exp32(f.target_logits[t, s] - top)
    log_norm, mass, loss = np.log(norm) + top, q_rest, ZERO
    if q_rest > ZERO:
        loss += q_rest * (np.log(norm) - np.log(rest))
    for s in range(k):
        q = f.shares[t, s]
        mass += q
        if q > ZERO:
            loss += q * (log_norm - f.target_logits[t, s])
    f.losses[t], f.tops[t] = weight * loss, top
    if f.gradient:
        _finish_gradient(f, t, thread, top, norm, mass, q_rest / rest)


@kernel
def _finish_gradient(f, t, thread, top, norm, mass, excess):
    """dh of one position; excess: q_rest / rest."""
    dh, weight = f.dh[t], f.weights[t]
    fill(dh, ZERO)
    for part in range(f.m.shape[0]):
        of, share = f.o[part, t], exp32(f.m[part, t] - top) * weight * (mass / norm - excess)
        for i in range(dh.shape[0]):
            dh[i] += of[i] * share
    for s in range(f.targets.shape[1]):
        surplus = weight * (mass * exp32(f.target_logits[t, s] - top) / norm - f.shares[t, s])
        _add_row(dh, rows_from(f.w, np.int64(f.targets[t, s])), surplus, f.numbers[thread])


@kernel
def _add_row(dh, w, factor, numbers):
    """dh += factor · the first row of W."""
    for k0 in range(0, dh.shape[0], PIECE):
        k = min(PIECE, dh.shape[0] - k0)
        here = columns_from(w, k0)
        call_block(w.unpack, numbers.ctypes.data, here.address, k // w.block)
        for i in range(k):
            dh[k0 + i] += factor * numbers[i]


# -- binding --------------------------------------------------------------------------------------


def takes(n: int, w: DType, compute: Compute, softcap: float) -> bool:
    """Whether tiles serve n positions: W may be rounded, and no logit is capped."""
    return CHOSEN.tiles and n >= SIDE and w is not F32 and compute != "f32" and not softcap


def row_bytes(k: int) -> int:
    """Bytes of a position's sums over all parts."""
    return PARTS * 4 * (round_up(k, SIDE) + LINE // 4)


def _block(n_vocab: int, k: int) -> int:
    """Rows of W whose panels fit the second cache, a multiple of SIDE."""
    fits = BLOCK_BYTES // (4 * k) // SIDE * SIDE
    return min(round_up(n_vocab, SIDE), max(FEWEST_ROWS, min(MOST_ROWS, fits)))


def arrays(n: int, n_vocab: int, k: int, gradient: bool, n_targets: int = 1) -> dict[str, Array]:
    """Scratch for up to n positions of k numbers and so many targets."""
    rows, width, block = round_up(n, SIDE), round_up(k, SIDE), _block(n_vocab, k)
    n_parts = min(PARTS, -(-n_vocab // block))
    return {
        "packed_h": Array((packed_size(n, k),), np.uint16),
        "target_logits": Array((rows, n_targets)),
        "m": Array((n_parts, rows)),
        "rest": Array((n_parts, rows)),
        "o": Array((n_parts, rows, width + LINE // 4 if gradient else 0)),
        "rows": per_thread(LANES, PIECE + LINE // 2, dtype=np.uint16),
        "numbers": per_thread(PIECE),
        "transposed": per_thread(block // SIDE, panel_bytes(k) // 2, dtype=np.uint16),
        "pairs": per_thread(width // SIDE, panel_bytes(block) // 2, dtype=np.uint16),
        "s": per_thread(SIDE, block + LINE // 4),
        "p": per_thread(SIDE, block + LINE // 2, dtype=np.uint16),
    }


class HeadResults(NamedTuple):
    """What a call makes of n positions."""

    losses: np.ndarray  # (n,) float32
    tops: np.ndarray  # (n,) float32, each position's greatest logit
    dh: np.ndarray  # (n, K) float32, with `gradient`


def call(
    w: gemm.Weight,
    h: np.ndarray,
    goals: Goals,
    results: HeadResults,
    gradient: bool,
    scratch: Scratch,
) -> Call:
    """The loss of h (n, K), with `gradient` also dh; scratch: `arrays`, for n positions or more.

    Afterwards scratch["target_logits"] begins with the logits of the n positions' targets.
    """
    (n, k), n_vocab = h.shape, len(w.data)
    n_groups, (n_parts, _) = -(-n // SIDE), scratch["m"].shape
    n_shares = min(n_groups, -(-2 * len(scratch["numbers"]) // n_parts))
    tiled, rounds = matrix(w.data, w.dtype, k, False)
    legs = np.zeros((n_parts * n_shares, LINE // 8), np.int64)
    f = HeadTiles(
        h=h.reshape(-1), n=n, k=k, legs=legs, w=tiled, rounds=rounds, n_vocab=n_vocab,
        block=_block(n_vocab, k), gradient=gradient, n_shares=n_shares, targets=goals.targets,
        **scratch,
    )  # fmt: skip
    exact = block_matrix(w.data, w.dtype, UNPACK[w.dtype.name].address)
    shared = {name: scratch[name] for name in scratch if name in HeadSums.fields}
    sums = HeadSums(w=exact, gradient=gradient, **goals._asdict(), **results._asdict(), **shared)
    parts = stage(_leg_task, f, len(legs) * LEGS)
    packing = stage(_pack_task, f, -(-n // PACKED_ROWS))
    return Call(launch, packing, parts, stage(_sum_task, sums, n))
