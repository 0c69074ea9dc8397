"""Cross entropy of rows of logits: the sums of their losses, and their weights in a mean."""

from collections.abc import Sequence
from math import prod

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.ops.reduce import sum_of
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, Shaders
from pyggml.formulas.formula import Formula
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor
from pyggml.ops.loss.loss import LABELLED, LABELLED_BACK, ROWS, SHARE, equal_shares
from pyggml.sizes import round_up

_LINE = 64


def _logits(node: Tensor) -> Tensor:
    return next(s for s in node.src if s.shape)


def _scratch(node: Tensor, shaders: Shaders) -> int:
    """Two numbers of each row of logits."""
    return 2 * round_up(F32.block_bytes * prod(_logits(node).shape[:-1]), _LINE)


def _two_numbers(site: ShaderSite) -> tuple[BufferRange, BufferRange]:
    """Of each row, in scratch."""
    n_rows = prod(_logits(site.node).shape[:-1])
    second = round_up(F32.block_bytes * n_rows, _LINE) // F32.block_bytes
    return site.scratch.part(0, n_rows), site.scratch.part(second, n_rows)


def _rows(site: ShaderSite) -> Sequence[Dispatch]:
    losses, right = rows = _two_numbers(site)
    sums = sum_of(site, site.out, losses), sum_of(site, site.saved[0], right)
    return [rows_dispatch(ROWS, site, rows, site.src, _logits(site.node).shape[-1]), *sums]


def _of_labels(of: Formula, site: ShaderSite, out: BufferRange) -> list[Dispatch]:
    """The dispatches for a formula of the shares that the mask gives rows."""
    n_others, logits, shares = len(of.sources) - 1, _logits(site.node), _two_numbers(site)[0]
    others, mask = site.src[:n_others], site.src[n_others:]
    n_rows = prod(logits.shape[:-1])
    calls = [rows_dispatch(SHARE, site, [shares], mask, n_rows)] if mask else []
    if not mask:
        shares = site.constant(equal_shares(n_rows))
    return [*calls, rows_dispatch(of, site, [out], [*others, shares], logits.shape[-1])]


def _loss(site: ShaderSite) -> Sequence[Dispatch]:
    terms = _two_numbers(site)[1]
    return [*_of_labels(LABELLED, site, terms), sum_of(site, site.out, terms)]


def _loss_back(site: ShaderSite) -> Sequence[Dispatch]:
    return _of_labels(LABELLED_BACK, site, site.out)


declare("cross_entropy_rows", ShaderKernel(_rows, scratch=_scratch))
declare("cross_entropy_loss", ShaderKernel(_loss, scratch=_scratch))
declare("cross_entropy_loss_back", ShaderKernel(_loss_back, scratch=_scratch))
