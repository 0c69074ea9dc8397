"""Products that four warps make together: wgmma, which cards of compute capability 9.0 alone have.

A factor in shared memory has rows of 64 numbers of bfloat16, 128 bytes each, of which the first
lies at a multiple of 1024; its 16-byte chunks are exchanged by the row's number. A wider one is
several of these, one behind the other. Sums lie over the lanes of each warp as those of 16 rows of
mma.sync do, (n / 8, 4). When a product returns, it is made.
"""

from contextlib import suppress
from typing import Any

from llvmlite import ir
from numba import types

from pyggml.backends.cuda.code.jit import ANY, instruction
from pyggml.backends.cuda.code.ptx import (
    FLOAT,
    LONG,
    WORD,
    assemble,
    plain,
    shared_address,
    two_in,
)
from pyggml.backends.cuda.runtime.driver import CudaSupportError
from pyggml.backends.cuda.runtime.simulator import HAS_PTX

ROW = 128  # bytes
WIDE = 64  # numbers of a row
_EIGHT_ROWS = 8 * ROW
_EXCHANGED = 1 << 62  # the layout, in a descriptor
_BEGIN = "wgmma.fence.sync.aligned;"
_END = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"

# as in ptx.py, for products that read what has come
await_copies = plain("cp.async.wait_group 0; fence.proxy.async.shared::cta;")
await_all_but_one = plain("cp.async.wait_group 1; fence.proxy.async.shared::cta;")


def groups_multiply() -> bool:
    """Whether four warps of the card that kernels are compiled for can multiply together; so they
    can where there is none."""
    if not HAS_PTX:
        return False
    from numba.cuda import dispatcher

    with suppress(CudaSupportError):
        return tuple(dispatcher.get_current_device().compute_capability) == (9, 0)
    return True


def _descriptor(builder: Any, tile: Any, at: Any, n_rows: int) -> Any:
    """Of the factor at a byte of an array: its address, how far its 64 columns and its eight rows
    are from the next, all in 16 bytes."""
    address = builder.lshr(shared_address(builder, tile, at), ir.Constant(WORD, 4))
    form = _EXCHANGED | _EIGHT_ROWS >> 4 << 32 | n_rows * ROW >> 4 << 16
    return builder.or_(builder.zext(address, LONG), ir.Constant(LONG, form))


def _places(builder: Any, array: Any, n: int) -> list[Any]:
    """Pointers to the first n numbers of an array."""
    return [builder.gep(array, [ir.Constant(LONG, i)]) for i in range(n)]


def _multiply(builder: Any, text: list[str], places: list[Any], more: list[Any]) -> None:
    """The numbers at these places, $0 … of the text, are added to; more: its further operands."""
    sums = [builder.load(place) for place in places]
    names = ["=f"] * len(sums) + [str(i) for i in range(len(sums))]
    names += ["l" if one.type == LONG else "r" for one in more] + ["~{memory}"]
    body = " ".join(["{ .reg .b64 a, b;", _BEGIN, *text, _END, "}"])
    results = assemble(builder, body, ",".join(names), [*sums, *more], [FLOAT] * len(sums))
    for number, place in zip(results, places, strict=True):
        builder.store(number, place)


def _operation(n: int, first: int, left: str, adds: bool, flips: str) -> str:
    """d += left·b, d the n / 2 operands from `first` on; flips: which factors lie transposed."""
    sums = ",".join(f"${i}" for i in range(first, first + n // 2))
    kind = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"
    return f"{kind} {{{sums}}}, {left}, b, {int(adds)}, 1, 1, {flips};"


def by_rows(n: int, depth: int, n_products: int) -> Any:
    """multiply(sums, tile, lefts, rights): each of n_products sums = A·Bᵀ, A of 64 rows and B of n,
    both of `depth` numbers, at these bytes of the tile."""
    per_row, of_bytes = WIDE // 16, types.UniTuple(types.int64, n_products)

    @instruction(types.void, ANY, ANY, of_bytes, of_bytes)
    def multiply(builder, sums, tile, lefts, rights):
        places, ends, text = [], [], []
        for own, left, right in zip(sums, lefts, rights, strict=True):
            places += _places(builder, own, n // 2)
            ends += [_descriptor(builder, tile, *one) for one in ((left, 64), (right, n))]
        for k in range(depth // 16):
            for i in range(n_products):
                at = 2 * len(places) + 2 * i
                beyond = [k // per_row * rows * ROW // 16 + k % per_row * 2 for rows in (64, n)]
                text += [f"add.s64 {x}, ${at + j}, {beyond[j]};" for j, x in enumerate("ab")]
                text.append(_operation(n, i * n // 2, "a", k > 0, "0, 0"))
        _multiply(builder, text, places, ends)

    return multiply


def down_rows(n: int, depth: int) -> Any:
    """multiply(sums, p, tile, right): sums += P·B, P (64, depth) as sums of another product are,
    which are rounded; B of `depth` rows of n numbers."""

    @instruction(types.void, ANY, ANY, ANY, types.int64)
    def multiply(builder, sums, p, tile, right):
        places = _places(builder, sums, n // 2)
        numbers = [builder.load(place) for place in _places(builder, p, depth // 2)]
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        words = [two_in(builder, "bf16", *pair) for pair in pairs]
        end, at, text = _descriptor(builder, tile, right, depth), 2 * len(places), []
        for k in range(depth // 16):
            left = ",".join(f"${at + 4 * k + i}" for i in range(4))
            text.append(f"add.s64 b, ${at + len(words)}, {k * 2 * _EIGHT_ROWS // 16};")
            text.append(_operation(n, 0, f"{{{left}}}", True, "1"))
        _multiply(builder, text, places, [*words, end])

    return multiply
