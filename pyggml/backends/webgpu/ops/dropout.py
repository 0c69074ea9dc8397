"""Random draws of training, the same numbers as the host's: see ops/arithmetic/dropout.py."""

from collections.abc import Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import statements_of
from pyggml.backends.webgpu.wgsl.shader import Dispatch
from pyggml.ops.arithmetic.dropout import KEEP, NOISY, quarters, share_kept

TIMES = """
fn times(a: u32, b: u32) -> vec2<u32> {  // the product's upper and lower word
    let low = (a & 0xffffu) * (b & 0xffffu);
    let first = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let second = (a & 0xffffu) * (b >> 16u) + (first & 0xffffu);
    return vec2<u32>((a >> 16u) * (b >> 16u) + (first >> 16u) + (second >> 16u), a * b);
}
"""
PHILOX = """
fn philox(column: u32, row: u32) -> vec4<u32> {  // Philox4x32-10
    var c = vec4<u32>(column, row, STREAM, bitcast<u32>(draw_at(2u)));
    var key = vec2<u32>(bitcast<u32>(draw_at(0u)), bitcast<u32>(draw_at(1u)));
    for (var round = 0u; round < 10u; round++) {
        let a = times(c.x, 0xD2511F53u);
        let b = times(c.z, 0xCD9E8D57u);
        c = vec4<u32>(b.x ^ c.y ^ key.x, b.y, a.x ^ c.w ^ key.y, a.y);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}
"""
# A thread draws the words of one column of all four quarters of a row.
_DRAWN = """
    let row = i / QUARTER;
    let words = philox(i % QUARTER, row);
    for (var w = 0u; w < 4u; w++) {
        let j = w * QUARTER + i % QUARTER;
        if (j < N) {
            let at = row * N + j;
            let word = words[w];
            NUMBER
            put_y(at, y);
        }
    }
"""
_DROPPED = _DRAWN.replace("NUMBER", statements_of(KEEP, {"x": "x_at(at)"}))
_NOISE = {"x": "x_at(at)", "size": "size_at(row)", "bits": "f32(word >> 8u)"}
_NOISY = _DRAWN.replace("NUMBER", statements_of(NOISY, _NOISE))


def _draw(site: ShaderSite, body: str, names: str, **more: float) -> Sequence[Dispatch]:
    n, quarter, jobs = quarters(site.node)
    constants = {"N": n, "QUARTER": quarter, "STREAM": site.node.params["stream"]}
    return site.each(body, names, constants | more, jobs, TIMES + PHILOX)


def _dropout(site: ShaderSite) -> Sequence[Dispatch]:
    least, grown = share_kept(site.node.params["p"])
    settings = {"p_least": min(least, (1 << 32) - 1), "p_grown": grown}
    return _draw(site, _DROPPED, "x draw", **settings)


declare("dropout", _dropout)
declare("uniform_noise", lambda site: _draw(site, _NOISY, "x size draw"))
