"""The output layer and the loss in one: the logits of some rows at a time, and their gradient.

The (rows × vocabulary) matrix never exists as a whole. The matrix of the layer is unpacked once for
all rows if that does not take too much memory; or once for all steps, by an op of its own, where a
card has room (rewrites/unpacked.py). Rows of weight 0 have gradients of 0; they cost as much as
others here.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pyggml.backends.cuda.gemm import CudaOperands, CudaProblem, Factor, path_of
from pyggml.backends.cuda.ops.loss.row_ends import sum_of
from pyggml.backends.cuda.ops.loss.soft import (
    LossRows,
    gradients_of,
    loss_rows,
    losses_of,
    row_bytes,
)
from pyggml.backends.cuda.runtime.kernel import (
    ALIGNMENT,
    Compute,
    CudaKernel,
    CudaSite,
    OwnOp,
    is_of,
    own_op,
)
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.runtime.table import declare
from pyggml.backends.cuda.weights.unpack import unpack
from pyggml.backends.kit.products import gaps_in
from pyggml.errors import ShapeError
from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.arrays import array
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16, F32, DType
from pyggml.graph.op import OPS, Op, Sample, Spec
from pyggml.graph.tensor import Tensor
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.ops.loss.head import LINEAR_SOFT_CROSS_ENTROPY
from pyggml.ops.loss.soft import ONE_TARGET, soft_rows
from pyggml.sizes import round_up

LOSSES = "linear_cross_entropy", "linear_cross_entropy_by_row", "linear_soft_cross_entropy"
LOGITS_BYTES = 480 << 20  # of all logits that exist at once: 800 rows of 150,000 tokens
WEIGHTS_BYTES = 1 << 30  # of a matrix that is unpacked once for all of them
_ROWS = 256  # of a tile of cuBLAS's


def _chunk_rows(n_rows: int, n_vocab: int) -> int:
    """Rows whose logits exist at once: nearly equal chunks, of whole tiles of cuBLAS's products."""
    most = max(16, LOGITS_BYTES // (F32.block_bytes * n_vocab))
    if n_rows <= most:
        return n_rows
    most -= most % _ROWS if most > _ROWS else 0
    return min(most, round_up(-(-n_rows // -(-n_rows // most)), _ROWS))


def _products(
    node: Tensor, n_rows: int, kind: DType, compute: Compute
) -> tuple[CudaProblem, CudaProblem]:
    """Logits z = h·wᵀ of n_rows rows, and dh = dz·w, with w of this type."""
    n_vocab, k = node.src[1].shape
    by_token, by_column = Factor(k, 1, dtype=kind), Factor(1, k, dtype=kind)
    logits = CudaProblem(n_rows, n_vocab, k, Factor(k, 1), by_token, compute=compute)
    back = CudaProblem(n_rows, k, n_vocab, Factor(n_vocab, 1), by_column, compute=compute)
    return logits, back


def _sizes(node: Tensor) -> tuple[int, int, int]:
    """(rows, rows of a chunk, rows of the last chunk)."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    chunk = _chunk_rows(n_rows, n_vocab)
    return n_rows, chunk, n_rows % chunk or chunk


def unpacked_bytes(node: Tensor, compute: Compute) -> int:
    """Bytes of the matrix as its products unpack it, 0 if they do not."""
    (_, chunk, _), w = _sizes(node), node.src[1]
    logits, _ = _products(node, chunk, w.dtype, compute)
    return BF16.block_bytes * w.n_elements if _rounds(logits) and w.dtype is not BF16 else 0


def _whole_bytes(node: Tensor, compute: Compute) -> int:
    """These bytes if a run unpacks it once for several products, else 0."""
    n_rows, chunk, _ = _sizes(node)
    pays = (n_rows > chunk or node.params["gradient"]) and not is_of(node, *_LASTING)
    n_bytes = unpacked_bytes(node, compute) if pays else 0
    return n_bytes if n_bytes <= WEIGHTS_BYTES else 0


def _kind(node: Tensor, compute: Compute) -> DType:
    """The type of w as the products get it."""
    return BF16 if is_of(node, *_LASTING) or _whole_bytes(node, compute) else node.src[1].dtype


def _parts(node: Tensor, compute: Compute) -> tuple[int, int, int]:
    """Bytes of scratch for the logits of a chunk, for the numbers of all rows, and for w."""
    n_rows, chunk, _ = _sizes(node)
    z = F32.block_bytes * chunk * node.src[1].shape[0]
    numbers = row_bytes(n_rows, node.src[2].n_elements // n_rows)
    whole = _whole_bytes(node, compute)
    return round_up(z, ALIGNMENT), round_up(numbers, ALIGNMENT), round_up(whole, ALIGNMENT)


def _scratch(node: Tensor, compute: Compute) -> int:
    _, *chunks = _sizes(node)
    kind, of_products = _kind(node, compute), 0
    for n_rows in chunks:
        logits, back = _products(node, n_rows, kind, compute)
        of_products = max(of_products, path_of(logits).scratch(logits))
        if not _rounds(
            back
        ):  # else dz is rounded in its own memory, and w takes no more than above
            of_products = max(of_products, path_of(back).scratch(back))
    return sum(_parts(node, compute)) + of_products


def _rounds(p: CudaProblem) -> bool:
    """Whether the product takes its left factor in bfloat16."""
    return p.rounds and path_of(p).shares


def _lacks(node: Tensor) -> str | None:
    return gaps_in(node.src[1])


def _matrix(site: CudaSite, at: int) -> tuple[Any, list[Call]]:
    """w as the products get it, in scratch from byte `at` on if it is unpacked in every run; and
    what unpacks it there."""
    node, packed = site.node, site.src[1]
    n_bytes, kind = BF16.block_bytes * node.src[1].n_elements, (node.src[1].dtype, site.stream)
    for lasting in _lasting(node):
        memory, is_new = site.lasting(*lasting, None)
        w = memory.view(np.uint16)
        if is_new:
            site.once(unpack(w, packed.view(np.uint8), *kind))
        return w, []
    if not _whole_bytes(node, site.compute):
        return packed, []
    w = site.scratch[at : at + n_bytes].view(np.uint16)
    return w, [unpack(w, packed.view(np.uint8), *kind)]


def _bind(site: CudaSite) -> Call:
    n_rows, chunk, _ = _sizes(site.node)
    z_bytes, n_bytes, w_bytes = _parts(site.node, site.compute)
    z = site.scratch[:z_bytes].view(np.float32)
    rows = loss_rows(site, site.src[2:], site.scratch[z_bytes : z_bytes + n_bytes])
    w, calls = _matrix(site, z_bytes + n_bytes)
    rest = site.scratch[z_bytes + n_bytes + w_bytes :]
    for first in range(0, n_rows, chunk):
        span = slice(first, min(first + chunk, n_rows))
        calls += _chunk(site, span, (z, w, rest), rows.part(span))
    if not site.node.shape:
        calls.append(sum_of(site.out, rows.losses, site.stream))
    return in_turn(*calls, sum_of(site.saved[0], rows.right, site.stream))


def _chunk(site: CudaSite, span: slice, memory: tuple[Any, Any, Any], rows: LossRows) -> list[Call]:
    """The logits of a span of rows, their losses, and their gradients."""
    (z, w, rest), stream = memory, site.stream
    n, (n_vocab, k) = span.stop - span.start, site.node.src[1].shape
    logits, back = _products(site.node, n, _kind(site.node, site.compute), site.compute)
    of_h, z = slice(span.start * k, span.stop * k), z[: n * n_vocab]
    of_logits = CudaOperands(z, site.src[0][of_h], w, rest, False, stream)
    calls = [path_of(logits).bind(logits, of_logits), losses_of(site, z, rows)]
    if site.node.params["gradient"]:
        rounds = _rounds(back)
        to_h = CudaOperands(site.saved[1][of_h], z, w, rest, False, stream)
        if rounds:
            dz = z.view(np.uint16)
            to_h = replace(to_h, rounded=dz, is_rounded=True, rounded_step=2 * n_vocab)
        calls += [gradients_of(site, z, rows, rounds), path_of(back).bind(back, to_h)]
    return calls


for _name in LOSSES:
    declare(_name, _bind, lacks=_lacks, scratch=_scratch)


# -- with a matrix that stays unpacked ------------------------------------------------------------


def _lasting(node: Tensor) -> Iterator[tuple[int, int]]:
    if is_of(node, *_LASTING):
        yield 1, BF16.block_bytes * node.src[1].n_elements


def _count_and_gradient(
    h: np.ndarray, w: np.ndarray, targets: np.ndarray, *rest: np.ndarray,
    gradient: bool, softcap: float, beta: float = 0.0,
) -> Iterator[np.ndarray]:  # fmt: skip
    """What a loss saves: how many rows with weight have their first target on top, and dh."""
    (*shares, weights), n, z = rest, len(h), h @ w.T
    z = SOFTCAP(z, cap=softcap) if softcap else z
    targets = targets.astype(np.int64).reshape(n, -1)
    is_top = z[np.arange(n), targets[:, 0]] == z.max(-1)
    yield np.sum(is_top & (weights != 0)).astype(np.float64)
    if gradient:
        share = shares[0] if shares else np.tile(ONE_TARGET.astype(np.float64), (n, 1))
        _, dz = soft_rows(z, targets, share, weights, beta=beta)
        yield (SOFTCAP_BACK(z, dz, cap=softcap) if softcap else dz) @ w


def _samples_of(op: Op) -> Callable[[np.random.Generator], Iterator[Sample]]:
    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for kind, n_rows, n_vocab, k, cap in (
            ("Q8_0", 30, 48, 64, 0.0),
            ("Q4_K", 19, 40, 256, 1.5),
        ):
            # Of larger logits two that are near each other change places when they are rounded.
            h, w = rng.standard_normal((n_rows, k)) / 4, packed_leaf(rng, (n_vocab, k), kind)
            array(w).flags.writeable = False  # a constant: it is unpacked when the graph is bound
            targets = rng.permuted(np.tile(np.arange(n_vocab, dtype=np.int32), (n_rows, 1)), axis=1)
            weights = rng.uniform(0.1, 1, n_rows) * (rng.random(n_rows) < 0.7)
            how: dict[str, Any] = {"gradient": True, "softcap": cap}
            if op is LINEAR_SOFT_CROSS_ENTROPY:
                shares = rng.dirichlet(np.ones(6), n_rows)
                yield Sample((h, w, targets[:, :5], shares, weights), {**how, "beta": cap / 3})
            else:
                yield Sample((h, w, targets[:, 0], weights), how)

    return samples


def _with_lasting(op: Op) -> OwnOp:
    def spec(h: Tensor, w: Tensor, *sources: Tensor, **params: Any) -> Spec:
        if w.dtype in (F32, BF16):
            raise ShapeError(f"{op.name}_unpacked: w is {w!r}, of which nothing is unpacked")
        return op.spec(h, w, *sources, **params)

    def results(*arrays: np.ndarray, **params: Any) -> Iterator[np.ndarray]:
        yield op.ref(*arrays, **params)
        yield from _count_and_gradient(*arrays, **params)

    kernel = CudaKernel(_bind, lacks=_lacks, scratch=_scratch, lasting=_lasting)
    return own_op(
        name=f"{op.name}_unpacked", spec=spec, saved=op.saved, results=results,
        samples=_samples_of(op), refuses=op.refuses, kernel=kernel,
    )  # fmt: skip


_LASTING = {op.name: op for op in map(_with_lasting, (OPS[name] for name in LOSSES))}


def with_lasting_matrix(node: Tensor) -> Tensor:
    """The node of a loss whose matrix stays unpacked, for that of one that unpacks it."""
    assert node.op is not None
    return _LASTING[f"{node.op.name}_unpacked"](*node.src, **node.params)
