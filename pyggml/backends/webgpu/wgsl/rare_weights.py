"""Four neighbouring weights of the types without a decoder, as WGSL: see weights.py.

The layouts stand in pyggml.quants (`few_bits`, `fp4`, `kquants_min`, `kquants_sym`); the formulas
are those of pyggml/backends/cuda/weights/rare.py. Those with grids (IQ1 to IQ3) are missing.
"""

from __future__ import annotations

_HELPERS = """
fn half(i: u32) -> f32 { return unpack2x16float(w_word(i)).x; }
fn bytes(i: u32) -> vec4<u32> { return (vec4(w_word(i)) >> vec4(0u, 8u, 16u, 24u)) & vec4(255u); }
"""
_BODIES = {
    "Q8_1": """
    return half(at) * (vec4<f32>(bytes(at + 4u + j) ^ vec4(128u)) - 128.0);
""",
    "Q2_K": """
    let s = w_at(at + j / 16u);
    let four = bytes(at + 16u + 32u * (j / 128u) + j % 32u);
    let q = (four >> vec4(2u * (j % 128u / 32u))) & vec4(3u);
    return half(at + 80u) * f32(s & 15u) * vec4<f32>(q) - half(at + 82u) * f32(s >> 4u);
""",
    "Q3_K": """
    let i = j / 16u;
    let low = (w_at(at + 96u + i % 8u) >> (4u * (i / 8u))) & 15u;
    let high = (w_at(at + 104u + i % 4u) >> (2u * (i / 4u))) & 3u;
    let two = bytes(at + 32u + 32u * (j / 128u) + j % 32u) >> vec4(2u * (j % 128u / 32u));
    let third = (bytes(at + j % 32u) >> vec4(j / 32u)) & vec4(1u);
    let q = vec4<f32>((two & vec4(3u)) | (third << vec4(2u)));
    return half(at + 108u) * (f32(low | (high << 4u)) - 32.0) * (q - 4.0);
""",
    "Q1_0": """
    let bits = (vec4(w_at(at + 2u + j / 8u)) >> (vec4(j % 8u) + vec4(0u, 1u, 2u, 3u))) & vec4(1u);
    return half(at) * (2.0 * vec4<f32>(bits) - 1.0);
""",
    "Q2_0": """
    let q = (vec4(w_at(at + 2u + j / 4u)) >> vec4(0u, 2u, 4u, 6u)) & vec4(3u);
    return half(at) * (vec4<f32>(q) - 1.0);
""",
    "TQ2_0": """
    let q = (bytes(at + 32u * (j / 128u) + j % 32u) >> vec4(2u * (j % 128u / 32u))) & vec4(3u);
    return half(at + 64u) * (vec4<f32>(q) - 1.0);
""",
    "TQ1_0": """
    var byte = j % 32u;
    var digit = j / 32u;
    if (j >= 240u) {
        byte = 48u + (j - 240u) % 4u;
        digit = (j - 240u) / 4u;
    } else if (j >= 160u) {
        byte = 32u + (j - 160u) % 16u;
        digit = (j - 160u) / 16u;
    }
    var fraction = bytes(at + byte);
    for (var i = 0u; i < digit; i++) { fraction = (fraction * 3u) & vec4(255u); }
    return half(at + 52u) * (vec4<f32>((fraction * 3u) >> vec4(8u)) - 1.0);
""",
    "NVFP4": """
    let s = w_at(at + j / 16u);
    let exponent = (s >> 3u) & 15u;
    var d = f32(s & 7u);
    if (s == 127u) { d = 0.0; }
    else if (exponent == 0u) { d = d * 0x1p-10f; }
    else { d = (1.0 + d * 0.125) * bitcast<f32>((exponent + 119u) << 23u); }
    let nibble = bytes(at + 4u + 8u * (j / 16u) + j % 8u) >> vec4(4u * (j % 16u / 8u));
    let m = vec4<i32>(nibble & vec4(7u));  // steps between magnitudes are 1 up to 4, then 2, then 4
    let q = m + max(m - 4, vec4(0)) + 2 * max(m - 6, vec4(0));
    return d * vec4<f32>(select(q, -q, (nibble & vec4(8u)) != vec4(0u)));
""",
}
RARE = {
    name: f"{_HELPERS}fn weights(at: u32, j: u32) -> vec4<f32> {{{body}}}"
    for name, body in _BODIES.items()
}
