"""The output layer and the loss in one: the logits of some rows at a time, and their gradient.

The (rows × vocabulary) matrix never exists as a whole. A target that is no token makes the loss
NaN.
"""

from collections.abc import Sequence
from dataclasses import replace

from pyggml.backends.kit.products import Factor
from pyggml.backends.webgpu.ops.products import ShaderProblem, multiply, scratch_bytes
from pyggml.backends.webgpu.ops.reduce import sum_of
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import CAPPED
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, Shaders, whole
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor
from pyggml.quants import QUANTS
from pyggml.sizes import round_up

_LINE = 64  # bytes
_TILE_ROWS = 128
_LOGITS_BYTES = 256 << 20  # of all logits that exist at once, if a binding may be so large

_SOFTMAX = CAPPED + whole("""
    if (group >= ROWS) { return; }
    let start = group * N;
    let row = FIRST + group;
    let weight = weights_at(row);
    let target_ = targets_at(row);
    var mine = -3e38;
    for (var j = me; j < N; j += 256u) { mine = max(mine, capped(z_at(start + j))); }
    let top = highest(me, mine);
    var sum = 0.0;
    for (var j = me; j < N; j += 256u) { sum += exp(capped(z_at(start + j)) - top); }
    let total = summed(me, sum);
    let known = target_ >= 0 && u32(target_) < N;
    if (me == 0u) {
        var loss = 0.0;
        var right = 0.0;
        if (weight != 0.0) {
            loss = bitcast<f32>(0x7fc00000u + P[0].x * 0u);
            if (known) {
                let logit = capped(z_at(start + u32(target_)));
                loss = weight * (log(total) + top - logit);
                right = select(0.0, 1.0, logit == top);
            }
        }
        put_losses(row, loss);
        put_right(row, right);
    }
    workgroupBarrier();
    if (GRADIENT) {
        for (var j = me; j < N; j += 256u) {
            let logit = capped(z_at(start + j));
            let p = exp(logit - top) / total;
            let share = capped_back(logit, weight * (p - select(0.0, 1.0, i32(j) == target_)));
            put_z(start + j, select(0.0, share, weight != 0.0));
        }
    }
""")


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
    """Bytes of a chunk's logits, of one number of each row, and what the products need."""
    n_rows, n_vocab = node.src[0].shape[0], node.src[1].shape[0]
    chunk = _chunk(node, shaders.limit)
    logits = round_up(F32.block_bytes * chunk * n_vocab, _LINE)
    some = [p for m in (chunk, n_rows % chunk or chunk) for p in _products(node, m)]
    return (
        logits,
        round_up(F32.block_bytes * n_rows, _LINE),
        max(scratch_bytes(p, shaders) for p in some),
    )


def _scratch(node: Tensor, shaders: Shaders) -> int:
    logits, of_rows, of_products = _sizes(node, shaders)
    return logits + 2 * of_rows + of_products


def _bind(site: ShaderSite) -> Sequence[Dispatch]:
    node = site.node
    n_rows, limit = node.src[0].shape[0], site.shaders.limit
    chunk = _chunk(node, limit)
    logits, of_rows, of_products = _sizes(node, site.shaders)
    start = site.scratch.start
    z, losses, right, rest = (
        replace(site.scratch, start=start + first, n_bytes=n)
        for first, n in (
            (0, logits),
            (logits, F32.block_bytes * n_rows),
            (logits + of_rows, F32.block_bytes * n_rows),
            (logits + 2 * of_rows, of_products),
        )
    )
    if node.shape:
        losses = site.out
    calls = [
        call
        for first in range(0, n_rows, chunk)
        for call in _rows(site, range(first, min(first + chunk, n_rows)), (z, losses, right), rest)
    ]
    if not node.shape:
        calls.append(sum_of(site, site.out, losses))
    return [*calls, sum_of(site, site.saved[0], right)]


def _rows(
    site: ShaderSite,
    rows: range,
    memory: tuple[BufferRange, BufferRange, BufferRange],
    scratch: BufferRange,
) -> list[Dispatch]:
    """The logits of some rows, their losses, and the rows' gradients."""
    h, w, targets, weights = site.src
    z, losses, right = memory
    m, (n_vocab, k) = len(rows), site.node.src[1].shape
    some = z.part(0, m * n_vocab)
    forward, back = _products(site.node, m)
    h = h.part(rows.start * k, m * k)
    calls = multiply(forward, some, h, w, scratch, site.shaders)
    views = {"z": some, "losses": losses, "right": right, "targets": targets, "weights": weights}
    p, gradient = site.node.params, bool(site.node.params["gradient"])
    constants: dict[str, int | float] = {
        "ROWS": m, "N": n_vocab, "FIRST": rows.start, "GRADIENT": gradient,
        "CAP": float(p["softcap"]),
    }  # fmt: skip
    calls.append(site.shaders.dispatch(_SOFTMAX, views, m, constants))
    if gradient:
        dh = site.saved[1].part(rows.start * k, m * k)
        calls += multiply(back, dh, some, w, scratch, site.shaders)
    return calls


def _lacks(node: Tensor) -> str | None:
    w = node.src[1]
    if w.dtype.name not in QUANTS:
        return f"{w.dtype} is unpacked by none of its shaders"
    return None if w.is_contiguous else f"the rows of {w!r} have gaps between them"


for _name in ("linear_cross_entropy", "linear_cross_entropy_by_row"):
    declare(_name, ShaderKernel(_bind, lacks=_lacks, scratch=_scratch, tiled=(1,)))
