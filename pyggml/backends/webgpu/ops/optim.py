"""One step of an optimiser, in place, and the limit of the gradient's norm."""

from collections.abc import Mapping, Sequence
from functools import partial

from pyggml.backends.webgpu.runtime.kernel import ShaderSite
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.formulas import statements_of
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, whole
from pyggml.formulas.formula import Formula, formula
from pyggml.graph.tensor import Tensor
from pyggml.ops import formulas
from pyggml.ops.optim import STEPS
from pyggml.ops.optim_8bit import HALF, M_CODES, M_VALUES, TINY, V_CODES, V_VALUES, n_blocks

_PIECE = 1 << 12  # numbers whose squares one workgroup adds up
_SQUARES = whole("""
    var mine = 0.0;
    for (var i = group * PIECE + me; i < min((group + 1u) * PIECE, N); i += 256u) {
        mine += g_at(i) * g_at(i);
    }
    let total = summed(me, mine);
    if (me == 0u && group * PIECE < N) { put_sums(group, total); }
""")
_NORM = whole("""
    var mine = 0.0;
    for (var i = me; i < N; i += 256u) { mine += sums_at(i); }
    let total = summed(me, mine);
    if (me == 0u) { put_y(0u, sqrt(total)); }
""")
_SHORTEN = """
    let norm = norm_at(0u);
    if (norm > LIMIT && norm < 3.0e38) { put_g(i, g_at(i) * (LIMIT / norm)); }
"""


def _settings(of: Formula) -> dict[str, str]:
    """The texts of a step's settings."""
    return {name: f"s_at({i}u)" for i, name in enumerate(of.settings)}


def step_text(of: Formula) -> str:
    """stepped(i, p): what a step makes of number i of a parameter, p; moments change."""
    _, *read = of.sources
    lines = [f"let {name} = {name}_at(i);" for name in read]
    lines += [statements_of(of, _settings(of))]
    lines += [f"put_{name}(i, y{k});" for k, name in enumerate(read[1:], 1)]
    body = "\n    ".join(lines)
    return f"fn stepped(i: u32, p: f32) -> f32 {{\n    {body}\n    return y;\n}}\n"


# A workgroup takes a block; codes of four numbers lie in a word. PUT: what becomes of a new number
# x, and LAST: after all have theirs.
BLOCK_STEP = "var<workgroup> codes: array<u32, 512>;\n" + whole("""
    let i = group * 256u + me;
    let block = min(group, BLOCKS - 1u);
    var g = 0.0;
    var first = 0.0;
    var second = 0.0;
    if (i < N) {
        g = g_at(i);
        first = m_values_at(m_at(i)) * scales_at(block);
        second = v_values_at(v_at(i)) * scales_at(BLOCKS + block);
    }
    MOMENTS
    let m = y;
    let v = y1;
    let m_most = highest(me, abs(m));
    let v_most = highest(me, v);
    if (i < N) {
        let p = p_at(i);
        MOVED
        let x = y;
        PUT
    }
    codes[me] = m_codes_at(u32(max((m / max(m_most, TINY) + 1.0) * HALF + 0.5, 0.0)));
    codes[256u + me] = v_codes_at(u32(max((v / max(v_most, TINY) + 1.0) * HALF + 0.5, 0.0)));
    workgroupBarrier();
    if (me < 64u && group * 256u + 4u * me < N) {
        let at = 4u * me;
        let more = at + 256u;
        put_m_words(group * 64u + me, codes[at] | (codes[at + 1u] << 8u)
            | (codes[at + 2u] << 16u) | (codes[at + 3u] << 24u));
        put_v_words(group * 64u + me, codes[more] | (codes[more + 1u] << 8u)
            | (codes[more + 2u] << 16u) | (codes[more + 3u] << 24u));
    }
    if (me == 0u && group < BLOCKS) {
        put_scales(group, m_most);
        put_scales(BLOCKS + group, v_most);
    }
    LAST
""")
_TEXTS = _settings(STEPS["opt_step_adamw"])
BLOCK_STEP = BLOCK_STEP.replace(
    "MOMENTS", statements_of(formula(formulas.moments), {**_TEXTS, "m": "first", "v": "second"})
).replace("MOVED", statements_of(formula(formulas.move_parameter), _TEXTS))
_BLOCK_IN_FLOAT32 = BLOCK_STEP.replace("PUT", "put_y(i, x);").replace("LAST", "")


def _pieces(node: Tensor) -> int:
    return -(-node.src[0].n_elements // _PIECE)


def _clip_norm(site: ShaderSite) -> Sequence[Dispatch]:
    (g,), n, limit = site.src, site.node.src[0].n_elements, next(iter(site.node.params.values()))
    n_pieces, g = _pieces(site.node), g.for_writing()
    dispatch = site.shaders.dispatch
    calls = [
        dispatch(_SQUARES, {"sums": site.scratch, "g": g}, n_pieces, {"N": n, "PIECE": _PIECE}),
        dispatch(_NORM, {"y": site.out, "sums": site.scratch}, 1, {"N": n_pieces}),
    ]
    if limit:
        views, constants = {"g": g, "norm": site.out}, {"LIMIT": float(limit)}
        calls.append(site.shaders.each(_SHORTEN, n, views, constants))
    return calls


def views_of(site: ShaderSite, of: Formula, *more: str) -> dict[str, BufferRange]:
    """The node's memory by name; y and p are the same, moments change."""
    views = {"y": site.out, **dict(zip((*of.sources, "s", *more), site.src, strict=True))}
    return views | {name: views[name].for_writing() for name in of.sources[2:]}


def _step(of: Formula, site: ShaderSite) -> Sequence[Dispatch]:
    body, views = "put_y(i, stepped(i, p_at(i)));", views_of(site, of)
    return [site.shaders.each(body, site.node.n_elements, views, functions=step_text(of))]


def dispatch_of_blocks(
    site: ShaderSite,
    body: str,
    more: Mapping[str, BufferRange] | None = None,
    constants: Mapping[str, int | float] | None = None,
) -> Sequence[Dispatch]:
    """BLOCK_STEP over all blocks; more: views, in place of the op's on float32 too."""
    p, g, m, v, scales, s, *_ = site.src
    n, n_groups = site.node.n_elements, n_blocks(site.node.n_elements)
    views = {"y": site.out, "p": p, "g": g, "m": m, "v": v, "s": s, "scales": scales.for_writing()}
    views |= {"m_words": m.of("u32").for_writing(), "v_words": v.of("u32").for_writing()}
    values = {"m_values": M_VALUES, "v_values": V_VALUES}
    codes = {"m_codes": M_CODES, "v_codes": V_CODES}
    views |= {name: site.constant(table) for name, table in values.items()}
    views |= {name: site.constant(table).of("u8") for name, table in codes.items()}
    own = {"N": n, "BLOCKS": n_groups, "HALF": float(HALF), "TINY": float(TINY)}
    return [
        site.shaders.dispatch(body, views | dict(more or {}), n_groups, own | dict(constants or {}))
    ]


declare(
    "opt_step_adamw_8bit", lambda site: dispatch_of_blocks(site, _BLOCK_IN_FLOAT32), mixed=(2, 3)
)
declare("clip_norm", _clip_norm, scratch=lambda node, shaders: 4 * _pieces(node))
for _name, _of in STEPS.items():
    declare(_name, partial(_step, _of))
