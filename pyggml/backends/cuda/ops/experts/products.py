"""Products with one weight per expert: row (t, u) with expert ids[t, u]; see ops/experts.

The ids never leave the card: few rows find their experts by themselves (gemm/few_experts.py), many
are put in order there (gemm/grouped.py), once for all products with the same ids. An id that is no
expert is a fault, which ends the run.
"""

from functools import cache
from typing import Any

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.code.warp import LANES, warp_sum
from pyggml.backends.cuda.gemm.few_experts import ExpertProduct, expert_products, takes
from pyggml.backends.cuda.gemm.grouped import order_call, product_call, tile_of
from pyggml.backends.cuda.gemm.grouped_tile import GroupedTile
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import ALIGNMENT, Compute, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, launch, per_element, per_result
from pyggml.backends.cuda.runtime.simulator import HAS_PTX, small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.readers import eights_of, weight_of
from pyggml.backends.cuda.weights.unpack import round_to_bfloat16
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, DTYPES, F32
from pyggml.graph.overwriting import maker
from pyggml.graph.tensor import Tensor
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

_WARPS = small(8)  # of a block
_FEW_ROWS = 64  # of a result, below which no expert has enough of them for a tile


# -- one number, or the warp's numbers, at a time ------------------------------------------------


@cache
def _dotter(name: str) -> Any:
    """dot(w, start, x, of_x, k, lane): a lane's part of the product of a row of w and one of x."""
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes
    if block == 1:
        weight = weight_of(name)

        @device
        def dot(w, start, x, of_x, k, lane):
            total = ZERO
            for j in range(lane, k, LANES):
                total += weight(w, start + j * block_bytes, 0) * x[of_x + j]
            return total

        return dot

    @device
    def add(both, i, a, b, c, d, e, f, g, h):
        total, x = both
        total[0] += (a * x[i] + b * x[i + 1] + c * x[i + 2] + d * x[i + 3]) + (
            e * x[i + 4] + f * x[i + 5] + g * x[i + 6] + h * x[i + 7]
        )

    eights, pieces = eights_of(name, add), GROUP // 8

    @device
    def dot_of_blocks(w, start, x, of_x, k, lane):
        total = cuda.local.array(1, np.float32)
        total[0] = ZERO
        for i in range(lane, k // block * pieces, LANES):
            b = i // pieces
            at = start + b * block_bytes
            eights((total, x), of_x + b * block, w, at, i % pieces * 8)
        return total[0]

    return dot_of_blocks


@cache
def _forward(name: str) -> Any:
    dot = _dotter(name)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @kernel
    def multiply(y, w, x, ids, sizes, rows_of_x, fault, number):
        """y[r, n] = x[r] · w[ids[r], n]: a warp for each number."""
        n_experts, n, k = sizes
        lane, warp = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        row_bytes = k // block * block_bytes
        for i in range(cuda.blockIdx.x * _WARPS + warp, y.size, cuda.gridDim.x * _WARPS):
            row, column = i // n, i % n
            expert, total = ids[row], ZERO
            if 0 <= expert < n_experts:
                start = (np.int64(expert) * n + column) * row_bytes
                total = dot(w, start, x, row // rows_of_x * k, k, lane)
            elif lane == 0:
                cuda.atomic.max(fault, 0, number)
            total = warp_sum(total)
            if lane == 0:
                y[i] = total

    return multiply


@cache
def _backward(name: str) -> Any:
    weight = weight_of(name)
    block, block_bytes = DTYPES[name].block, DTYPES[name].block_bytes

    @kernel
    def multiply(dx, w, dy, ids, sizes, fault, number):
        """dx[r, k] = Σ_n dy[r, n] · w[ids[r], n, k]: a thread for each number."""
        n_experts, n, k = sizes
        row_bytes = k // block * block_bytes
        for i in range(cuda.grid(1), dx.size, cuda.gridsize(1)):
            row, column = i // k, i % k
            expert, total = ids[row], ZERO
            if 0 <= expert < n_experts:
                start = np.int64(expert) * n * row_bytes + column // block * block_bytes
                for j in range(n):
                    total += dy[row * n + j] * weight(w, start + j * row_bytes, column % block)
            else:
                cuda.atomic.max(fault, 0, number)
            dx[i] = total

    return multiply


@kernel
def _sums(dw, x, dy, ids, n, k, rows_of_x, n_experts, fault, number):
    """dw[e, n, k] = Σ dy[r, n] · x[r, k] over the rows r of expert e: a thread for each number."""
    for i in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        expert, rest = i // (n * k), i % (n * k)
        row_of_w, column, total = rest // k, rest % k, ZERO
        for row in range(ids.size):
            if ids[row] == expert:
                total += dy[row * n + row_of_w] * x[row // rows_of_x * k + column]
            elif not 0 <= ids[row] < n_experts:
                cuda.atomic.max(fault, 0, number)
        dw[i] = total


@kernel
def _sums_in_order(dw, x, dy, places, starts, n, k, rows_of_x):
    """The same, where the rows of each expert are known."""
    for i in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        expert, rest = i // (n * k), i % (n * k)
        row_of_w, column, total = rest // k, rest % k, ZERO
        for place in range(starts[expert], starts[expert + 1]):
            row = np.int64(places[place])
            total += dy[row * n + row_of_w] * x[row // rows_of_x * k + column]
        dw[i] = total


@kernel
def _add(y, x, b, ids, n, n_experts, fault, number):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        expert = ids[i // n]
        if 0 <= expert < n_experts:
            y[i] = x[i] + b[expert * n + i % n]
        else:
            y[i] = ZERO
            cuda.atomic.max(fault, 0, number)


def _fault(site: CudaSite, n_experts: int) -> tuple[Any, Any]:
    assert site.node.op is not None
    sentence = f"{site.node.op.name}: an id is not one of {n_experts} experts"
    return site.faults.cell, np.int32(site.faults.number(sentence))


def _rows_of(x: Tensor, ids: Tensor) -> int:
    """How many rows of the result take one row of x."""
    return max(1, ids.n_elements // (x.shape[0] * x.shape[1]))


# -- rows in order of their expert ---------------------------------------------------------------


def _tile_of(node: Tensor, compute: Compute) -> GroupedTile | None:
    """The tile of a product whose factors are rounded, and lie as copies want them; else None."""
    w, _, ids = node.src
    assert node.op is not None
    rounds = compute == "bf16" and w.dtype is not F32 and ptx.TENSOR_CORES
    lies_well = w.offset % 16 == w.shape[1] % 8 == w.shape[2] % 8 == 0
    if not rounds or not lies_well or ids.n_elements <= _FEW_ROWS:
        return None
    return tile_of(w.dtype.name, node.op.name == "mul_mat_id", ids.n_elements, w.shape[0])


def _order_parts(ids: Tensor, n_experts: int) -> tuple[int, int]:
    """Bytes of scratch for the numbers of the rows, and for where those of each expert begin."""
    return round_up(4 * ids.n_elements, ALIGNMENT), round_up(4 * n_experts + 4, ALIGNMENT)


def _order_scratch(node: Tensor, compute: Compute) -> int:
    return sum(_order_parts(node.src[2], node.shape[0])) if HAS_PTX else 0


def in_tiles(node: Tensor, compute: Compute) -> bool:
    """Whether a product's rows make tiles: then it rounds its second source, can read that and
    write its result in BF16, and rows of that can serve all experts of a token, backward too."""
    return _tile_of(node, compute) is not None


def _scratch(node: Tensor, compute: Compute) -> int:
    if _tile_of(node, compute) is None:
        return 0
    w, a, ids = node.src
    halves = 0 if a.dtype is BF16 else BF16.block_bytes * a.n_elements
    return sum(_order_parts(ids, w.shape[0])) + halves


def _shared_order(node: Tensor, compute: Compute) -> tuple[int, str]:
    """The order of the rows, which is made of the ids alone."""
    if _tile_of(node, compute) is None:
        return 0, ""
    n_experts = node.src[0].shape[0]
    return sum(_order_parts(node.src[2], n_experts)), f"rows by {n_experts} experts"


def _order_rows(site: CudaSite, memory: Any, n_experts: int) -> tuple[Any, Any, Call]:
    """Numbers of rows by expert, where each expert's begin, and the call that makes them."""
    ids = site.node.src[2]
    first, _ = _order_parts(ids, n_experts)
    places = memory[: 4 * ids.n_elements].view(np.int32)
    starts = memory[first : first + 4 * n_experts + 4].view(np.int32)
    fault = _fault(site, n_experts)
    order = order_call(places, starts, site.src[2], n_experts, fault, site.stream)
    return places, starts, order


def _bind_grouped(site: CudaSite, tile: GroupedTile) -> Call:
    w, a, ids = site.node.src
    is_alone = site.shared is None
    memory = site.scratch if is_alone else site.shared
    places, starts, order = _order_rows(site, memory, w.shape[0])
    halves, calls = site.src[1], [order] if is_alone or site.fills_shared else []
    if a.dtype is not BF16:
        halves = site.scratch[sum(_order_parts(ids, w.shape[0])) :].view(np.uint16)
        calls.append(round_to_bfloat16(halves, site.src[1], site.stream))
    n_experts, n, k = w.shape
    product = product_call(
        w.dtype.name, tile, (n_experts, n, k), _rows_of(a, ids), site.stream,
        site.out, halves, site.src[0].view(np.uint8), places, starts,
    )  # fmt: skip
    return in_turn(*calls, product)


def are_few(node: Tensor, compute: Compute) -> bool:
    """Whether a product's rows are multiplied as digits with packed weights."""
    w, _, ids = node.src
    rounds = compute == "bf16" and w.offset % 16 == 0 and w.dtype.quantised
    return rounds and ids.n_elements <= _FEW_ROWS and takes(w.dtype, w.shape)


def few_rows(site: CudaSite) -> ExpertProduct:
    """The product of a node of few rows."""
    w, x, ids = site.node.src
    fault, (n_experts, n, k) = _fault(site, w.shape[0]), w.shape
    return ExpertProduct(
        site.out, site.src[1], site.src[2], _rows_of(x, ids), site.src[0], w.dtype,
        (n_experts, n, k), fault, knows_ids=ids in maker(x).src,
    )  # fmt: skip


def _bind_forward(site: CudaSite) -> Call:
    tile = _tile_of(site.node, site.compute)
    if tile is not None:
        return _bind_grouped(site, tile)
    if are_few(site.node, site.compute):
        return expert_products(few_rows(site), site.stream)
    w, x, ids = site.node.src
    grid = small(min(-(-site.node.n_elements // _WARPS), 1 << 20))
    fault, number = _fault(site, w.shape[0])
    return launch(
        _forward(w.dtype.name), grid, _WARPS * LANES, site.stream, site.out,
        site.src[0].view(np.uint8), site.src[1], site.src[2], w.shape,
        _rows_of(x, ids), fault, number,
    )  # fmt: skip


def _bind_backward(site: CudaSite) -> Call:
    tile = _tile_of(site.node, site.compute)
    if tile is not None:
        return _bind_grouped(site, tile)
    w = site.node.src[0]
    fault, number = _fault(site, w.shape[0])
    return per_element(
        _backward(w.dtype.name), site.out.size, site.stream, site.out, site.src[0].view(np.uint8),
        site.src[1], site.src[2], w.shape, fault, number,
    )  # fmt: skip


def _bind_sums(site: CudaSite) -> Call:
    x, _, ids = site.node.src
    n_experts, n, k = site.node.shape
    rows = _rows_of(x, ids)
    if not HAS_PTX:
        fault, number = _fault(site, n_experts)
        return per_result(_sums, site, n, k, rows, n_experts, fault, number)
    places, starts, order = _order_rows(site, site.scratch, n_experts)
    sums = per_element(
        _sums_in_order, site.out.size, site.stream, site.out, *site.src[:2],
        places, starts, n, k, rows,
    )  # fmt: skip
    return in_turn(order, sums)


def _bind_add(site: CudaSite) -> Call:
    n_experts, n = site.node.src[1].shape
    fault, number = _fault(site, n_experts)
    return per_result(_add, site, n, n_experts, fault, number)


declare("mul_mat_id", _bind_forward, scratch=_scratch, shared=_shared_order)
declare("mul_mat_id_back", _bind_backward, scratch=_scratch, shared=_shared_order)
declare("out_prod_id", _bind_sums, scratch=_order_scratch)
declare("add_id", _bind_add)
