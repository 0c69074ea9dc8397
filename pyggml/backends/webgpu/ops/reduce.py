"""Sums of everything, of tiles, and of rows that a norm has scaled."""

from collections.abc import Sequence
from math import prod

from pyggml.backends.webgpu.ops.by_row import rows_dispatch
from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, whole
from pyggml.graph.tensor import MAX_AXES, Tensor
from pyggml.ops.arithmetic.reduce import SUM_ROWS

assert SUM_ROWS.formula is not None
_TOTAL = SUM_ROWS.formula


def sum_of(site: ShaderSite, total: BufferRange, terms: BufferRange) -> Dispatch:
    """total = Σ terms."""
    return rows_dispatch(_TOTAL, site, [total], [terms], terms.n_bytes // terms.size)


# A thread has a number of the result, and adds the tiles in their order.
_START = " + ".join(f"i / BELOW{a} % SMALL{a} * STEP{a}" for a in range(MAX_AXES))
_NEXT = " + ".join(f"t / AFTER{a} % TIMES{a} * SMALL{a} * STEP{a}" for a in range(MAX_AXES))
_TILES = f"""
    let start = {_START};
    var total = 0.0;
    for (var t = 0u; t < TILES; t++) {{ total += x_at(start + {_NEXT}); }}
    put_y(i, total);
"""


def _repeat_back(site: ShaderSite) -> Sequence[Dispatch]:
    shapes = (site.node.src[0].shape, site.node.shape)
    large, small = ((1,) * (MAX_AXES - len(s)) + s for s in shapes)
    times = [most // max(few, 1) for most, few in zip(large, small, strict=True)]
    constants = {"TILES": prod(times)}
    for a in range(MAX_AXES):
        constants |= {f"SMALL{a}": small[a], f"BELOW{a}": prod(small[a + 1 :])}
        constants |= {f"TIMES{a}": times[a], f"AFTER{a}": prod(times[a + 1 :])}
        constants[f"STEP{a}"] = prod(large[a + 1 :])
    return site.each(_TILES, "x", constants)


# dw = Σ over rows of x · dy · rate: a workgroup makes a row's rate, a thread a number of dw.
_RATES = whole("""
    if (group >= ROWS) { return; }
    var mine = 0.0;
    for (var i = group * N + me; i < (group + 1u) * N; i += 256u) { mine += x_at(i) * x_at(i); }
    let squares = summed(me, mine);
    if (me == 0u) { put_rates(group, inverseSqrt(squares / f32(N) + EPS)); }
""")
_WEIGHTED = """
    var total = 0.0;
    for (var row = 0u; row < ROWS; row++) {
        total += x_at(row * N + i) * dy_at(row * N + i) * rates_at(row);
    }
    put_y(i, total);
"""


def _n_rows(node: Tensor) -> int:
    return node.src[0].n_elements // node.src[0].shape[-1]


def _rms_norm_mul_back_w(site: ShaderSite) -> Sequence[Dispatch]:
    n_rows, rates = _n_rows(site.node), site.scratch
    constants = {"N": site.node.n_elements, "ROWS": n_rows}
    of_rates = constants | {"EPS": float(site.node.params["eps"])}
    return [
        site.shaders.dispatch(_RATES, {"rates": rates, "x": site.src[0]}, n_rows, of_rates),
        *site.each(_WEIGHTED, "x dy", constants, rates=rates),
    ]


declare(
    "rms_norm_mul_back_w", _rms_norm_mul_back_w, scratch=lambda node, shaders: 4 * _n_rows(node)
)
declare("sum", lambda site: [sum_of(site, site.out, site.src[0])])
declare("repeat_back", _repeat_back)
