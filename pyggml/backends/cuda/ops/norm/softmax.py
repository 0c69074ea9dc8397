"""Softmax of rows with mask, ALiBi and sinks, and causal masks."""

import math
from functools import partial

import numpy as np

from pyggml.backends.cuda.code.jit import kernel
from pyggml.backends.cuda.ops.norm.by_row import rows_call
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.ops.attention.softmax import soft_max_rows


def _bind(site: CudaSite) -> Call:
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


declare("soft_max", _bind)
declare("diag_mask_inf", partial(_causal, -math.inf))
declare("diag_mask_zero", partial(_causal, 0.0))
