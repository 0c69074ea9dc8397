"""y[T, N] (+)= x[T, K] · W[N, K]ᵀ for few tokens: each number is one dot product with a row of W.

In integers, x is rounded to bytes and meets rows of any quantised type as they lie
(pyggml.kernels.gemm.int_dots). In floats, rows of the types in pyggml.kernels.gemm.dots are
multiplied as they lie; rows of other types are unpacked piece by piece.
"""

from functools import cache

import numpy as np

from pyggml.graph.call import Call
from pyggml.jit import Code, kernel
from pyggml.jit.frames import Floats2, Int
from pyggml.jit.scratch import Layout, Scratch, per_thread
from pyggml.jit.simd import dot
from pyggml.jit.tasks import launch, stage, task_code
from pyggml.kernels.gemm.dots import TOGETHER, group_sums, kind_of_rows, row_dots
from pyggml.kernels.gemm.frames import Product, block_matrix
from pyggml.kernels.gemm.int_dots import int_dots
from pyggml.kernels.gemm.int_pack import pack_token, packed_bytes
from pyggml.kernels.gemm.microkernel import call_block, fetch
from pyggml.kernels.gemm.path import Operands, Path, Problem, flat
from pyggml.quants.layout import GROUP
from pyggml.quants.unpack import DIRECT_TYPES, UNPACK, WHOLE_TYPES
from pyggml.sizes import round_up

FEW = 3  # tokens at most: they would fill no tile
FEW_IN_BYTES = 8  # at most in integers, where no other path for as few takes the type
TOGETHER_IN_BYTES = 4  # tokens whose sums leave registers for a unit of a row
TASK_ROWS = 64  # weight rows of one task, a multiple of TOGETHER
MOST_ROWS = 256  # of one task in integers, each of which rounds x
_TASKS = 2  # of a thread, if they have fewer rows
AHEAD = 8192  # bytes ahead that are fetched: the CPU itself does not look beyond a page
PIECE = 256  # numbers of a weight row that are unpacked at a time; a multiple of every block


class FewProduct(Product):
    """A product of few tokens in floats. A task takes TASK_ROWS rows of W."""

    # of each thread
    found: Floats2  # one token's dot products
    piece: Floats2
    token: Floats2  # the sums of a token's groups


class FewInts(Product):
    """A product of few tokens in integers. A task takes `rows` rows of W."""

    rows: Int
    group_bytes: Int  # packed tokens that are multiplied at once
    # of each thread
    found: Floats2  # each token's dot products, MOST_ROWS apart
    packed: Floats2  # all tokens


def _few_tasks(kind: int) -> Code:
    """The task that multiplies TASK_ROWS weight rows with one token after the other.

    `kind`, a constant when it is compiled, is the rows' type (pyggml.kernels.gemm.dots); −1: unpack
    them.
    """

    def task_of_few(f, task, thread):
        x, depth, stride = f.a, f.k, f.w.row_bytes
        first, last = task * TASK_ROWS, min((task + 1) * TASK_ROWS, f.n)
        found = f.found[thread, : last - first]
        sums = f.token[thread]
        for t in range(f.m):
            token = x[t * f.lda : t * f.lda + depth]
            if kind >= 0:
                group_sums(sums, token)
            for i in range(0, last - first, TOGETHER):
                here, n_rows = f.w.address + (first + i) * stride, min(TOGETHER, last - first - i)
                to = f.found[thread, i:].ctypes.data
                if kind < 0 or TOGETHER == 1:
                    fetch(here + AHEAD, n_rows * stride)
                if kind >= 0:
                    x_here, sums_here = token.ctypes.data, sums.ctypes.data
                    row_dots(kind, to, here, stride, n_rows, x_here, sums_here, depth)
                else:
                    for j in range(n_rows):
                        row = here + j * stride
                        found[i + j] = _unpacked_dot(f.w, row, token, f.piece[thread])
            _put_few(f, t, first, found)

    return task_code(FewProduct)(task_of_few)


@kernel
def _put_few(f, t, first, found):
    """Write `found` to token t's result from number `first` on, or add it."""
    start = t * f.n + first
    mine = f.c[start : start + found.size]
    for i in range(found.size):
        mine[i] = found[i] + (mine[i] if f.accumulate else np.float32(0))


@kernel
def _unpacked_dot(w, address, x, piece):
    """Σ w x of the row of W at this address; PIECE numbers at a time are unpacked to `piece`."""
    found = np.float32(0)
    for k0 in range(0, x.size, PIECE):
        k = min(PIECE, x.size - k0)
        here = address + k0 // w.block * w.block_bytes
        call_block(w.unpack, piece.ctypes.data, here, k // w.block)
        found += dot(piece[:k], x[k0 : k0 + k])
    return found


_FLOATS = {kind: _few_tasks(kind) for kind in range(-1, len(DIRECT_TYPES))}


@cache
def _int_tasks(kind: int, n_tokens: int) -> Code:
    """The task that multiplies some rows of type WHOLE_TYPES[kind] with all tokens, n_tokens at
    once; the last one again where there are fewer."""

    def task_of_few_ints(f, task, thread):
        first, last = task * f.rows, min((task + 1) * f.rows, f.n)
        packed, to = f.packed[thread].ctypes.data, f.found[thread].ctypes.data
        size, n_groups = f.group_bytes, (f.m + n_tokens - 1) // n_tokens
        for t in range(n_groups * n_tokens):
            x = f.a[min(t, f.m - 1) * f.lda :].ctypes.data
            pack_token(kind, n_tokens, packed + t // n_tokens * size, t % n_tokens, x, f.k)
        for i in range(first, last):
            row, here = f.w.address + i * f.w.row_bytes, to + 4 * (i - first)
            for group in range(n_groups):
                of_group = here + 4 * MOST_ROWS * n_tokens * group
                x = packed + group * size
                int_dots(kind, n_tokens, of_group, 4 * MOST_ROWS, row, x, f.k)
        for t in range(f.m):
            found = f.found[thread, t * MOST_ROWS : t * MOST_ROWS + last - first]
            _put_few(f, t, first, found)

    return task_code(FewInts)(task_of_few_ints)


# -- the paths ------------------------------------------------------------------------------------


def _layout(p: Problem) -> Layout:
    sums = round_up(p.k, GROUP) // GROUP
    return Layout(found=per_thread(TASK_ROWS), piece=per_thread(PIECE), token=per_thread(sums))


def _call(p: Problem, o: Operands, scratch: Scratch, code: Code, unpack: int) -> Call:
    w = block_matrix(o.b, p.weight_type, unpack)
    f = FewProduct(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, **scratch,
    )  # fmt: skip
    return Call(launch, stage(code, f, -(-p.n // TASK_ROWS)))


def _bind(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    kind = kind_of_rows(p.weight_type, p.k)
    unpack = UNPACK[p.weight_type.name].address if kind < 0 else 0  # else none is to be compiled
    return _call(p, o, scratch, _FLOATS[kind], unpack)


def _takes_ints(p: Problem) -> bool:
    return p.form == "mul_mat" and p.compute == "int8" and p.weight_type.name in WHOLE_TYPES


def _layout_of_ints(p: Problem) -> Layout:
    tokens = round_up(p.m, min(p.m, TOGETHER_IN_BYTES))
    n = tokens * packed_bytes(p.weight_type.name, p.k) // 4
    return Layout(found=per_thread(tokens * MOST_ROWS), packed=per_thread(n))


def _bind_ints(p: Problem, o: Operands, **scratch: np.ndarray) -> Call:
    w, n_threads = block_matrix(o.b, p.weight_type, 0), len(scratch["packed"])
    rows = max(1, min(MOST_ROWS, p.n // (_TASKS * n_threads)))
    name, n = p.weight_type.name, min(p.m, TOGETHER_IN_BYTES)
    f = FewInts(
        c=o.c.reshape(-1), a=flat(o.a), lda=o.lda, w=w, m=p.m, n=p.n, k=p.k,
        accumulate=o.accumulate, rows=rows, group_bytes=n * packed_bytes(name, p.k), **scratch,
    )  # fmt: skip
    code = _int_tasks(WHOLE_TYPES.index(name), n)
    return Call(launch, stage(code, f, -(-p.n // rows)))


INT8 = Path(
    name="few int8", takes=_takes_ints, layout=_layout_of_ints, bind=_bind_ints, most=FEW_IN_BYTES
)
FLOATS = Path(name="few", takes=lambda p: p.form == "mul_mat", layout=_layout, bind=_bind, most=FEW)
