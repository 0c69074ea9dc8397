"""Sums: of rows, of everything, of tiles."""

from collections.abc import Callable, Sequence
from math import prod

from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, per_element, whole
from pyggml.graph.tensor import MAX_AXES

_ROWS = whole("""
    if (group >= ROWS) { return; }
    var mine = 0.0;
    for (var j = me; j < N; j += 256u) { mine += x_at(group * N + j); }
    let total = summed(me, mine);
    if (me == 0u) { put_y(group, total / DIVISOR); }
""")


def _by_row(is_mean: bool) -> Callable[[ShaderSite], Sequence[Dispatch]]:
    def bind(site: ShaderSite) -> Sequence[Dispatch]:
        x, rows = site.node.src[0], site.node.n_elements
        n = x.n_elements // max(rows, 1)
        constants = {"N": n, "ROWS": rows, "DIVISOR": float(n) if is_mean else 1.0}
        return [site.shaders.dispatch(_ROWS, {"y": site.out, "x": site.src[0]}, rows, constants)]

    return bind


def sum_of(site: ShaderSite, total: BufferRange, terms: BufferRange) -> Dispatch:
    """total = Σ terms."""
    n = terms.n_bytes // terms.size
    constants = {"N": n, "ROWS": 1, "DIVISOR": 1.0}
    return site.shaders.dispatch(_ROWS, {"y": total, "x": terms}, 1, constants)


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


declare("sum", ShaderKernel(_by_row(is_mean=False)))
declare("sum_rows", ShaderKernel(_by_row(is_mean=False)))
declare("mean", ShaderKernel(_by_row(is_mean=True)))
declare("repeat_back", ShaderKernel(_repeat_back))
