"""Rotary positions: the table of cosines and sines, without float64, and pairs turned by it.

A frequency is the host's: the part of a turn that one position adds, 64 bits behind the point. A
position times it, in whole numbers, loses the whole turns without an error: what is left of a turn
is right to 2^-32 at any position.
"""

from collections.abc import Sequence
from functools import partial
from math import pi

import numpy as np

from pyggml.backends.webgpu.ops.dropout import TIMES
from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch
from pyggml.ops.attention.positions import rotations

# -- the table ------------------------------------------------------------------------------------


# Sine and cosine of at most an eighth of a turn, as in Cephes (Moshier): WGSL promises but 2^-11.
_DIVIDED = """
// A frequency divided by a float above 0, bit by bit: that is m · 2^(exponent − 150).
fn divided(f: vec2<u32>, by: f32) -> vec2<u32> {
    let bits = bitcast<u32>(by);
    let m = (bits & 0x7fffffu) | 0x800000u;
    var quotient = vec2<u32>(0u, 0u);
    var rest = 0u;
    for (var n = 0u; n < 214u - min(bits >> 23u, 214u); n++) {
        rest = 2u * rest;
        if (n < 64u) { rest += (select(f.x, f.y, n >= 32u) >> (31u - n % 32u)) & 1u; }
        let one = select(0u, 1u, rest >= m);
        rest -= one * m;
        quotient = vec2<u32>((quotient.x << 1u) | (quotient.y >> 31u), (quotient.y << 1u) | one);
    }
    return quotient;
}
"""
_TABLE = """
    let t = i / PAIRS;
    let pair = i % PAIRS;
    let position = positions_at(u32(turns_at(3u * pair)) * T + t);
    let steps = u32(abs(position));
    var f = bitcast<vec2<u32>>(vec2<i32>(turns_at(3u * pair + 1u), turns_at(3u * pair + 2u)));
    if (DIVIDED) { f = divided(f, factors_at(pair)); }
    let turn = steps * f.x + times(steps, f.y).x;
    let quarter = (turn + 0x20000000u) >> 30u;
    let x = f32(bitcast<i32>(turn - (quarter << 30u))) * 1.4629180792671596e-9;
    let z = x * x;
    let s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4));
    let rest = 4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5);
    let c = 1.0 - 0.5 * z + z * z * rest;
    let first = select(c, s, (quarter & 1u) == 1u);
    let second = select(s, c, (quarter & 1u) == 1u);
    let cosine = select(first, -first, quarter == 1u || quarter == 2u);
    let sine = select(second, -second, quarter >= 2u);
    put_y(2u * t * PAIRS + pair, FACTOR * cosine);
    put_y((2u * t + 1u) * PAIRS + pair, FACTOR * select(sine, -sine, position < 0));
"""


def _table(site: ShaderSite) -> Sequence[Dispatch]:
    p, (n_tokens, _, n_pairs) = site.node.params, site.node.shape
    axes, radians, m = rotations(**p)
    divided = len(site.src) > 1
    constants = {"T": n_tokens, "PAIRS": n_pairs, "FACTOR": float(m), "DIVIDED": divided}
    turns = site.constant(_turns(axes, radians))
    views = {"y": site.out, "positions": site.src[0], "turns": turns}
    views["factors"] = site.src[1] if divided else turns.of("f32")
    return [site.shaders.each(_TABLE, n_tokens * n_pairs, views, constants, TIMES + _DIVIDED)]


def _turns(axes: np.ndarray, radians: np.ndarray) -> np.ndarray:
    """(pairs, 3) int32: which position a pair uses, and the two words of its frequency."""
    parts = np.modf(radians / (2 * pi))[0] * 2.0**32
    words = [axes, np.floor(parts), np.floor((parts - np.floor(parts)) * 2.0**32)]
    return np.stack([w.astype(np.uint32) for w in words], axis=1).view(np.int32)


declare("rope_table", _table)


# -- pairs turned by it ---------------------------------------------------------------------------


_TURN = """
    let head = i / (D - PAIRS);
    let job = i % (D - PAIRS);
    let start = head * D;
    if (job < PAIRS) {
        let turns = 2u * ((head / HEADS) % TOKENS) * PAIRS + job;
        let c = table_at(turns);
        let s = table_at(turns + PAIRS) * SIGN;
        let first = start + OFFSET + select(2u * job, job, NEOX);
        let second = first + select(1u, PAIRS, NEOX);
        let p = x_at(first);
        let q = x_at(second);
        put_y(first, p * c - q * s);
        put_y(second, p * s + q * c);
    } else {
        let k = job - PAIRS;
        let j = start + select(k + 2u * PAIRS, k, k < OFFSET);
        put_y(j, x_at(j));
    }
"""


def _rotate(sign: float, site: ShaderSite) -> Sequence[Dispatch]:
    x, table = site.node.src
    (*_, n_heads, d), n_pairs, p = x.shape, table.shape[2], site.node.params
    jobs = x.n_elements // d * (d - n_pairs)
    constants = {
        "D": d, "PAIRS": n_pairs, "HEADS": n_heads, "TOKENS": table.shape[0],
        "OFFSET": int(p["offset"]), "NEOX": bool(p["neox"]), "SIGN": sign,
    }  # fmt: skip
    return site.each(_TURN, "x table", constants, jobs)


declare("rope_apply", partial(_rotate, 1.0))
declare("rope_apply_back", partial(_rotate, -1.0))
