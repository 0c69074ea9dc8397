"""Cross entropy of rows of logits: the sums of the rows' losses, and the weights of rows in a mean.

Sums over rows are in float64, by one block, so that they do not depend on the grid.
"""

from typing import Any

import numpy as np

from pyggml.backends.cuda.ops.by_row import rows_call
from pyggml.backends.cuda.ops.reduce import row_sums
from pyggml.backends.cuda.runtime.kernel import CudaKernel, CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.graph.call import Call
from pyggml.ops.loss.loss import LABELLED, LABELLED_BACK, ROWS, SHARE, equal_shares, two_rows


def sum_of(out: Any, terms: Any, stream: Any) -> Call:
    """A call for out = Σ terms, float32."""
    return row_sums(out, terms, terms.size, stream)


def _halves(scratch: Any) -> tuple[Any, Any]:
    numbers = scratch.view(np.float32)
    half = numbers.size // 2
    return numbers[:half], numbers[half:]


def _rows(site: CudaSite) -> Call:
    losses, right = rows = _halves(site.scratch)
    sums = sum_of(site.out, losses, site.stream), sum_of(site.saved[0], right, site.stream)
    return in_turn(rows_call(ROWS, site, site.node.src[0].shape[1], rows, site.src), *sums)


def _of_labels(of: Formula, site: CudaSite, out: Any) -> list[Call]:
    """The calls for a formula of the shares that the mask gives rows."""
    n_others, shares = len(of.sources) - 1, _halves(site.scratch)[0]
    others, mask = site.src[:n_others], site.src[n_others:]
    calls = [rows_call(SHARE, site, shares.size, [shares], mask)] if mask else []
    if not mask:
        shares = site.constant(equal_shares(shares.size))
    n = site.node.src[n_others - 1].shape[-1]
    return [*calls, rows_call(of, site, n, [out], [*others, shares])]


def _loss(site: CudaSite) -> Call:
    terms = _halves(site.scratch)[1]
    return in_turn(*_of_labels(LABELLED, site, terms), sum_of(site.out, terms, site.stream))


def _loss_back(site: CudaSite) -> Call:
    return in_turn(*_of_labels(LABELLED_BACK, site, site.out))


declare("cross_entropy_rows", CudaKernel(_rows, scratch=two_rows))
declare("cross_entropy_loss", CudaKernel(_loss, scratch=two_rows))
declare("cross_entropy_loss_back", CudaKernel(_loss_back, scratch=two_rows))
