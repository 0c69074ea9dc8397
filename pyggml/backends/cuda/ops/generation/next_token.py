"""The likeliest token, and the inputs of its pass: pyggml.ops.next_token on the card.

Blocks share the logits, and each finds its greatest; the block that ends last takes the greatest of
all. A logit and its index are one whole number, a rank: the greater rank is the greater logit or,
of equal ones, the lower index. One launch computes both ops where they follow each other.
"""

from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_max, is_last
from pyggml.backends.cuda.code.fours import load_four, vectorizable
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.order import order_of
from pyggml.backends.cuda.code.ptx import bits_of
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.early import (
    await_others,
    begins_early,
    least_shared,
    release_others,
)
from pyggml.backends.cuda.runtime.fusion import Fusion, drawn, near
from pyggml.backends.cuda.runtime.kernel import Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, launch
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import I32
from pyggml.graph.tensor import Tensor, zeros
from pyggml.ops import advance, likeliest

_BLOCKS = small(132)  # one for each multiprocessor of a large card
_THREADS = small(THREADS, 4)
_INDICES = (1 << 31) - 1  # the bits of a rank that hold an index; those above hold a number
_NAN = (1 << 32) - 1


@device
def _rank(x, i):
    """The rank of the number x at index i: NaN ranks before all others, and -0 with 0."""
    order = order_of(x) if x == x else np.int64(_NAN)
    return (order << 31) | (_INDICES - i)


@device
def _rank_of_four(logits, i):
    a, b, c, d = load_four(logits, i)
    return max(max(_rank(a, i), _rank(b, i + 1)), max(_rank(c, i + 2), _rank(d, i + 3)))


@device
def _greatest_rank(logits, n_fours):
    """Of a thread's logits: they share the first n_fours fours, then what is left."""
    best, me, n = np.int64(0), cuda.grid(1), cuda.gridsize(1)
    for i in range(me, n_fours, 2 * n):
        other = min(i + n, n_fours - 1)  # both are on their way at once
        best = max(best, max(_rank_of_four(logits, 4 * i), _rank_of_four(logits, 4 * other)))
    for i in range(4 * n_fours + me, logits.size, n):
        best = max(best, _rank(logits[i], i))
    return best


@device
def _move(inputs, token):
    tokens, positions, rows, span = inputs
    tokens[0] = token
    positions[0] += 1
    rows[0] += 1
    span[1] += 1


@cache
def _likeliest(advances: bool) -> Any:
    @partial(kernel, shared_bytes=least_shared())
    def likeliest(choice, ranks, tickets, logits, n_fours, inputs):
        """choice: (2,) uint32; ranks: (blocks,) int64, the greatest that each finds"""
        parts = cuda.shared.array(THREADS, np.int64)
        ticket = cuda.shared.array(1, np.uint32)
        await_others()
        best = _greatest_rank(logits, n_fours)
        release_others()
        best = block_max(best, parts)
        if cuda.threadIdx.x == 0:
            ranks[cuda.blockIdx.x] = best
        if is_last(ticket, tickets, 0, cuda.gridDim.x):
            for i in range(cuda.threadIdx.x, cuda.gridDim.x, cuda.blockDim.x):
                best = max(best, ranks[i])
            best = block_max(best, parts)
            if cuda.threadIdx.x == 0:
                token = _INDICES - (best & _INDICES)
                choice[0], choice[1] = token, bits_of(logits[token])
                if advances:
                    _move(inputs, token)

    return begins_early(likeliest, lambda arguments: ())


@kernel
def _advance(choice, inputs):
    """By one thread."""
    _move(inputs, choice[0])


def _scratch(node: Tensor, compute: Compute) -> int:
    """A rank of each block."""
    return 8 * min(_BLOCKS, -(-node.src[0].n_elements // _THREADS))


def _launch(site: CudaSite, inputs: tuple[Any, ...] = ()) -> Call:
    """inputs: of the pass, if it becomes that of the token."""
    tickets = site.constant(np.zeros(1, np.uint32))  # 0 between launches
    (logits,), ranks, choice = site.src, site.scratch.view(np.int64), site.out.view(np.uint32)
    n_fours = logits.size // 4 if vectorizable(logits[: logits.size // 4 * 4]) else 0
    return launch(
        _likeliest(bool(inputs)), ranks.size, _THREADS, site.stream, choice, ranks, tickets, logits,
        n_fours, inputs or 0, shared_bytes=least_shared(),
    )  # fmt: skip


def _inputs(site: CudaSite) -> tuple[Any, ...]:
    _, _, *inputs = site.src
    return site.out, *inputs


def _sample(rng: np.random.Generator) -> Graph:
    token, *inputs = (zeros(shape, I32) for shape in ((1,), (1,), (1,), (1, 2)))
    choice = likeliest(drawn(rng, 1, 1234))
    return Graph.of(choice, advance(token, choice, *inputs))


declare("likeliest", _launch, scratch=_scratch)
declare("advance", lambda site: launch(_advance, 1, 1, site.stream, site.src[1], _inputs(site)))
LIKELIEST_ADVANCE = Fusion(
    near("choice = likeliest(logits); moved = advance(tokens, choice, *others)"),
    lambda m, compute: True, lambda sites, is_read: _launch(sites[0], _inputs(sites[1])), _sample,
    scratch=_scratch,
)  # fmt: skip
