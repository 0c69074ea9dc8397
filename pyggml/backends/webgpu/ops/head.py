"""The output layer and the loss in one: the logits of some rows at a time, and their gradient.

The (rows × vocabulary) matrix never exists as a whole.
"""

from collections.abc import Sequence
from dataclasses import replace

from pyggml.backends.kit.products import Factor, gaps_in
from pyggml.backends.webgpu.ops.losses import LossViews, loss_rows, losses_of, row_bytes
from pyggml.backends.webgpu.ops.products import (
    ShaderOperands,
    ShaderProblem,
    multiply,
    scratch_bytes,
)
from pyggml.backends.webgpu.ops.reduce import sum_of
from pyggml.backends.webgpu.runtime.kernel import ShaderSite, unread
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import LINE, BufferRange, Dispatch, Shaders
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

_TILE_ROWS = 128
_LOGITS_BYTES = 384 << 20  # of all logits that exist at once, if a binding may be so large


def _chunk(node: Tensor, limit: int) -> int:
    """Rows whose logits exist at once: chunks of like sizes, whole tiles where they are large."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    most = max(min(n_rows, min(limit, _LOGITS_BYTES) // (F32.block_bytes * n_vocab)), 1)
    if most < _TILE_ROWS:
        return most
    n_chunks = -(-n_rows // (most // _TILE_ROWS * _TILE_ROWS))
    return min(round_up(-(-n_rows // n_chunks), _TILE_ROWS), n_rows)


def _products(node: Tensor, n_rows: int) -> tuple[ShaderProblem, ShaderProblem]:
    """The logits of some rows, and the gradient of those rows."""
    w = node.src[1]
    n_vocab, k = w.shape
    forward = ShaderProblem(n_rows, n_vocab, k, Factor(k, 1), Factor(k, 1, dtype=w.dtype))
    back = ShaderProblem(n_rows, k, n_vocab, Factor(n_vocab, 1), Factor(1, k, dtype=w.dtype))
    return forward, back


def _sizes(node: Tensor, shaders: Shaders) -> tuple[int, int, int]:
    """Bytes of a chunk's logits, of the numbers of all rows, and what the products need."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    chunk = _chunk(node, shaders.limit)
    logits = round_up(F32.block_bytes * chunk * n_vocab, LINE)
    products = [p for m in (chunk, n_rows % chunk or chunk) for p in _products(node, m)]
    return (
        logits,
        row_bytes(n_rows, node.src[2].n_elements // n_rows),
        max(scratch_bytes(p, shaders) for p in products),
    )


def _scratch(node: Tensor, shaders: Shaders) -> int:
    return sum(_sizes(node, shaders))


def _bind(site: ShaderSite) -> Sequence[Dispatch]:
    n_rows = site.node.src[0].shape[0]
    chunk, at, parts = _chunk(site.node, site.shaders.limit), site.scratch.start, []
    for n_bytes in _sizes(site.node, site.shaders):
        parts.append(replace(site.scratch, start=at, n_bytes=n_bytes))
        at += n_bytes
    z, numbers, rest = parts
    rows = loss_rows(site, site.src[2:], numbers)
    spans = (range(first, min(first + chunk, n_rows)) for first in range(0, n_rows, chunk))
    calls = [call for span in spans for call in _rows(site, span, z, rows.part(span), rest)]
    if not site.node.shape:
        calls.append(sum_of(site, site.out, rows.losses))
    return [*calls, sum_of(site, site.saved[0], rows.right)]


def _rows(
    site: ShaderSite, span: range, z: BufferRange, rows: LossViews, scratch: BufferRange
) -> list[Dispatch]:
    """The logits of a span of rows, their losses, and their gradients."""
    h, w = site.src[:2]
    m, (n_vocab, k) = len(span), site.node.src[1].shape
    z, gradient = z.part(0, m * n_vocab), bool(site.node.params["gradient"])
    forward, back = _products(site.node, m)
    of_logits = ShaderOperands(z, h.part(span.start * k, m * k), w, scratch)
    calls = multiply(forward, of_logits, site.shaders)
    calls.append(losses_of(site, z, rows, n_vocab, gradient))
    if gradient:
        dh = site.saved[1].part(span.start * k, m * k)
        calls += multiply(back, ShaderOperands(dh, z, w, scratch), site.shaders)
    return calls


def _lacks(node: Tensor) -> str | None:
    return unread(node.src[1]) or gaps_in(node.src[1])


for _name in (
    "linear_cross_entropy",
    "linear_cross_entropy_by_row",
    "linear_soft_cross_entropy",
):
    declare(_name, _bind, lacks=_lacks, scratch=_scratch, tiled=(1,))
