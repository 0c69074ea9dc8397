"""The output layer and its loss, a slice of the vocabulary after the other.

With z = h·wᵀ, for each row, over slices as attention goes over tiles of keys:

    m = max_v z_v    norm = Σ_v e^(z_v − m)    o = Σ_v≠target e^(z_v − m) · slope_v · w_v
    L = weight · (m + log norm − z_target)
    dL/dh = weight · (o / norm + (p − 1) · slope_target · w_target)    p = e^(z_target − m) / norm

slope is 1, or that of the cap. m, norm and o are those so far; where m rises, the others are
scaled. So only the logits of a slice exist, in the caches, and each row of w is unpacked once for
many positions. The target's own term is added in float32: rounded beside small ones it would cost
their accuracy.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pyggml.formulas.softcap import SOFTCAP, SOFTCAP_BACK
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.scratch import Array, Scratch
from pyggml.jit.simd import exp32, row_max
from pyggml.kernels import gemm
from pyggml.kernels.attention.softmax import MASKED
from pyggml.kernels.formulas import inlined
from pyggml.kernels.kernel import Compute
from pyggml.ops.layout.rows import gather_rows
from pyggml.quants import UNPACK

ROWS = 2048  # positions of a chunk: each unpacks all of w
# Of the logits that exist at once: they stay in the caches. 512 positions of the 0.6B model took
# 450 ms with 2 MiB, 459 with 4, 474 with 8, 489 with 16; 2,048 took 1,705 with 4, 1,732 with 8 and
# 1,791 with 16 (one thread of a Zen 5). Fewer rows of w than FEWEST are few tasks for many threads.
SLICE_BYTES, FEWEST = 4 << 20, 1024
STEP = 512  # rows of w in whole passes of a backward product (pyggml.kernels.gemm.int8_tile)
_ZERO, _ONE = np.float32(0), np.float32(1)
_softcap, _softcap_back = inlined(SOFTCAP), inlined(SOFTCAP_BACK)

# -- kernels --------------------------------------------------------------------------------------


@kernel
def _exponentials(row, top):
    """row = e^(row − top); their sum."""
    total = _ZERO
    for j in range(row.size):
        row[j] = exp32(row[j] - top)
        total += row[j]
    return total


@kernel
def _capped_exponentials(row, top, cap):
    """row = e^(row − top) times the slope of the cap; the sum without slopes."""
    total = _ZERO
    for j in range(row.size):
        e = exp32(row[j] - top)
        total += e
        row[j] = _softcap_back(row[j], e, cap)
    return total


@kernel
def _cap(row, cap):
    for j in range(row.size):
        row[j] = _softcap(row[j], cap)


def _slice_kernel(capped: bool) -> Callable[..., None]:
    """With or without a cap; only what a process needs is compiled."""
    has_cap = np.bool_(capped)

    @parallel
    def take_slice(z, m, norm, target_logits, dh, targets, first, cap):
        """The logits z of rows `first` … of w become exponentials, 0 for the target; the first
        slice begins m and norm, others find o, in dh, and scale it where m rises."""
        for i in prange(z.shape[0]):
            row = z[i]
            if has_cap:
                _cap(row, cap)
            target, top = targets[i] - first, row_max(row)
            inside = 0 <= target < row.size
            if inside:
                target_logits[i] = row[target]
            if first == 0:
                m[i], norm[i] = MASKED, _ZERO
            if not top <= m[i]:
                factor = exp32(m[i] - top)
                norm[i] *= factor
                m[i] = top
                if first > 0:
                    o = dh[i]
                    for j in range(o.size):
                        o[j] *= factor
            if has_cap:
                norm[i] += _capped_exponentials(row, m[i], cap)
            else:
                norm[i] += _exponentials(row, m[i])
            if inside:
                row[target] = _ZERO

    return take_slice


_TAKE_SLICE = {capped: _slice_kernel(capped) for capped in (False, True)}


def _finish_gradient(
    o: np.ndarray, own_rows: np.ndarray, p: np.ndarray, share: np.ndarray, factor: np.ndarray
) -> None:
    """o, from Σ e^(z − m) · w to the gradient; own_rows: the targets' rows of w, overwritten."""
    o *= share[:, None]
    own_rows *= (factor * (p - _ONE))[:, None]
    o += own_rows


# -- a chunk of positions -------------------------------------------------------------------------


def _slice_rows(n: int, n_vocab: int) -> int:
    """Rows of w in a slice, for chunks of n positions."""
    return min(n_vocab, max(FEWEST, SLICE_BYTES // (4 * n) // STEP * STEP))


def arrays(n: int, k: int, w: Tensor, compute: Compute, gradient: bool) -> dict[str, Array]:
    """Scratch for a chunk of up to n positions of k numbers."""
    n_vocab, kind = w.shape[0], w.dtype
    rows = _slice_rows(n, n_vocab)
    sizes = {rows, n_vocab % rows or rows}
    forward = [gemm.Problem("mul_mat", n, v, k, kind, compute) for v in sizes]
    backward = [gemm.Problem("out_prod", n, k, v, kind, compute) for v in sizes if gradient]
    most = max(gemm.scratch_bytes(p, fewer_rows=True) for p in (*forward, *backward))
    packed = max(gemm.packing(p)[0] for p in forward)
    return {
        "z": Array((n * rows,)), "m": Array((n,)), "norm": Array((n,)),
        "target_logits": Array((n,)), "products": Array((most,), np.uint8),
        "packed": Array((packed,), np.uint8),
    }  # fmt: skip


class Slice(NamedTuple):
    """A slice of the vocabulary, bound for a number of positions."""

    first: int  # row of w
    z: np.ndarray  # (n, rows): its logits
    make: Call
    add: Call | None  # their share of o, with a gradient


def bind_slices(
    w: gemm.Weight, h: np.ndarray, o: np.ndarray | None, n_most: int, own: Scratch
) -> list[Slice]:
    """The slices for h (n, K) and o (n, K); own: `arrays` for n_most positions or more."""
    (n, k), n_vocab, slices = h.shape, len(w.data), []
    rows = _slice_rows(n_most, n_vocab)
    packed: tuple[int, str] | None = None
    for v in range(0, n_vocab, rows):
        part, width = replace(w, data=w.data[v : v + rows]), min(rows, n_vocab - v)
        z = own["z"][: n * width].reshape(n, width)
        form = gemm.packing(gemm.Problem("mul_mat", n, width, k, w.dtype, w.compute))
        fits = 0 < form[0] <= own["packed"].size
        packing = gemm.Packing(own["packed"], form == packed) if fits else None
        make = gemm.mul_mat(z, h, part, own["products"], False, packing)
        add = None if o is None else gemm.out_prod(o, z, part, own["products"], v > 0)
        slices.append(Slice(v, z, make, add))
        packed = form
    return slices


def run(
    slices: list[Slice],
    w: gemm.Weight,
    rows: tuple[np.ndarray, np.ndarray],
    of_targets: tuple[np.ndarray, np.ndarray],
    cap: np.float32,
    own: Scratch,
) -> tuple[np.ndarray, int]:
    """(losses (n,), how many positions have the target on top); with a gradient, o becomes that.

    rows: h, which is overwritten, and o; of_targets: the targets and their weights.
    """
    (h, o), (targets, weights), n = rows, of_targets, len(rows[0])
    m, norm, logits = (own[name][:n] for name in ("m", "norm", "target_logits"))
    gradient, take_slice = slices[0].add is not None, _TAKE_SLICE[bool(cap)]
    sums = o if gradient else np.empty((n, 0), np.float32)
    for part in slices:
        part.make()
        take_slice(part.z, m, norm, logits, sums, targets, part.first,
                   cap if cap else _ONE)  # fmt: skip
        if part.add is not None:
            part.add()
    with np.errstate(all="ignore"):  # logits may not be finite
        losses = weights * (np.log(norm) + m - logits)
        if gradient:
            table, unpack = w.data.view(np.uint8).reshape(len(w.data), -1), UNPACK[w.dtype.name]
            gather_rows(h, table, targets, (), unpack, h.shape[1] // w.dtype.block)
            share = SOFTCAP_BACK(logits, weights, cap=float(cap)) if cap else weights
            _finish_gradient(o, h, np.exp(logits - m) / norm, weights / norm, share)
    return losses, int(np.count_nonzero(logits == m))
