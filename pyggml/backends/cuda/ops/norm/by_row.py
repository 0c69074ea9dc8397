"""Ops whose formulas have reductions, norms, their gradients and softmax: a block or a warp for
each row. And causal masks."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.fours import vectorizable
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.code.rows import Row, row_kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import (
    per_element,
    per_rows,
    rows_at_once,
    threads_of_row,
)
from pyggml.backends.cuda.runtime.simulator import small
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula
from pyggml.graph.call import Call
from pyggml.graph.dtypes import BF16
from pyggml.graph.tensor import Shape, Tensor
from pyggml.ops import OPS
from pyggml.ops.attention.softmax import soft_max_rows

# Blocks of a kernel that adds up rows: four for each multiprocessor of a large card, which has room
# for them at once, and leaves few sums to add.
_BLOCKS_OF_SUMS = small(528)
_MOST_FOURS = 8  # of a thread: 32 numbers of each source in registers
_ELSEWHERE = ("cross_entropy_rows_back",)  # rows of a vocabulary: losses.py
Loads = tuple[tuple[str, tuple[str, str]], ...]  # see Row


def holds_rows(node: Tensor) -> bool:
    """Whether the kernel of a norm or its gradient holds rows of this length, and so takes BF16."""
    return bool(_fours(node.shape[-1]))


def _fours(n: int) -> int:
    """How many fours of a row of n a thread holds; 0 if it cannot."""
    needed = -(-n // (4 * threads_of_row(n)))
    return 1 << (needed - 1).bit_length() if n % 4 == 0 and needed <= _MOST_FOURS else 0


def target_fault(site: CudaSite, n_vocab: int) -> tuple[Any, Any]:
    """The cell and the number of the fault that a target is no token."""
    assert site.node.op is not None
    sentence = f"{site.node.op.name}: a target is outside the vocabulary of {n_vocab} tokens"
    return site.faults.cell, np.int32(site.faults.number(sentence))


def rows_call(
    of: Formula,
    site: CudaSite,
    n: int,
    results: Sequence[Any],
    sources: Sequence[Any],
    loads: Loads = (),
    axes: Sequence[Shape] = (),
    n_totals: int = 0,
) -> Call:
    """The call of a formula's kernel for rows of n numbers.

    sources: arrays of the formula's sources; where loads names two arrays for one, both. axes: of
    rows, three of each source, if some are tiled. n_totals: of the results the last ones, which are
    sums over rows: arrays of `rows_of_sums`
    """
    names = [f"y{i}" for i in range(len(results))]
    names += [a for s in of.sources for a in dict(loads).get(s, (s,))]
    arrays = dict(zip(names, (*results, *sources), strict=True))
    single = {*of.single, *(y for i, y in enumerate(names[: len(results)]) if not of.differs(i))}
    rows = [a for name, a in arrays.items() if name not in single]
    fours = _fours(n) if vectorizable(*rows) else 0
    in_bf16 = {name for name, a in arrays.items() if a.dtype == BF16.numpy}
    assert fours or not (in_bf16 or loads)
    totals = tuple(names[len(results) - n_totals : len(results)])
    run = row_kernel(Row(of, fours, frozenset(in_bf16), loads, totals))
    settings = [np.float32(site.node.params[name]) for name in of.settings]
    of_source = {s: tuple(np.int64(a) for a in x) for s, x in zip(of.sources, axes, strict=False)}
    tiles = [of_source[s] for s in (of.along[0], *of.tiled)] if of.tiled else []
    fault = target_fault(site, n) if of.picks else ()
    first = dict(loads).get(of.along[0], (of.along[0],))[0]
    n_rows = arrays[first].size // n
    arguments = *arrays.values(), *settings, n, *fault, *tiles
    most = {"most": _BLOCKS_OF_SUMS} if totals else {}
    return per_rows(run, n_rows, n, site.stream, *arguments, **most)


def rows_of_sums(n_rows: int, n: int) -> int:
    """Sums that a kernel makes of each number of its rows of n."""
    return rows_at_once(n_rows, n, _BLOCKS_OF_SUMS)


def _by_row(of: Formula, site: CudaSite) -> Call:
    x = site.node.src[of.sources.index(of.along[0])]
    n = x.shape[-1] if x.shape else 1
    return rows_call(of, site, n, [site.out], site.src)


def _by_group(of: Formula, site: CudaSite) -> Call:
    """Rows that are runs of channels."""
    t = site.node
    n_rows = (t.shape[0] if len(t.shape) == 4 else 1) * t.params["n_groups"]
    return rows_call(of, site, t.n_elements // n_rows, [site.out], site.src)


def _uneven_groups(node: Tensor) -> str | None:
    return "groups of unequal sizes" if node.shape[-3] % node.params["n_groups"] else None


for _op in OPS.values():
    if _op.formula is not None and _op.formula.of_rows and _op.name not in _ELSEWHERE:
        declare(_op.name, partial(_by_row, _op.formula))
        if _op.name in ("norm", "norm_back"):
            declare(f"group_{_op.name}", partial(_by_group, _op.formula), _uneven_groups)

# -- softmax of rows with mask, ALiBi and sinks; causal masks --------------------------------------


def _soft_max(site: CudaSite) -> Call:
    of, arrays, axes = soft_max_rows(site.node, site.src, site.constant)
    n = site.node.shape[-1] if site.node.shape else 1
    return rows_call(of, site, n, [site.out, *site.saved], arrays, axes=axes)


@kernel
def _diag_mask(out, x, n_rows, n, n_past, fill):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = x[i] if i % n <= n_past + i // n % n_rows else fill


def _causal(fill: float, site: CudaSite) -> Call:
    *_, n_rows, n = site.node.shape
    arguments = (n_rows, n, site.node.params["n_past"], np.float32(fill))
    return per_element(_diag_mask, site.out.size, site.stream, site.out, *site.src, *arguments)


declare("soft_max", _soft_max)
declare("diag_mask_inf", partial(_causal, -math.inf))
declare("diag_mask_zero", partial(_causal, 0.0))
