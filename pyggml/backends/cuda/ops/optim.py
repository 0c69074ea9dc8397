"""One step of an optimiser, in place, and the limit of the gradient's norm."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.blocks import block_max, block_sum, first_row, rows_apart
from pyggml.backends.cuda.code.formulas import NAMES, ONE, ZERO, device_formula
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import THREADS, in_turn, per_element, per_row, per_rows
from pyggml.backends.cuda.runtime.table import declare
from pyggml.formulas.formula import Formula, formula
from pyggml.formulas.text import define
from pyggml.graph.call import Call
from pyggml.ops import formulas
from pyggml.ops.optim import STEPS
from pyggml.ops.optim_8bit import BLOCK, HALF, M_CODES, M_VALUES, TINY, V_CODES, V_VALUES, n_blocks

_PIECE = 1 << 14  # numbers whose squares one block adds up


@kernel
def _squares(sums, g):
    """sums: of each piece of g, Σ g² in float64."""
    parts = cuda.shared.array(THREADS, np.float64)
    for piece in range(first_row(), sums.size, rows_apart()):
        last, total = min((piece + 1) * _PIECE, g.size), np.float64(0)
        for i in range(piece * _PIECE + cuda.threadIdx.x, last, cuda.blockDim.x):
            total += np.float64(g[i]) * np.float64(g[i])
        total = block_sum(total, parts)
        if cuda.threadIdx.x == 0:
            sums[piece] = total


@kernel
def _norm(out, sums):
    parts = cuda.shared.array(THREADS, np.float64)
    total = np.float64(0)
    for i in range(cuda.threadIdx.x, sums.size, cuda.blockDim.x):
        total += sums[i]
    total = block_sum(total, parts)
    if cuda.threadIdx.x == 0:
        out[0] = math.sqrt(total)


@kernel
def _shorten(g, norm, limit):
    if norm[0] > limit and norm[0] < math.inf:
        factor = np.float32(np.float64(limit) / np.float64(norm[0]))
        for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
            g[i] *= factor


def _clip_norm(site: CudaSite) -> Call:
    (g,), (limit,) = site.src, site.scalars
    sums = site.scratch.view(np.float64)
    calls = [
        per_rows(_squares, sums.size, _PIECE, site.stream, sums, g),
        per_row(_norm, 1, sums.size, site.stream, site.out, sums),
    ]
    if limit:
        calls.append(per_element(_shorten, g.size, site.stream, g, site.out, limit))
    return in_turn(*calls)


@cache
def number_step(of: Formula) -> Any:
    """step(x, i, sources): what a step makes of number i of a parameter, x; moments change."""
    moments = of.sources[2:]
    numbers = [f"{s}[i]" for s in of.sources[1:]] + [f"s[{i}]" for i in range(len(of.settings))]
    news = [f"new_{m}" for m in moments]
    stores = [f"        {m}[i] = {new}\n" for m, new in zip(moments, news, strict=True)]
    text = (
        "def closing_over(formula):\n"
        "    def step(x, i, sources):\n"
        f"        {', '.join(of.sources[1:])}, s = sources\n"
        f"        {', '.join(('new', *news))} = formula(x, {', '.join(numbers)})\n"
        f"{''.join(stores)}"
        "        return new\n"
        "    return step\n"
    )
    return device(define(text, "closing_over", NAMES)(device_formula(of)))


def _steps_by(number: Callable) -> Any:
    @kernel
    def run(out, p, sources):
        """out and p are the same memory."""
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            out[i] = number(p[i], i, sources)

    return run


_new_moments, _move_parameter = (
    device_formula(formula(f)) for f in (formulas.moments, formulas.move_parameter)
)


@device
def _moments(j, g, m, v, of_m, of_v, m_values, v_values, s):
    """Both moments of number j, of a block of these magnitudes."""
    first, second = m_values[np.uint8(m[j])] * of_m, v_values[np.uint8(v[j])] * of_v
    return _new_moments(g[j], first, second, s[1], s[2])


@device
def _place(x):
    """Of a share of a magnitude: see ops/optim_8bit.py."""
    at = (x + ONE) * HALF + np.float32(0.5)
    return np.int32(at) if at > ZERO else np.int32(0)


@device
def _as_it_is(x, *_dice):
    return x


def steps_by_8_bits(widen: Callable, narrow: Callable) -> Any:
    """The kernel of AdamW's step with moments of 8 bits, on numbers x = widen(p[j]), of which
    narrow(x, j, draw, stream) is what p holds."""

    @kernel
    def run(out, p, g, m, v, scales, s, tables, draw, stream):
        """A block of threads takes one of numbers; out and p are the same memory."""
        parts = cuda.shared.array(THREADS, np.float32)
        m_values, v_values, m_codes, v_codes = tables
        n_blocks = scales.size // 2
        for b in range(cuda.blockIdx.x, n_blocks, cuda.gridDim.x):
            first, last = b * BLOCK + cuda.threadIdx.x, min((b + 1) * BLOCK, out.size)
            of_m, of_v, m_most, v_most = scales[b], scales[n_blocks + b], ZERO, ZERO
            for j in range(first, last, cuda.blockDim.x):
                x, y = _moments(j, g, m, v, of_m, of_v, m_values, v_values, s)
                m_most, v_most = max(m_most, abs(x)), max(v_most, y)
            m_most, v_most = block_max(m_most, parts), block_max(v_most, parts)
            m_whole, v_whole = max(m_most, TINY), max(v_most, TINY)
            for j in range(first, last, cuda.blockDim.x):
                x, y = _moments(j, g, m, v, of_m, of_v, m_values, v_values, s)
                new = _move_parameter(widen(p[j]), x, y, s[0], s[3], s[4], s[5], s[6])
                out[j] = narrow(new, j, draw, stream)
                m[j], v[j] = m_codes[_place(x / m_whole)], v_codes[_place(y / v_whole)]
            if cuda.threadIdx.x == 0:
                scales[b], scales[n_blocks + b] = m_most, v_most

    return run


def bind_8_bits(run: Any, site: CudaSite, sources: Sequence[Any], *dice: Any) -> Call:
    """sources: of the op on float32; dice: draw and stream."""
    tables = tuple(map(site.constant, (M_VALUES, V_VALUES, M_CODES, V_CODES)))
    n = n_blocks(site.node.n_elements)
    return per_row(run, n, BLOCK, site.stream, site.out, *sources, tables, *dice)


_BY_8_BITS = steps_by_8_bits(_as_it_is, _as_it_is)


def _bind_8bit(site: CudaSite) -> Call:
    no_draw = site.src[-1], np.uint64(0)  # nobody reads them
    return bind_8_bits(_BY_8_BITS, site, site.src, *no_draw)


def _step(run: Any, site: CudaSite) -> Call:
    p, *sources = site.src
    return per_element(run, site.out.size, site.stream, site.out, p, tuple(sources))


declare("opt_step_adamw_8bit", _bind_8bit)
declare("clip_norm", _clip_norm, scratch=lambda node, _: 8 * -(-node.src[0].n_elements // _PIECE))
for _name, _of in STEPS.items():
    declare(_name, partial(_step, _steps_by(number_step(_of))))
