"""What the 256 threads of a workgroup make together: a sum, or the greatest of their numbers."""

from __future__ import annotations

from pyggml.backends.webgpu.shader import MAIN

SUMMED = """
var<workgroup> parts: array<f32, 256>;
fn summed(me: u32, mine: f32) -> f32 {
    parts[me] = mine;
    workgroupBarrier();
    for (var n = 128u; n > 0u; n = n / 2u) {
        if (me < n) { parts[me] += parts[me + n]; }
        workgroupBarrier();
    }
    let total = parts[0];
    workgroupBarrier();
    return total;
}
"""
HIGHEST = """
var<workgroup> tops: array<f32, 256>;
fn highest(me: u32, mine: f32) -> f32 {
    tops[me] = mine;
    workgroupBarrier();
    for (var n = 128u; n > 0u; n = n / 2u) {
        if (me < n) { tops[me] = max(tops[me], tops[me + n]); }
        workgroupBarrier();
    }
    let top = tops[0];
    workgroupBarrier();
    return top;
}
"""


def with_sums(body: str) -> str:
    """A whole shader that may call `summed(me, mine)`, whose uniform control flow is the body's."""
    return SUMMED + MAIN.replace("BODY", body)
