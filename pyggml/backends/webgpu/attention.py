"""Attention in float32, forward and backward, without a matrix of all scores.

    c = cap·tanh(scale·q·k / cap)       (without a cap: scale·q·k)
    z = c + slope·mask                  (or slope·distance, see pyggml/ops/attention.py)
    p = e^(z − lse),  ds = p·(do·v − δ)·(1 − (c/cap)²)·scale,  δ = do·o
    a sink is a score without a value;  dsink = −Σ e^(sink − lse)·δ

A workgroup has a tile of queries of a head, or of keys of a key head, and walks along the other
side. It sums alone what it writes, so every sum has a fixed order. A tile has at most 1024 numbers:
two of them fit in the 16 KB of memory that any device gives a workgroup.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyggml.backends.webgpu.kernel import Kernel, Site, numbers
from pyggml.backends.webgpu.norm import with_sums
from pyggml.backends.webgpu.shader import Dispatch, View, per_element
from pyggml.backends.webgpu.table import declare
from pyggml.dtypes import F16, F32
from pyggml.positions import alibi_slopes
from pyggml.tensors import Tensor

_WIDEST = 256  # numbers of a head
_KEYS = 16  # that queries meet at once
_NONE = -3e38  # stands for −inf, which shaders may do without

_SCORE = """
fn capped(q: u32, k: u32) -> f32 {  // of rows that begin at elements q and k
    var dot = 0.0;
    for (var c = 0u; c < D; c++) { dot += q_at(q + c) * k_at(k + c); }
    let z = dot * SCALE;
    return select(z, CAP * tanh(z / max(CAP, 1e-30)), CAP > 0.0);
}
fn biased(z: f32, query: u32, key: u32, head: u32) -> f32 {
    if (MASKS > 0u) {
        return max(z + slopes_at(head) * mask_at((head % MASKS * T + query) * S + key), NONE);
    }
    if (!SLOPED) { return z; }
    return z + slopes_at(head) * f32(i32(key) - span_at(2u * query + 1u) + 1);
}
fn q_row(query: u32, head: u32) -> u32 { return (query * H + head) * D; }
fn k_row(key: u32, head: u32) -> u32 { return (key * HK + head) * D; }
fn sees(query: u32, key: u32) -> bool {
    if (query >= T || key >= S) { return false; }
    return span_at(2u * query) <= i32(key) && i32(key) < span_at(2u * query + 1u);
}
var<workgroup> bounds: vec2<u32>;  // of the keys that some query of a tile sees
fn find_bounds(first: u32, count: u32) {
    var start = S;
    var stop = 0u;
    for (var i = first; i < min(first + count, T); i++) {
        let a = span_at(2u * i);
        let b = span_at(2u * i + 1u);
        if (a < b) { start = min(start, u32(max(a, 0))); stop = max(stop, u32(max(b, 0))); }
    }
    bounds = vec2<u32>(start, min(stop, S));
}
"""
_MAIN = """
@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {
    let first = at.x * ROWS + P[0].x * 0u;
    let head = at.y;
"""

_FORWARD = (
    _SCORE
    + """
var<workgroup> sums: array<f32, 1024>;
var<workgroup> s: array<f32, 256>;
var<workgroup> top: array<f32, 16>;
var<workgroup> total: array<f32, 16>;
var<workgroup> shrink: array<f32, 16>;
"""
    + _MAIN
    + """
    let kv = head / (H / HK);
    for (var e = me; e < ROWS * D; e += 128u) { sums[e] = 0.0; }
    if (me < ROWS) {
        top[me] = max(sinks_at(head), NONE);
        total[me] = select(0.0, 1.0, top[me] > NONE);
    }
    if (me == 0u) { find_bounds(first, ROWS); }
    let range = workgroupUniformLoad(&bounds);
    for (var key = range.x; key < range.y; key += KEYS) {
        for (var e = me; e < ROWS * KEYS; e += 128u) {
            let query = first + e / KEYS;
            let other = key + e % KEYS;
            var z = NONE;
            if (sees(query, other)) {
                z = biased(capped(q_row(query, head), k_row(other, kv)), query, other, head);
            }
            s[e] = z;
        }
        workgroupBarrier();
        if (me < ROWS) {
            var highest = top[me];
            for (var j = 0u; j < KEYS; j++) { highest = max(highest, s[me * KEYS + j]); }
            shrink[me] = exp(top[me] - highest);
            var sum = total[me] * shrink[me];
            for (var j = 0u; j < KEYS; j++) {
                let z = s[me * KEYS + j];
                let p = select(0.0, exp(z - highest), z > NONE);
                s[me * KEYS + j] = p;
                sum += p;
            }
            top[me] = highest;
            total[me] = sum;
        }
        workgroupBarrier();
        for (var e = me; e < ROWS * D; e += 128u) {
            let i = e / D;
            var value = sums[e] * shrink[i];
            for (var j = 0u; j < min(KEYS, S - key); j++) {
                value += s[i * KEYS + j] * v_at(k_row(key + j, kv) + e % D);
            }
            sums[e] = value;
        }
        workgroupBarrier();
    }
    for (var e = me; e < ROWS * D; e += 128u) {
        let i = e / D;
        if (first + i < T) {
            let sum = total[i];
            put_o(q_row(first + i, head) + e % D, select(0.0, sums[e] / sum, sum > 0.0));
        }
    }
    if (me < ROWS && first + me < T) {
        let sum = total[me];
        put_lse(head * T + first + me, select(1e30, top[me] + log(sum), sum > 0.0));
    }
}
"""
)

_DELTAS = """
    let e = group * 256u + me;
    if (e < H * T) {
        let start = ((e % T) * H + e / T) * D;
        var total = 0.0;
        for (var c = 0u; c < D; c++) { total += do_at(start + c) * o_at(start + c); }
        put_delta(e, total);
    }
"""
# (p, ds) of a query and a key that it sees
_BACK = (
    _SCORE
    + """
fn back(query: u32, key: u32, head: u32, kv: u32) -> vec2<f32> {
    if (!sees(query, key)) { return vec2<f32>(0.0, 0.0); }
    let z = capped(q_row(query, head), k_row(key, kv));
    var product = 0.0;
    for (var c = 0u; c < D; c++) {
        product += do_at(q_row(query, head) + c) * v_at(k_row(key, kv) + c);
    }
    let p = exp(biased(z, query, key, head) - lse_at(head * T + query));
    let of_cap = z / max(CAP, 1e-30);
    let slope = select(1.0, 1.0 - of_cap * of_cap, CAP > 0.0);
    return vec2<f32>(p, p * (product - delta_at(head * T + query)) * slope * SCALE);
}
"""
)
_QUERIES = (
    _BACK
    + """
var<workgroup> sums: array<f32, 1024>;
var<workgroup> ds: array<f32, 256>;
"""
    + _MAIN
    + """
    let kv = head / (H / HK);
    for (var e = me; e < ROWS * D; e += 128u) { sums[e] = 0.0; }
    if (me == 0u) { find_bounds(first, ROWS); }
    let range = workgroupUniformLoad(&bounds);
    for (var key = range.x; key < range.y; key += KEYS) {
        for (var e = me; e < ROWS * KEYS; e += 128u) {
            ds[e] = back(first + e / KEYS, key + e % KEYS, head, kv).y;
        }
        workgroupBarrier();
        for (var e = me; e < ROWS * D; e += 128u) {
            var value = sums[e];
            for (var j = 0u; j < min(KEYS, S - key); j++) {
                value += ds[e / D * KEYS + j] * k_at(k_row(key + j, kv) + e % D);
            }
            sums[e] = value;
        }
        workgroupBarrier();
    }
    for (var e = me; e < ROWS * D; e += 128u) {
        if (first + e / D < T) { put_dq(q_row(first + e / D, head) + e % D, sums[e]); }
    }
}
"""
)
_KEYS_BACK = (
    _BACK
    + """
var<workgroup> dks: array<f32, 1024>;
var<workgroup> dvs: array<f32, 1024>;
var<workgroup> ps: array<vec2<f32>, 256>;
"""
    + _MAIN
    + """
    for (var e = me; e < ROWS * D; e += 128u) { dks[e] = 0.0; dvs[e] = 0.0; }
    for (var query = 0u; query < T; query += KEYS) {
        if (me == 0u) { find_bounds(query, KEYS); }
        let range = workgroupUniformLoad(&bounds);
        if (range.x >= first + ROWS || range.y <= first) { continue; }
        for (var h = head * (H / HK); h < (head + 1u) * (H / HK); h++) {
            for (var e = me; e < KEYS * ROWS; e += 128u) {
                ps[e] = back(query + e / ROWS, first + e % ROWS, h, head);
            }
            workgroupBarrier();
            for (var e = me; e < ROWS * D; e += 128u) {
                var dk = dks[e];
                var dv = dvs[e];
                for (var i = 0u; i < min(KEYS, T - query); i++) {
                    let pair = ps[i * ROWS + e / D];
                    dk += pair.y * q_at(q_row(query + i, h) + e % D);
                    dv += pair.x * do_at(q_row(query + i, h) + e % D);
                }
                dks[e] = dk;
                dvs[e] = dv;
            }
            workgroupBarrier();
        }
    }
    for (var e = me; e < ROWS * D; e += 128u) {
        if (first + e / D < S) {
            put_dk(k_row(first + e / D, head) + e % D, dks[e]);
            put_dv(k_row(first + e / D, head) + e % D, dvs[e]);
        }
    }
}
"""
)


_SINKS = with_sums("""
    if (group >= H) { return; }
    var mine = 0.0;
    for (var t = me; t < T; t += 256u) {
        mine -= exp(sinks_at(group) - lse_at(group * T + t)) * delta_at(group * T + t);
    }
    let total = summed(me, mine);
    if (me == 0u) { put_dsinks(group, total); }
""")


def _constants(node: Tensor) -> dict[str, int | float]:
    q, k = node.src[:2]
    (t, h, d), (s, hk, _), p = q.shape, k.shape, node.params
    rows = 16 if d <= 64 else 8 if d <= 128 else 4  # of 1024 numbers in all
    return {
        "T": t, "S": s, "H": h, "HK": hk, "D": d, "ROWS": rows, "KEYS": _KEYS,
        "SCALE": float(p["scale"]), "CAP": float(p["cap"]), "NONE": _NONE,
        "SLOPED": bool(p["max_bias"]), "MASKS": 0,
    }  # fmt: skip


def _extras(site: Site, first: int, c: dict[str, int | float]) -> dict[str, View]:
    """Mask, slopes and sinks among the sources from `first` on; c gets the number of masks."""
    p, views, n_heads = site.node.params, list(site.src[first:]), int(c["H"])
    found, nothing = {}, np.full(n_heads, _NONE, np.float32)
    if p["masked"]:
        found["mask"] = views.pop(0)
        c["MASKS"] = site.node.src[first].n_elements // int(c["T"] * c["S"])
    slopes = site.constant(alibi_slopes(n_heads, p["max_bias"]).astype(np.float32))
    sinks = views.pop(0) if views else site.constant(nothing)
    return {"mask": slopes, **found, "slopes": slopes, "sinks": sinks}


def _forward(site: Site) -> Sequence[Dispatch]:
    c = _constants(site.node)
    q, k, v, span = site.src[:4]
    of_keys = site.node.src[1].dtype
    views = {"q": q, "k": numbers(k, of_keys), "v": numbers(v, of_keys), "span": span}
    views |= {"o": site.out, "lse": site.saved[0], **_extras(site, 4, c)}
    tiles = -(-int(c["T"]) // int(c["ROWS"])), int(c["H"]), 1
    return [site.shaders.dispatch(_FORWARD, views, tiles, c)]


def _scratch(node: Tensor, limit: int) -> int:
    """δ (H, T)."""
    return F32.block_bytes * node.shape[0] * node.shape[1]


def _backward(site: Site) -> Sequence[Dispatch]:
    c, made = _constants(site.node), site.shaders.dispatch
    q, k, v, span, o, lse, do = site.src[:7]
    dk, dv, *dsinks = site.saved
    extras = _extras(site, 7, c)
    n, rows = int(c["T"]) * int(c["H"]), int(c["ROWS"])
    of_delta = {"delta": site.scratch, "do": do, "o": o}
    delta = View(site.scratch.buffer, site.scratch.start, site.scratch.n_bytes)
    views = {"q": q, "k": k, "v": v, "span": span, "lse": lse, "do": do, "delta": delta}
    of_sinks = {"sinks": extras["sinks"], "lse": lse, "delta": delta}
    views |= {name: extras[name] for name in ("mask", "slopes")}
    tiles = -(-int(c["T"]) // rows), int(c["H"]), 1
    key_tiles = -(-int(c["S"]) // rows), int(c["HK"]), 1
    return [
        made(_DELTAS, of_delta, per_element(n), c),
        made(_QUERIES, {"dq": site.out, **views}, tiles, c),
        made(_KEYS_BACK, {"dk": dk, "dv": dv, **views}, key_tiles, c),
        *(made(_SINKS, {"dsinks": t, **of_sinks}, int(c["H"]), c) for t in dsinks),
    ]


def _lacks(node: Tensor) -> str | None:
    q, k = node.src[:2]
    if k.dtype not in (F32, F16):
        return f"keys of {k.dtype} are read by none of its shaders"
    size = q.shape[2]
    return f"heads of {size} numbers, wanted {_WIDEST} at most" if size > _WIDEST else None


declare("flash_attn_ext", Kernel(_forward, lacks=_lacks, mixed=(1, 2)))
declare("flash_attn_back", Kernel(_backward, lacks=_lacks, scratch=_scratch))
