"""Number ranges, and sines and cosines of time steps: see pyggml/ops/image/embedding.py."""

from __future__ import annotations

import math

import numpy as np

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import Kernel, Site
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call


@kernel
def _arange(out, start, step):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = start + step * i


def _bind_arange(site: Site) -> Call:
    p = site.node.params
    limits = np.float64(p["start"]), np.float64(p["step"])
    return per_element(_arange, site.out.size, site.stream, site.out, *limits)


@kernel
def _timestep(out, t, frequencies, dim):
    """out (n, dim): cosines, sines, and 0 at the end of an odd dim; angles in float64."""
    half = dim // 2
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        j, value = i % dim, ZERO
        if j < 2 * half:
            angle = np.float64(t[i // dim]) * frequencies[j % half]
            value = np.float32(math.cos(angle) if j < half else math.sin(angle))
        out[i] = value


def _bind_timestep(site: Site) -> Call:
    dim, max_period = site.node.params["dim"], float(site.node.params["max_period"])
    half = max(dim // 2, 1)
    frequencies = site.constant(max_period ** (-np.arange(half) / half))
    return per_element(_timestep, site.out.size, site.stream, site.out, *site.src, frequencies, dim)


declare("arange", Kernel(_bind_arange))
declare("timestep_embedding", Kernel(_bind_timestep))
