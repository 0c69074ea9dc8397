"""Sums of everything, of tiles, and of rows that a norm has scaled."""

from collections.abc import Sequence
from math import prod

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, Shaders, per_element, whole
from pyggml.graph.tensor import MAX_AXES, Tensor
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


# dw = Σ over rows of x · dy · rate: a workgroup makes a row's rate, a thread a number of dw.
_RATES = whole("""
    if (group >= ROWS) { return; }
    var mine = 0.0;
    for (var i = group * N + me; i < (group + 1u) * N; i += 256u) { mine += x_at(i) * x_at(i); }
    let squares = summed(me, mine);
    if (me == 0u) { put_rates(group, inverseSqrt(squares / f32(N) + EPS)); }
""")
_WEIGHTED = """
    let i = group * 256u + me;
    if (i < N) {
        var total = 0.0;
        for (var row = 0u; row < ROWS; row++) {
            total += x_at(row * N + i) * dy_at(row * N + i) * rates_at(row);
        }
        put_y(i, total);
    }
"""


def _n_rows(node: Tensor) -> int:
    return node.src[0].n_elements // node.src[0].shape[-1]


def _rates_scratch(node: Tensor, shaders: Shaders) -> int:
    return 4 * _n_rows(node)


def _rms_norm_mul_back_w(site: ShaderSite) -> Sequence[Dispatch]:
    (x, dy), n, n_rows = site.src, site.node.n_elements, _n_rows(site.node)
    constants, dispatch = {"N": n, "ROWS": n_rows}, site.shaders.dispatch
    of_rates = constants | {"EPS": float(site.node.params["eps"])}
    views = {"y": site.out, "x": x, "dy": dy, "rates": site.scratch}
    return [
        dispatch(_RATES, {"rates": site.scratch, "x": x}, n_rows, of_rates),
        dispatch(_WEIGHTED, views, per_element(n), constants),
    ]


declare("rms_norm_mul_back_w", ShaderKernel(_rms_norm_mul_back_w, scratch=_rates_scratch))
declare("sum", ShaderKernel(_sum))
declare("repeat_back", ShaderKernel(_repeat_back))
