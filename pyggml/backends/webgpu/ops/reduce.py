"""Sums of everything, and of tiles."""

from collections.abc import Sequence
from math import prod

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, per_element
from pyggml.graph.tensor import MAX_AXES
from pyggml.ops.arithmetic.reduce import SUM_ROWS

assert SUM_ROWS.formula is not None
_TOTAL = SUM_ROWS.formula


def sum_of(site: ShaderSite, total: BufferRange, terms: BufferRange) -> Dispatch:
    """total = Σ terms."""
    return rows_dispatch(_TOTAL, site, [total], [terms], terms.n_bytes // terms.size)


def _sum(site: ShaderSite) -> Sequence[Dispatch]:
    return [sum_of(site, site.out, site.src[0])]


# A thread has a number of the result, and adds the tiles in their order.
_START = " + ".join(f"i / BELOW{a} % SMALL{a} * STEP{a}" for a in range(MAX_AXES))
_NEXT = " + ".join(f"t / AFTER{a} % TIMES{a} * SMALL{a} * STEP{a}" for a in range(MAX_AXES))
_TILES = f"""
    let i = group * 256u + me;
    if (i < N) {{
        let start = {_START};
        var total = 0.0;
        for (var t = 0u; t < TILES; t++) {{ total += x_at(start + {_NEXT}); }}
        put_y(i, total);
    }}
"""


def _repeat_back(site: ShaderSite) -> Sequence[Dispatch]:
    n = site.node.n_elements
    shapes = (site.node.src[0].shape, site.node.shape)
    large, small = ((1,) * (MAX_AXES - len(s)) + s for s in shapes)
    times = [most // max(few, 1) for most, few in zip(large, small, strict=True)]
    constants = {"N": n, "TILES": prod(times)}
    for a in range(MAX_AXES):
        constants |= {f"SMALL{a}": small[a], f"BELOW{a}": prod(small[a + 1 :])}
        constants |= {f"TIMES{a}": times[a], f"AFTER{a}": prod(times[a + 1 :])}
        constants[f"STEP{a}"] = prod(large[a + 1 :])
    views = {"y": site.out, "x": site.src[0]}
    return [site.shaders.dispatch(_TILES, views, per_element(n), constants)]


declare("sum", ShaderKernel(_sum))
declare("repeat_back", ShaderKernel(_repeat_back))
