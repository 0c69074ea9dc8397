"""Cross entropy of rows of logits with a target each: the rows' losses, and their gradients.

A workgroup takes a row: the greatest logit and the sum of exponentials, then what is made of them.
"""

from collections.abc import Sequence

from pyggml.backends.webgpu.ops.reduce import sum_of
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, Shaders, whole
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

_LINE = 64
_ROW = """
    if (group >= ROWS) { return; }
    let start = group * N;
    var most = -3e38;
    for (var j = me; j < N; j += 256u) { most = max(most, x_at(start + j)); }
    let top = highest(me, most);
    var sum = 0.0;
    for (var j = me; j < N; j += 256u) { sum += exp(x_at(start + j) - top); }
    let total = summed(me, sum);
    let wanted = targets_at(group);
    let known = wanted >= 0 && u32(wanted) < N;
    let weight = weights_at(group);
    if (me == 0u && !known) { put_fault(0u, i32(NO_TOKEN)); }
"""
_FORWARD = whole(
    _ROW
    + """
    if (me == 0u) {
        var loss = 0.0;
        var right = 0.0;
        if (known) {
            let logit = x_at(start + u32(wanted));
            loss = weight * (log(total) - (logit - top));
            right = select(0.0, 1.0, logit == top && weight != 0.0);
        }
        put_losses(group, loss);
        put_right(group, right);
    }
"""
)
_BACK = whole(
    _ROW
    + """
    let share = weight * d_at(0u);
    for (var j = me; j < N; j += 256u) {
        let p = exp(x_at(start + j) - top) / total;
        put_dx(start + j, share * (p - select(0.0, 1.0, i32(j) == wanted)));
    }
"""
)


def _dispatch(site: ShaderSite, body: str, n: int, views: dict[str, BufferRange]) -> Dispatch:
    """`views` beside the targets' fault."""
    assert site.node.op is not None
    sentence = f"{site.node.op.name}: a target is outside the vocabulary of {n} tokens"
    cell, no_token = site.fault(sentence)
    rows = views["targets"].n_bytes // F32.block_bytes
    constants = {"N": n, "ROWS": rows, "NO_TOKEN": no_token}
    return site.shaders.dispatch(body, {**views, "fault": cell}, rows, constants)


def _scratch(node: Tensor, shaders: Shaders) -> int:
    """Each row's loss, and whether its target is on top."""
    return 2 * round_up(F32.block_bytes * node.src[0].shape[0], _LINE)


def _forward(site: ShaderSite) -> Sequence[Dispatch]:
    rows, n = site.node.src[0].shape
    of_row = round_up(F32.block_bytes * rows, _LINE) // F32.block_bytes
    losses, right = site.scratch.part(0, rows), site.scratch.part(of_row, rows)
    if site.node.shape:
        losses = site.out
    views = dict(zip(("x", "targets", "weights"), site.src, strict=True))
    calls = [_dispatch(site, _FORWARD, n, {**views, "losses": losses, "right": right})]
    if not site.node.shape:
        calls += [sum_of(site, site.out, losses), sum_of(site, site.saved[0], right)]
    return calls


def _backward(site: ShaderSite) -> Sequence[Dispatch]:
    views = dict(zip(("d", "x", "targets", "weights"), site.src, strict=True))
    return [_dispatch(site, _BACK, site.node.shape[-1], {**views, "dx": site.out})]


declare("cross_entropy_rows", ShaderKernel(_forward, scratch=_scratch))
declare("cross_entropy_by_row", ShaderKernel(_forward, scratch=_scratch))
declare("cross_entropy_rows_back", ShaderKernel(_backward))
