"""How a row of a matrix is rounded to float16, scaled so that no number leaves the range.

    x[m, k] = a[m, k] · f,   scales[m] = 1 / f      f: the power of two that brings the largest
                                                    number of row m to 4 … 8

A sum of 32 such numbers times weights of up to 256 stays below 65504, and what is 2^-16 of the
largest keeps all its bits. Of a row with an infinity, or with what is no number, the scale is no
number, so that whatever is made of it is none.
"""

# Of the workgroup's row. 129 is the exponent of 4.
ROUND_ROW = """
    let row = group - UNPACKING;
    if (row >= M) { return; }
    var mine = 0u;
    for (var k = 4u * me; k < K; k += 1024u) {
        let bits = bitcast<vec4<u32>>(a_quad(0u, row, k, K)) & vec4(0x7fffffffu);
        mine = max(max(mine, max(bits.x, bits.y)), max(bits.z, bits.w));
    }
    let top = u32(highest(me, f32(mine >> 23u)));
    let e = clamp(top, 3u, 254u);
    let factor = bitcast<f32>((256u - e) << 23u);
    for (var k = 4u * me; k < K; k += 1024u) {
        put_x(row * QUADS + k / 4u, a_quad(0u, row, k, K) * factor);
    }
    let scale = select((e - 2u) << 23u, 0x7fc00000u, top == 255u);
    if (me == 0u) { put_scales(row, bitcast<f32>(scale)); }
"""
