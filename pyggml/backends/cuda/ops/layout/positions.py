"""What is made of positions: the table of cosines and sines, pairs turned by it, the spans of
windows, temperatures."""

import math
from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ONE
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.ops.layout.copies import conversion
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element, per_result
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, DType
from pyggml.ops.attention.positions import rotations


@kernel
def _table(table, positions, axes, radians, factors, m):
    """table (n_tokens, 2, n_pairs): the angles are float64, as on the host."""
    n_pairs = radians.size
    n_tokens = table.size // (2 * n_pairs)
    for i in range(cuda.grid(1), n_tokens * n_pairs, cuda.gridsize(1)):
        token, pair = i // n_pairs, i % n_pairs
        angle = positions[axes[pair] * n_tokens + token] * radians[pair] / factors[pair]
        table[2 * token * n_pairs + pair] = m * math.cos(angle)
        table[(2 * token + 1) * n_pairs + pair] = m * math.sin(angle)


def _bind_table(site: CudaSite) -> Call:
    p = site.node.params
    axes, radians, m = rotations(**p)
    ones = np.ones(radians.shape, np.float32)
    factors = site.src[1] if len(site.src) > 1 else site.constant(ones)
    return per_element(
        _table, site.out.size // 2, site.stream, site.out, site.src[0],
        site.constant(axes.astype(np.int32)), site.constant(radians), factors, np.float64(m),
    )  # fmt: skip


@cache
def _turning(of: DType, to: DType) -> Any:
    read, write = conversion(of, F32), conversion(F32, to)

    @kernel
    def turn(y, x, table, d, n_heads, neox, offset, sign, n_tokens):
        """y, x (…, n_tokens, n_heads, d). A thread has one pair, or one feature that is only
        copied; y may be x."""
        n_pairs = table.size // (2 * n_tokens)
        n_jobs = d - n_pairs  # of a head: pairs, then features that are copied
        for i in range(cuda.grid(1), y.size // d * n_jobs, cuda.gridsize(1)):
            head, job = i // n_jobs, i % n_jobs
            at = head * d
            if job < n_pairs:
                turns = 2 * (head // n_heads % n_tokens) * n_pairs + job
                cos, sin = table[turns], table[turns + n_pairs] * sign
                first = at + offset + (job if neox else 2 * job)
                second = first + (n_pairs if neox else 1)
                p, q = read(x[first]), read(x[second])
                y[first] = write(p * cos - q * sin)
                y[second] = write(p * sin + q * cos)
            else:
                j = job - n_pairs
                j = at + (j if j < offset else j + 2 * n_pairs)
                y[j] = write(read(x[j]))

    return turn


def _bind_turn(sign: float, site: CudaSite) -> Call:
    x, table = site.node.src
    d, n_heads, p = x.shape[-1], x.shape[-2], site.node.params
    n_jobs = x.n_elements // d * (d - table.shape[2])
    return per_element(
        _turning(x.dtype, site.node.dtype), n_jobs, site.stream, site.out, *site.src, d, n_heads,
        bool(p["neox"]), p["offset"], np.float32(sign), table.shape[0],
    )  # fmt: skip


# -- spans of windows, temperatures --------------------------------------------------------------


@kernel
def _window_span(out, span, window):
    for t in range(cuda.grid(1), out.size // 2, cuda.gridsize(1)):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - window)
        out[2 * t + 1] = span[2 * t + 1]


@kernel
def _chunk_span(out, span, positions, size):
    for t in range(cuda.grid(1), out.size // 2, cuda.gridsize(1)):
        out[2 * t] = max(span[2 * t], span[2 * t + 1] - 1 - positions[t] % size)
        out[2 * t + 1] = span[2 * t + 1]


def _bind_span(run: Any, setting: str, site: CudaSite) -> Call:
    size = np.int32(min(site.node.params[setting], 2**31 - 1))
    return per_element(run, site.out.size // 2, site.stream, site.out, *site.src, size)


@kernel
def _log_temperature(out, positions, strength, every, first):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = ONE + strength * math.log(ONE + np.float32((positions[i] + first) // every))


declare("rope_table", _bind_table)
declare("rope_apply", partial(_bind_turn, 1))
declare("rope_apply_back", partial(_bind_turn, -1))
declare("window_span", partial(_bind_span, _window_span, "window"))
declare("chunk_span", partial(_bind_span, _chunk_span, "size"))
declare("log_temperature", lambda site: per_result(_log_temperature, site, *site.scalars))
