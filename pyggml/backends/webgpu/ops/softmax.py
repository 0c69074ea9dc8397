"""Softmax of rows, a workgroup for each: see pyggml/ops/attention/softmax.py."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, per_element
from pyggml.ops.attention.softmax import soft_max_rows


def _soft_max(site: ShaderSite) -> Sequence[Dispatch]:
    of, sources, axes = soft_max_rows(site.node, site.src, site.constant)
    n = site.node.shape[-1] if site.node.shape else 1
    return [rows_dispatch(of, site, [site.out, *site.saved], sources, n, axes)]


_CAUSAL = """
    let i = group * 256u + me;
    if (i < TOTAL) {
        put_y(i, select(bitcast<f32>(FILL), x_at(i), i % N <= N_PAST + i / N % ROWS));
    }
"""


def _causal(fill: float) -> Callable[[ShaderSite], Sequence[Dispatch]]:
    bits = int(np.float32(fill).view(np.uint32))

    def bind(site: ShaderSite) -> Sequence[Dispatch]:
        *_, rows, n = site.node.shape
        constants = {"TOTAL": prod(site.node.shape), "N": n, "ROWS": rows, "FILL": bits}
        constants["N_PAST"] = int(site.node.params["n_past"])
        views = {"y": site.out, "x": site.src[0]}
        return [site.shaders.dispatch(_CAUSAL, views, per_element(constants["TOTAL"]), constants)]

    return bind


declare("soft_max", ShaderKernel(_soft_max))
declare("diag_mask_inf", ShaderKernel(_causal(-np.inf)))
declare("diag_mask_zero", ShaderKernel(_causal(0.0)))
