"""Attention in float32, forward and backward, without a matrix of all scores.

    c = cap·tanh(scale·q·k / cap)       (without a cap: scale·q·k)
    z = c + slope·mask                  (or slope·distance, see pyggml/ops/attention/attention.py)
    p = e^(z − lse),  ds = p·(do·v − δ)·(1 − (c/cap)²)·scale,  δ = do·o
    a sink is a score without a value;  dsink = −Σ e^(sink − lse)·δ

A workgroup has a tile of queries of a head and walks along the keys, or a tile of keys and walks
along the queries (attention_tiles). Where few tiles would leave most of a large card idle,
gradients are summed in parts, by workgroups that take turns along the walk. A workgroup sums alone
what it writes, and parts are added in their order, so every sum has a fixed order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.attention_tiles import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    MAIN,
    MEMORY,
    QUAD,
    THREADS,
    add_columns,
    as_quads,
    bands_of,
    columns_at_once,
    dots,
    put_rows,
    quad_functions,
    set_weights,
    sums_of,
)
from pyggml.backends.webgpu.wgsl.formulas import CAPPED
from pyggml.backends.webgpu.wgsl.shader import LINE, BufferRange, Dispatch, Shaders, whole
from pyggml.graph.dtypes import F16, F32
from pyggml.graph.tensor import Tensor
from pyggml.ops.attention.positions import score_tables
from pyggml.sizes import round_up

_WIDEST = 256  # numbers of a head that are summed: values; for gradients, keys too
_MANY_GROUPS = 1024  # keep a large card busy
_NONE = -3e38  # stands for −inf, which shaders may do without

_SCORES = f"""{CAPPED}
fn sees(query: u32, key: u32) -> bool {{
    if (query >= T || key >= S) {{ return false; }}
    return span_at(2u * query) <= i32(key) && i32(key) < span_at(2u * query + 1u);
}}
fn capped_scores(dots: vec4<f32>) -> vec4<f32> {{
    let x = dots * SCALE;
    return vec4(capped(x.x), capped(x.y), capped(x.z), capped(x.w));
}}
fn bias(query: u32, key: u32, head: u32) -> f32 {{
    if (!sees(query, key)) {{ return NONE; }}
    if (MASKS > 0u) {{
        return max(slopes_at(head) * mask_at((head % MASKS * T + query) * S + key), NONE);
    }}
    if (!SLOPED) {{ return 0.0; }}
    return slopes_at(head) * f32(i32(key) - span_at(2u * query + 1u) + 1);
}}
// z of four pairs of a query and a key, NONE at most where the query doesn't see the key
fn scores(c: vec4<f32>, query: vec4<u32>, key: vec4<u32>, head: u32) -> vec4<f32> {{
    let biases = vec4({", ".join(f"bias(query[{i}], key[{i}], head)" for i in range(QUAD))});
    return select(c + biases, vec4(NONE), biases <= vec4(NONE));
}}
fn chances(z: vec4<f32>, lse: vec4<f32>) -> vec4<f32> {{
    return select(vec4(0.0), exp(z - lse), z > vec4(NONE));
}}
var<workgroup> low: atomic<u32>;
var<workgroup> high: atomic<u32>;
var<workgroup> bounds: vec2<u32>;  // of the keys that some query of a range sees
fn find_bounds(me: u32, first: u32, count: u32) {{
    if (me == 0u) {{
        atomicStore(&low, S);
        atomicStore(&high, 0u);
    }}
    workgroupBarrier();
    for (var i = first + me; i < min(first + count, T); i += {THREADS}u) {{
        let a = span_at(2u * i);
        let b = min(span_at(2u * i + 1u), i32(S));
        if (a < b) {{
            atomicMin(&low, u32(max(a, 0)));
            atomicMax(&high, u32(max(b, 0)));
        }}
    }}
    workgroupBarrier();
    if (me == 0u) {{ bounds = vec2(atomicLoad(&low), atomicLoad(&high)); }}
}}
"""
_SLOPES = f"""
// ds of four pairs, of their p and do·v
fn slopes(c: vec4<f32>, p: vec4<f32>, product: vec4<f32>, delta: vec4<f32>) -> vec4<f32> {{
    let ds = p * (product - delta) * SCALE;
    return vec4({", ".join(f"capped_back(c[{i}], ds[{i}])" for i in range(QUAD))});
}}
"""
_FOUR = "vec4(0u, 1u, 2u, 3u)"
_K, _V = "D", "DV"  # numbers of a head of queries and keys, and of one of values and results


def _query_rows(size: str) -> str:
    return f"first:(r * H + head) * {size}"


def _of_part(rows: str, below: str) -> str:
    """These rows of a gradient, of which each part has `below`."""
    return rows.replace("(r * ", f"((at.z * {below} + r) * ")


def _key_columns(size: str) -> str:
    return f"key:(r * HK + kv) * {size}"


_DELTAS = """
    let start = ((i % T) * H + i / T) * DV;
    var total = 0.0;
    for (var c = 0u; c < DV; c++) { total += do_at(start + c) * o_at(start + c); }
    put_delta(i, total);
"""


def _all_x(value: str, together: str) -> str:
    """`together` of `value`, a vector of the thread's rows, over all x, as `result`."""
    further_bands = "\n".join(
        f"result = {together.format('result', f'mine[{i * 8}u + y]')};" for i in range(1, 16)
    )
    return f"""
mine[x * 8u + y] = {value};
workgroupBarrier();
var result = mine[y];
{further_bands}
workgroupBarrier();"""


@cache
def _forward_source(n_bands: int) -> str:
    every = range(QUAD)
    shrink = " ".join(f"o{i}_{b} *= shrink[{i}];" for i in every for b in range(n_bands))
    scored = "\n".join(
        f"let z{j} = scores(capped_scores(s{j}), queries, vec4(key + {QUAD}u * x + {j}u), head);"
        for j in every
    )
    chances = "\n".join(f"let p{j} = chances(z{j}, top);" for j in every)
    rows = ("q", _query_rows(_K), "T")
    return f"""{_SCORES}{MEMORY}{MAIN}
    let kv = head / (H / HK);
    let queries = vec4(first + {QUAD}u * y) + {_FOUR};
    {sums_of("o", n_bands)}
    var top = vec4(max(sinks_at(head), NONE));
    var total = select(vec4(0.0), vec4(1.0), top > vec4(NONE));
    find_bounds(me, first, {BLOCK_ROWS}u);
    let range = workgroupUniformLoad(&bounds);
    for (var key = range.x; key < range.y; key += {BLOCK_COLUMNS}u) {{
        {dots("s", rows, ("k", _key_columns(_K), "range.y"), _K)}
        {scored}
        let before = top;
        {{ {_all_x("max(max(z0, z1), max(z2, z3))", "max({}, {})")} top = max(top, result); }}
        let shrink = exp(before - top);
        {chances}
        {set_weights([f"p{j}" for j in every])}
        {{ {_all_x("p0 + p1 + p2 + p3", "{} + {}")} total = total * shrink + result; }}
        {shrink}
        {add_columns("o", n_bands, ("v", _key_columns(_V), "range.y"), _V)}
    }}
    let share = select(vec4(0.0), 1.0 / total, total > vec4(0.0));
    {put_rows("o", "o", n_bands, _query_rows(_V), "T", _V, [f"share[{i}]" for i in every])}
    if (x == 0u) {{
        for (var i = 0u; i < {QUAD}u; i++) {{
            let lse = select(1e30, top[i] + log(total[i]), total[i] > 0.0);
            if (queries[i] < T) {{ put_lse(head * T + queries[i], lse); }}
        }}
    }}
}}
"""


@cache
def _queries_source(n_bands: int) -> str:
    """dq."""
    every = range(QUAD)
    slopes = [
        f"""let c{j} = capped_scores(s{j});
    let p{j} = chances(scores(c{j}, queries, vec4(key + {QUAD}u * x + {j}u), head), lse);
    let ds{j} = slopes(c{j}, p{j}, g{j}, delta);"""
        for j in every
    ]
    of_rows = ", ".join(f"{{0}}_at(head * T + min(queries[{i}], T - 1u))" for i in every)
    return f"""{_SCORES}{_SLOPES}{MEMORY}{MAIN}
    let kv = head / (H / HK);
    let queries = vec4(first + {QUAD}u * y) + {_FOUR};
    let lse = vec4({of_rows.format("lse")});
    let delta = vec4({of_rows.format("delta")});
    {sums_of("o", n_bands)}
    find_bounds(me, first, {BLOCK_ROWS}u);
    let range = workgroupUniformLoad(&bounds);
    let step = {BLOCK_COLUMNS}u * PARTS;
    for (var key = range.x + {BLOCK_COLUMNS}u * at.z; key < range.y; key += step) {{
        {dots("s", ("q", _query_rows(_K), "T"), ("k", _key_columns(_K), "range.y"), _K)}
        {dots("g", ("do", _query_rows(_V), "T"), ("v", _key_columns(_V), "range.y"), _V)}
        {chr(10).join(slopes)}
        {set_weights([f"ds{j}" for j in every])}
        workgroupBarrier();
        {add_columns("o", n_bands, ("k", _key_columns(_K), "range.y"), _K)}
    }}
    {put_rows("o", "dq", n_bands, _of_part(_query_rows(_K), "T"), "T", _K)}
}}
"""


@cache
def _keys_source(k_bands: int, v_bands: int) -> str:
    """dk and dv, over all queries' heads of the key head."""
    every = range(QUAD)
    rows = {size: f"first:(r * HK + head) * {size}" for size in (_K, _V)}
    columns = {size: f"query:(r * H + h) * {size}" for size in (_K, _V)}
    slopes = [
        f"""let q{j} = min(query + {QUAD}u * x + {j}u, T - 1u);
    let c{j} = capped_scores(s{j});
    let z{j} = scores(c{j}, vec4(query + {QUAD}u * x + {j}u), keys, h);
    let p{j} = chances(z{j}, vec4(lse_at(h * T + q{j})));
    let ds{j} = slopes(c{j}, p{j}, g{j}, vec4(delta_at(h * T + q{j})));"""
        for j in every
    ]
    return f"""{_SCORES}{_SLOPES}{MEMORY}{MAIN}
    let keys = vec4(first + {QUAD}u * y) + {_FOUR};
    {sums_of("dk", k_bands)}
    {sums_of("dv", v_bands)}
    let n_heads = H / HK;
    for (var i = at.z; i < (T + {BLOCK_COLUMNS - 1}u) / {BLOCK_COLUMNS}u * n_heads; i += PARTS) {{
        let query = i / n_heads * {BLOCK_COLUMNS}u;
        let h = head * n_heads + i % n_heads;
        find_bounds(me, query, {BLOCK_COLUMNS}u);
        let range = workgroupUniformLoad(&bounds);
        if (range.x >= first + {BLOCK_ROWS}u || range.y <= first) {{ continue; }}
        {dots("s", ("k", rows[_K], "S"), ("q", columns[_K], "T"), _K)}
        {dots("g", ("v", rows[_V], "S"), ("do", columns[_V], "T"), _V)}
        {chr(10).join(slopes)}
        {set_weights([f"p{j}" for j in every])}
        workgroupBarrier();
        {add_columns("dv", v_bands, ("do", columns[_V], "T"), _V)}
        {set_weights([f"ds{j}" for j in every])}
        workgroupBarrier();
        {add_columns("dk", k_bands, ("q", columns[_K], "T"), _K)}
    }}
    {put_rows("dk", "dk", k_bands, _of_part(rows[_K], "S"), "S", _K)}
    {put_rows("dv", "dv", v_bands, _of_part(rows[_V], "S"), "S", _V)}
}}
"""


_SINKS = whole("""
    if (group >= H) { return; }
    var mine = 0.0;
    for (var t = me; t < T; t += 256u) {
        mine -= exp(sinks_at(group) - lse_at(group * T + t)) * delta_at(group * T + t);
    }
    let total = summed(me, mine);
    if (me == 0u) { put_dsinks(group, total); }
""")


# -- ops ----------------------------------------------------------------------------------------


def _constants(node: Tensor) -> dict[str, int | float]:
    q, k = node.src[:2]
    (t, h, d), (s, hk, _), p = q.shape, k.shape, node.params
    dv = node.src[2].shape[2]
    n_masks = node.src[4 if len(node.saved) == 1 else 7].n_elements // (t * s) if p["masked"] else 0
    return {
        "T": t, "S": s, "H": h, "HK": hk, "D": d, "DV": dv, "D4": -(-d // QUAD),
        "DV4": -(-dv // QUAD), "D_AT_ONCE": columns_at_once(d), "DV_AT_ONCE": columns_at_once(dv),
        "SCALE": float(p["scale"]), "CAP": float(p["cap"]),
        "NONE": _NONE, "SLOPED": bool(p["max_bias"]), "MASKS": n_masks,
    }  # fmt: skip


def _extras(site: ShaderSite, first: int) -> dict[str, BufferRange]:
    """Mask, slopes and sinks among the sources from `first` on."""
    n_heads, given = site.node.src[0].shape[1], site.src[first:]
    tables = score_tables(site.node.params, given, n_heads, site.constant, _NONE)
    return dict(zip(("mask", "slopes", "sinks"), tables, strict=True))


_OF_VALUES = {"v", "o", "do", "dv"}


def _tiles(
    site: ShaderSite,
    source: str,
    heads: dict[str, BufferRange],
    arrays: dict[str, BufferRange],
    n_rows: int,
    n: int,
    n_parts: int = 1,
) -> Dispatch:
    """heads: tensors of rows of a head's numbers; n: heads of the result."""
    constants = _constants(site.node) | {"PARTS": n_parts}
    sizes = {name: _V if name in _OF_VALUES else _K for name in heads}
    quads = {name: as_quads(view, int(constants[sizes[name]])) for name, view in heads.items()}
    functions = "\n".join(quad_functions(name, v, sizes[name]) for name, v in quads.items())
    groups = -(-n_rows // BLOCK_ROWS), n, n_parts
    return site.shaders.dispatch(functions + source, {**quads, **arrays}, groups, constants)


def _forward(site: ShaderSite) -> Sequence[Dispatch]:
    q, k, v, span = site.src[:4]
    (t, h, dv), (of_keys, of_values) = site.node.shape, (x.dtype for x in site.node.src[1:3])
    heads = {"q": q, "k": numbers(k, of_keys), "v": numbers(v, of_values), "o": site.out}
    arrays = {"span": span, "lse": site.saved[0], **_extras(site, 4)}
    return [_tiles(site, _forward_source(bands_of(dv)), heads, arrays, t, h)]


def _n_parts(node: Tensor, limit: int) -> tuple[int, int]:
    """Parts in which the gradients of queries, and of keys and values, are summed."""
    (t, h, d), (s, hk, _), dv = *(x.shape for x in node.src[:2]), node.src[2].shape[2]

    def of(n_rows: int, n_heads: int, size: int, n_steps: int) -> int:
        most = limit // (F32.block_bytes * n_rows * n_heads * size)
        groups = -(-n_rows // BLOCK_ROWS) * n_heads
        return max(min(_MANY_GROUPS // groups, n_steps, most), 1)

    steps = -(-s // BLOCK_COLUMNS), -(-t // BLOCK_COLUMNS) * (h // hk)
    return of(t, h, d, steps[0]), of(s, hk, max(d, dv), steps[1])


def _scratch(node: Tensor, shaders: Shaders) -> int:
    """δ (H, T), and parts of gradients, those of queries before those of keys and values."""
    of_queries, of_keys = _n_parts(node, shaders.limit)
    q, k, v = (t.n_elements for t in node.src[:3])
    parts = max(of_queries * q * (of_queries > 1), of_keys * (k + v) * (of_keys > 1))
    return _delta_bytes(node) + F32.block_bytes * parts


def _delta_bytes(node: Tensor) -> int:
    return round_up(F32.block_bytes * node.shape[0] * node.shape[1], LINE)


_SUM = """
    var sum = x_at(i);
    for (var p = 1u; p < PARTS; p++) { sum += x_at(p * COUNT + i); }
    put_y(i, sum);
"""


def _in_parts(
    site: ShaderSite, n_parts: int, results: Mapping[str, BufferRange]
) -> tuple[dict[str, BufferRange], list[Dispatch]]:
    """Where a shader writes its gradients, and what adds up the parts."""
    if n_parts == 1:
        return dict(results), []
    parts, sums, start = {}, [], site.scratch.start + _delta_bytes(site.node)
    for name, y in results.items():
        parts[name] = replace(site.scratch, start=start, n_bytes=n_parts * y.n_bytes)
        start += n_parts * y.n_bytes
        n, views = y.n_bytes // y.size, {"y": y, "x": replace(parts[name], is_written=False)}
        sums.append(site.shaders.each(_SUM, n, views, {"PARTS": n_parts}))
    return parts, sums


def _backward(site: ShaderSite) -> Sequence[Dispatch]:
    q, k, v, span, o, lse, do = site.src[:7]
    dk, dv, *dsinks = site.saved
    (t, h, d), (s, hk, _) = (x.shape for x in site.node.src[:2])
    bands = bands_of(d), bands_of(site.node.src[2].shape[2])
    constants, dispatch = _constants(site.node), site.shaders.dispatch
    delta = replace(site.scratch, n_bytes=F32.block_bytes * t * h)
    of_delta = {"delta": delta, "do": do, "o": o}
    delta, extras = replace(delta, is_written=False), _extras(site, 7)
    of_sinks = {"sinks": extras.pop("sinks"), "lse": lse, "delta": delta}
    heads = {"q": q, "k": k, "v": v, "do": do}
    arrays = {"span": span, "lse": lse, "delta": delta, **extras}
    parts = _n_parts(site.node, site.shaders.limit)
    dqs, sum_of_queries = _in_parts(site, parts[0], {"dq": site.out})
    dks, sums_of_keys = _in_parts(site, parts[1], {"dk": dk, "dv": dv})
    return [
        site.shaders.each(_DELTAS, t * h, of_delta, constants),
        _tiles(site, _queries_source(bands[0]), {**heads, **dqs}, arrays, t, h, parts[0]),
        *sum_of_queries,
        _tiles(site, _keys_source(*bands), {**heads, **dks}, arrays, s, hk, parts[1]),
        *sums_of_keys,
        *(dispatch(_SINKS, {"dsinks": sinks, **of_sinks}, h, constants) for sinks in dsinks),
    ]


def _lacks(node: Tensor) -> str | None:
    keys = node.src[1:3]
    for t in keys:
        if t.dtype not in (F32, F16):
            return f"keys of {t.dtype} are read by none of its shaders"
    summed = keys if node.op is not None and node.op.name == "flash_attn_back" else keys[1:]
    size = max(t.shape[2] for t in summed)
    return f"heads of {size} numbers, wanted {_WIDEST} at most" if size > _WIDEST else None


declare("flash_attn_ext", _forward, lacks=_lacks, mixed=(1, 2))
declare("flash_attn_back", _backward, lacks=_lacks, scratch=_scratch)
