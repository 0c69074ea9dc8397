"""Softmax of rows, a workgroup for each: see pyggml/ops/attention/softmax.py."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch
from pyggml.ops.attention.softmax import soft_max_rows


def _soft_max(site: ShaderSite) -> Sequence[Dispatch]:
    of, sources, axes = soft_max_rows(site.node, site.src, site.constant)
    n = site.node.shape[-1] if site.node.shape else 1
    return [rows_dispatch(of, site, [site.out, *site.saved], sources, n, axes)]


_CAUSAL = "put_y(i, select(bitcast<f32>(FILL), x_at(i), i % N <= N_PAST + i / N % ROWS));"


def _causal(fill: float, site: ShaderSite) -> Sequence[Dispatch]:
    *_, rows, n = site.node.shape
    constants = {"N": n, "ROWS": rows, "FILL": int(np.float32(fill).view(np.uint32))}
    return site.each(_CAUSAL, "x", {**constants, "N_PAST": int(site.node.params["n_past"])})


declare("soft_max", _soft_max)
declare("diag_mask_inf", partial(_causal, -np.inf))
declare("diag_mask_zero", partial(_causal, 0.0))
