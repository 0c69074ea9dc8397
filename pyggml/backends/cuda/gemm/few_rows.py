"""Products of few rows of A in one launch: of several matrices, after a norm, with what is added.

    y = A · Wᵀ + b        y = silu(A · gateᵀ) · (A · upᵀ)        A may be rms_norm(a) · w

Each part, a result of its own, has some of the blocks of the launch. All round A by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from pyggml._jit import BlockCode
from pyggml.backends.cuda.driver import SIMULATED, cuda, kernel
from pyggml.backends.cuda.early import begins_early
from pyggml.backends.cuda.gemm import digits
from pyggml.backends.cuda.gemm.packed_dots import PIECES, QUADS, Cut, Kind, product_of
from pyggml.backends.cuda.gemm.problem import Operands, Path, Problem
from pyggml.backends.cuda.launch import THREADS, launch
from pyggml.backends.cuda.packed import closed
from pyggml.call import Call
from pyggml.dtypes import DType
from pyggml.quants import QUANTS
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

MOST = 4  # rows of A
_MANY = 4096  # rows of W from which a lane has two
_WARPS = (8, 4, 2)  # of a block: as many as its shared memory holds
_SHARED = 46 << 10  # bytes that a block may take
_PROCESSORS, _OF_PROCESSOR, _MOST_WARPS = 132, 220 << 10, 24  # of a large card; bytes, warps


@dataclass(frozen=True, slots=True)
class Part:
    """A result (rows, n): A · wᵀ, with `added` to it; or with `up` a gated product."""

    out: Any
    w: Any
    dtype: DType
    n: int
    added: Any = None
    up: Any = None


@dataclass(frozen=True, slots=True)
class Norm:
    """A is rms_norm(a) · weights; it is written to `out` if others read it."""

    weights: Any
    eps: np.float32
    out: Any
    is_kept: bool


def serves(dtype: DType, rows: int, k: int) -> bool:
    """Whether there are such products with W of this type."""
    if SIMULATED or not dtype.quantised or rows > MOST or k % GROUP:
        return False
    has_words = not isinstance(QUANTS[dtype.name].decode, BlockCode)
    return has_words and _bytes(dtype, rows, k, 2, min(_WARPS)) <= _SHARED


def _cut(dtype: DType, k: int) -> Cut:
    n_blocks = k // dtype.block
    quads = min((8, 4, 2), key=lambda n: (round_up(n_blocks, n), -n))
    piece = min(n_blocks, PIECES.get(dtype.block, 1) * quads)
    return Cut(quads, piece, round_up(piece * dtype.block_bytes, 16) + 16)


def _bytes(dtype: DType, rows: int, k: int, columns: int, n_warps: int) -> int:
    """Of shared memory: A, and two pieces of every warp's rows."""
    cut = _cut(dtype, k)
    return rows * sum(digits.room_of(k)) + 2 * n_warps * (QUADS // cut.quads) * columns * cut.stage


def products(
    parts: Sequence[Part], a: Any, rows: int, k: int, stream: Any, norm: Norm | None = None
) -> Call:
    """The launch. `serves` holds for all parts."""
    kinds, sizes = [], []
    for part in parts:
        columns = 2 if part.up is not None or (part.n >= _MANY and rows <= 2) else 1
        kinds.append(Kind(part.dtype.name, columns, rows, part.up is not None))
        sizes.append((part.dtype, rows, k, columns))
    n_warps = next(n for n in _WARPS if all(_bytes(*size, n) <= _SHARED for size in sizes))
    n_bytes = max(_bytes(*size, n_warps) for size in sizes)
    room = _PROCESSORS * min(_OF_PROCESSOR // n_bytes, _MOST_WARPS // n_warps)
    wanted = [_blocks(part, kind, n_warps, k) for part, kind in zip(parts, kinds, strict=True)]
    shrink = max(1.0, sum(wanted) / room)
    blocks = [max(1, int(n / shrink)) for n in wanted]
    ends = tuple(np.int64(n) for n in np.cumsum(blocks))
    of_norm = (a, np.float32(0), a, False) if norm is None else (
        norm.weights, norm.eps, norm.out, norm.is_kept
    )  # fmt: skip
    run = _kernel(tuple(kinds), norm is not None)
    return launch(
        run, int(ends[-1]), 32 * n_warps, stream, tuple(_argument(p, k) for p in parts), ends, a, k,
        digits.room_of(k), of_norm, shared_bytes=n_bytes,
    )  # fmt: skip


def _blocks(part: Part, kind: Kind, n_warps: int, k: int) -> int:
    """As many as have rows."""
    of_lane = 1 if kind.is_gated else kind.columns
    return -(-part.n // (n_warps * of_lane * (QUADS // _cut(part.dtype, k).quads)))


def _argument(part: Part, k: int) -> tuple[Any, ...]:
    """As `product_of` has it."""
    added, w = part.out if part.added is None else part.added, part.w.view(np.uint8)
    up = w if part.up is None else part.up.view(np.uint8)
    return part.out, added, w, up, part.n, _cut(part.dtype, k), part.added is not None


def _source(n_parts: int) -> str:
    """The source of a launch's kernel: each block computes some of one part."""
    lines = ["def multiply(parts, ends, a, k, room, norm):"]
    lines += [
        "    memory = cuda.shared.array(0, np.uint32)",
        f"    sums = cuda.shared.array({THREADS}, np.float32)",
        "    number = cuda.blockIdx.x",
    ]
    for i in range(n_parts):
        first = f"ends[{i - 1}]" if i else "0"
        mine = f"number - {first}, ends[{i}] - {first}"
        lines += [
            f"    if {first} <= number < ends[{i}]:",
            f"        product{i}(memory, sums, parts[{i}], a, k, room, norm, {mine})",
        ]
    return "\n".join(lines)


@cache
def _kernel(kinds: tuple[Kind, ...], has_norm: bool) -> Any:
    known: dict[str, Any] = {"cuda": cuda, "np": np}
    known |= {f"product{i}": product_of(kind, has_norm) for i, kind in enumerate(kinds)}
    return begins_early(kernel(closed(_source(len(kinds)), "multiply", known)))


# -- the path -----------------------------------------------------------------------------------


def _takes(p: Problem) -> bool:
    lies_well = p.a_is_whole and p.b_in_rows and (p.n == 1 or p.b.row == p.k)
    return p.rounds and lies_well and serves(p.b.dtype, p.m, p.k)


def _bind(p: Problem, o: Operands) -> Call:
    part = Part(o.c, o.b, p.b.dtype, p.n, added=o.c if o.accumulate else None)
    return products([part], o.a, p.m, p.k, o.stream)


FEW_ROWS = Path(name="few rows", takes=_takes, bind=_bind, scratch=lambda p: 0)
