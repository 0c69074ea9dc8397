"""Shaders that read packed weights: to unpack them, and to multiply few rows with them at once.

Both use 32 threads for four blocks. Of each block, 8 threads take the same group of 32 weights,
four weights each. So all 32 threads follow one branch of the decoder.
"""

from functools import cache

from pyggml.backends.webgpu.wgsl.halves import ROUND_ROW
from pyggml.backends.webgpu.wgsl.shader import whole
from pyggml.backends.webgpu.wgsl.tiles import FactorReading, quad_function
from pyggml.backends.webgpu.wgsl.weights import QUAD, blocks_of, weight_source
from pyggml.graph.dtypes import DTYPES

MOST_ROWS = 8  # of A, with which weights are multiplied as they are unpacked
ROWS_OF_GROUP = 8  # of the weights, in a workgroup
_UNITS = 8  # of 32 threads, in a workgroup


def _place(name: str) -> str:
    """Of unit `u` and its thread `lane`: the block's number, and the first weight in it."""
    groups = blocks_of(DTYPES[name]).groups
    return f"""let block = u / {groups}u * 4u + lane / 8u;
    let j = u % {groups}u * 32u + lane % 8u * {QUAD}u;"""


def unpack_groups(name: str, n: int) -> int:
    """Workgroups that unpack n weights."""
    blocks = blocks_of(DTYPES[name])
    units = -(-n // (4 * blocks.n)) * blocks.groups
    return -(-units // _UNITS)


def _unpack(name: str) -> str:
    """y_i = weight i of w, for i < N, a multiple of 4; y in quads."""
    n, n_bytes, _ = *blocks_of(DTYPES[name]), 0
    return f"""
    let u = group * {_UNITS}u + me / 32u;
    let lane = me % 32u;
    {_place(name)}
    let i = block * {n}u + j;
    if (i < N) {{ put_y(i / {QUAD}u, weights(block * {n_bytes}u, j)); }}
"""


@cache
def unpack_source(name: str) -> str:
    """A whole shader that unpacks w to y."""
    return weight_source(name) + whole(_unpack(name))


@cache
def halves_source(name: str, of_a: FactorReading) -> str:
    """One that unpacks w to y, in the first UNPACKING workgroups, and rounds a to x in those of
    its rows; see `ROUND_ROW`."""
    body = f"if (group < UNPACKING) {{ {_unpack(name)} return; }}\n{ROUND_ROW}"
    return weight_source(name) + quad_function("a", "M", of_a) + whole(body)


@cache
def dots_source(name: str, rows: int, of_a: FactorReading) -> str:
    """C[m, n] (+)= Σ_k A[m, k] · W[n, k] for `rows` m."""
    n, n_bytes, groups = *blocks_of(DTYPES[name]), blocks_of(DTYPES[name]).groups
    every = range(rows)
    return f"""{weight_source(name)}{quad_function("a", "M", of_a)}
var<workgroup> parts: array<f32, {256 * rows}>;
@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) me: u32,
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {{
    let first = (at.x + at.y * groups.x + P[0].x * 0u) * {ROWS_OF_GROUP}u;
    let start = min(first + me / 32u, N - 1u) * ROW_BYTES;
    let lane = me % 32u;
    {" ".join(f"var s{m} = 0.0;" for m in every)}
    for (var u = 0u; u < (K + {4 * n - 1}u) / {4 * n}u * {groups}u; u++) {{
        {_place(name)}
        let k = block * {n}u + j;
        if (k < K) {{
            let w = weights(start + block * {n_bytes}u, j);
            {" ".join(f"s{m} += dot(w, a_quad(0u, {m}u, k, K));" for m in every)}
        }}
    }}
    {" ".join(f"parts[{256 * m}u + me] = s{m};" for m in every)}
    workgroupBarrier();
    let n = first + me % {ROWS_OF_GROUP}u;
    let m = me / {ROWS_OF_GROUP}u;
    if (m < {rows}u && n < N) {{
        var sum = 0.0;
        for (var j = 0u; j < 32u; j++) {{ sum += parts[256u * m + 32u * (n - first) + j]; }}
        let c_index = m * C_ROW + C_FIRST + n;
        if (ADDS) {{ sum += c_at(c_index); }}
        put_c(c_index, sum);
    }}
}}"""
