"""RMS norm of heads and their rotation in one kernel, as Qwen 3 has them; and their gradients.

A warp has heads of 128 features, a lane four neighbours of each. The other feature of a pair (j and
j + 64) is with the lane 16 further, or 16 before. Heads of one token share its angles. Heads and
gradients are F32 or BF16.

They are written by hand: lanes exchange numbers, and hold four heads. A row program whose elements
read their partners' numbers from memory took 2.1 times as long (H200, heads of 8,192 tokens).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.blocks import first_row, rows_apart
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import lies_in_fours, load_four, loader, storer
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import ALL, LANES, warp_sum
from pyggml.backends.cuda.ops.norm.norm_mul import bind_sums, bytes_of_sums
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import follow, follower
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_rows
from pyggml.backends.cuda.runtime.simulator import HAS_PTX
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import Memory
from pyggml.graph.pattern import Match
from pyggml.graph.tensor import Tensor, leaf
from pyggml.ops import rms_norm_mul, rope_table
from pyggml.ops.attention.rope import rope_apply, rope_apply_back
from pyggml.ops.norm.norm_mul import rms_norm_mul_back, rms_norm_mul_back_w

HEAD, PAIRS = 128, 64
_WARPS = 8  # of a block
_MOST_BLOCKS, _BLOCKS_OF_SUMS = 1 << 16, 528  # each of the latter has sums of its own
_SIZE = np.float32(HEAD)


@device
def angles(table, head, n_heads, n_tokens):
    """(cosines, sines) of the lane's four features, for the token of a head."""
    at = 2 * (head // n_heads % n_tokens) * PAIRS + (4 * cuda.threadIdx.x & (PAIRS - 1))
    return load_four(table, at), load_four(table, at + PAIRS)


@device
def _rotate(v, cos, sin, sign):
    """The lane's four features of a head, turned; sign −1 turns back."""
    # Of 64 bits, Numba's own choice, a whole number becomes a float32 slowly.
    s = sign * np.float32(np.int32(2 * (cuda.threadIdx.x >> 4 & 1) - 1))
    return (
        v[0] * cos[0] + s * sin[0] * cuda.shfl_xor_sync(ALL, v[0], 16),
        v[1] * cos[1] + s * sin[1] * cuda.shfl_xor_sync(ALL, v[1], 16),
        v[2] * cos[2] + s * sin[2] * cuda.shfl_xor_sync(ALL, v[2], 16),
        v[3] * cos[3] + s * sin[3] * cuda.shfl_xor_sync(ALL, v[3], 16),
    )


@device
def _dot(p, q):
    return warp_sum(p[0] * q[0] + p[1] * q[1] + p[2] * q[2] + p[3] * q[3])


@device
def normed_and_turned(p, weight, cos, sin, eps):
    """The lane's four features of a head, normalised and turned."""
    r = ptx.inverse_root(_dot(p, p) / _SIZE + eps)
    v = p[0] * r * weight[0], p[1] * r * weight[1], p[2] * r * weight[2], p[3] * r * weight[3]
    return _rotate(v, cos, sin, ONE)


@device
def _hold(held, i, four):
    held[i, 0], held[i, 1], held[i, 2], held[i, 3] = four


@device
def _four(held, i):
    return held[i, 0], held[i, 1], held[i, 2], held[i, 3]


@cache
def _norm_turn(x_in_bf16: bool, out_in_bf16: bool, together: int) -> Any:
    load, store, of_heads = loader(x_in_bf16), storer(out_in_bf16), (together, 4)

    @kernel
    def norm_turn(out, x, w, table, n_heads, n_tokens, eps):
        heads = cuda.local.array(of_heads, np.float32)
        follow()
        weight = load_four(w, 4 * cuda.threadIdx.x)
        for group in range(first_row(), x.size // (together * HEAD), rows_apart()):
            first = group * together * HEAD + 4 * cuda.threadIdx.x
            cos, sin = angles(table, group * together, n_heads, n_tokens)
            for i in range(together):
                _hold(heads, i, load(x, first + i * HEAD))
            for i in range(together):
                v = normed_and_turned(_four(heads, i), weight, cos, sin, eps)
                store(out, first + i * HEAD, v[0], v[1], v[2], v[3])

    return follower(norm_turn)


@device
def _head_back(p, slope, weight, cos, sin, eps):
    """The lane's four of a head's gradient, and what the head adds to that of the weight."""
    t = _rotate(slope, cos, sin, -ONE)
    v = t[0] * weight[0], t[1] * weight[1], t[2] * weight[2], t[3] * weight[3]
    r = ptx.inverse_root(_dot(p, p) / _SIZE + eps)
    b = r * r * r * _dot(p, v) / _SIZE
    dx = r * v[0] - b * p[0], r * v[1] - b * p[1], r * v[2] - b * p[2], r * v[3] - b * p[3]
    return dx, (r * p[0] * t[0], r * p[1] * t[1], r * p[2] * t[2], r * p[3] * t[3])


@cache
def _turn_norm_back(
    x_in_bf16: bool, dy_in_bf16: bool, dx_in_bf16: bool, together: int, has_sums: bool
) -> Any:
    """has_sums: whether `sums` (blocks, HEAD) are wanted: of each block, what its heads add to the
    gradient of w."""
    load_x, load_dy, store = loader(x_in_bf16), loader(dy_in_bf16), storer(dx_in_bf16)
    of_heads, of_parts = (together, 4), (_WARPS, HEAD)

    @kernel
    def turn_norm_back(dx, sums, x, w, dy, table, n_heads, n_tokens, eps):
        heads = cuda.local.array(of_heads, np.float32)
        slopes = cuda.local.array(of_heads, np.float32)
        parts = cuda.shared.array(of_parts, np.float32)
        follow()
        weight, mine = load_four(w, 4 * cuda.threadIdx.x), (ZERO, ZERO, ZERO, ZERO)
        for group in range(first_row(), x.size // (together * HEAD), rows_apart()):
            first = group * together * HEAD + 4 * cuda.threadIdx.x
            cos, sin = angles(table, group * together, n_heads, n_tokens)
            for i in range(together):
                _hold(heads, i, load_x(x, first + i * HEAD))
                _hold(slopes, i, load_dy(dy, first + i * HEAD))
            for i in range(together):
                d, more = _head_back(_four(heads, i), _four(slopes, i), weight, cos, sin, eps)
                store(dx, first + i * HEAD, d[0], d[1], d[2], d[3])
                mine = (mine[0] + more[0], mine[1] + more[1], mine[2] + more[2], mine[3] + more[3])
        if has_sums:
            for i in range(4):
                parts[cuda.threadIdx.y, 4 * cuda.threadIdx.x + i] = mine[i]
            cuda.syncthreads()
            if cuda.threadIdx.y == 0:
                for i in range(4):
                    j, total = 4 * cuda.threadIdx.x + i, ZERO
                    for warp in range(_WARPS):
                        total += parts[warp, j]
                    sums[cuda.blockIdx.x * HEAD + j] = total

    return follower(turn_norm_back)


def _are_whole(norm: Tensor, rope: Tensor, *arrays: Tensor) -> bool:
    """Whether all pairs of heads of 128 are turned, and all sources lie well."""
    table = rope.src[1]
    whole = rope.params["neox"] and not rope.params["offset"] and table.shape[2] == PAIRS
    is_head = rope.shape[-1] == norm.shape[-1] == HEAD
    return HAS_PTX and whole and is_head and lies_in_fours(table, *arrays)


def _turns_first(m: Match, compute: Compute) -> bool:
    return not m.is_read(m.turned) and _are_whole(m.back, m.turned, m.dy, m.x, m.w)


def _together(x: Tensor) -> int:
    """Heads of a warp: all of one token."""
    return next(n for n in (4, 2, 1) if x.shape[-2] % n == 0)


def _sizes(x: Tensor, table: Tensor) -> tuple[int, int]:
    return x.shape[-2], table.shape[0]


def _bind_forward(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    norm, rope = sites
    arrays = rope.out, *norm.src, rope.src[1]
    together, of_table = _together(rope.node), _sizes(*rope.node.src)
    n_rows = rope.node.n_elements // (HEAD * together)
    run = _norm_turn(*(t.dtype is BF16 for t in (norm.node.src[0], rope.node)), together)
    return per_rows(run, n_rows, HEAD, rope.stream, *arrays, *of_table, *norm.scalars)


def _backward(back: CudaSite, rope: CudaSite, n_blocks: int, sums: Any, has_sums: bool) -> Call:
    (x, w, _), (dy, table) = back.src, rope.src
    together, tensors = _together(rope.node), (back.node.src[0], rope.node.src[0], back.node)
    run = _turn_norm_back(*(t.dtype is BF16 for t in tensors), together, has_sums)
    return launch(
        run, n_blocks, (LANES, _WARPS), back.stream, back.out, sums, x, w, dy, table,
        *_sizes(*rope.node.src), *back.scalars,
    )  # fmt: skip


def _n_blocks(x: Tensor, most: int) -> int:
    """Of warps that have a token's heads, some together."""
    return max(1, min(-(-x.n_elements // (HEAD * _together(x) * _WARPS)), most))


def _bind_backward(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    rope, back = sites
    return _backward(back, rope, _n_blocks(back.node, _MOST_BLOCKS), back.out, False)


def _bind_backwards(sites: Sequence[CudaSite], is_read: Sequence[bool]) -> Call:
    """With the gradient of the norm's weight."""
    rope, back, of_weight = sites
    n_blocks, scratch = _n_blocks(back.node, _BLOCKS_OF_SUMS), of_weight.scratch.view(np.float32)
    sums, calls = bind_sums(of_weight.out, scratch, n_blocks, back.stream)
    return in_turn(_backward(back, rope, n_blocks, sums, True), *calls)


def _sample(rng: np.random.Generator) -> Graph:
    """The norm of heads, turned, and the gradient of both."""
    x, w, dy = drawn(rng, 5, 3, HEAD), drawn(rng, HEAD), drawn(rng, 5, 3, HEAD)
    table = rope_table(leaf(np.array([0, 1, 5, 2, 9], np.int32)), n_dims=HEAD, mode="neox")
    turned = rope_apply(rms_norm_mul(x, w, eps=1e-3), table, "neox")
    back = rms_norm_mul_back(x, w, rope_apply_back(dy, table, "neox"), eps=1e-3)
    return Graph.of(turned, back)


def _sample_of_all(rng: np.random.Generator) -> Graph:
    """The gradients of the norm of heads and of its weight."""
    x, w, dy = drawn(rng, 70, 3, HEAD), drawn(rng, HEAD), drawn(rng, 70, 3, HEAD)
    table = rope_table(leaf(np.arange(70, dtype=np.int32)), n_dims=HEAD, mode="neox")
    turned = rope_apply_back(dy, table, "neox")
    back = rms_norm_mul_back(x, w, turned, eps=1e-3)
    return Graph.of(back, rms_norm_mul_back_w(x, turned, eps=1e-3))


NORM_ROPE = Fusion(
    near("norm = rms_norm_mul(x, w); turned = rope_apply(norm, table)"),
    lambda m, compute: not m.is_read(m.norm) and _are_whole(m.norm, m.turned, m.x, m.w),
    _bind_forward, _sample, Memory.INPLACE,
)  # fmt: skip
ROPE_BACK_NORM_BACKS = Fusion(
    near("""
        turned = rope_apply_back(dy, table)
        back = rms_norm_mul_back(x, w, turned)
        dw = rms_norm_mul_back_w(x, turned)
    """),
    _turns_first, _bind_backwards, _sample_of_all, Memory.INPLACE,
    scratch=lambda node, compute: bytes_of_sums(_n_blocks(node, _BLOCKS_OF_SUMS), HEAD),
)  # fmt: skip
ROPE_BACK_NORM_BACK = Fusion(
    near("turned = rope_apply_back(dy, table); back = rms_norm_mul_back(x, w, turned)"),
    _turns_first, _bind_backward, _sample, Memory.INPLACE,
)  # fmt: skip
