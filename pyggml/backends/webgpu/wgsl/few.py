"""The shader of products with few rows of one factor, such as those of an adapter.

    C[l, f] (+)= Σ_k L[l, k] · F[f, k]      for at most 8 f at a time

A workgroup has some l. Each of its threads sums up every so-manieth k for all f; then the sums of
an l are added up in the workgroup's memory, in a fixed order. L is read four numbers at a time: for
four l and one k, or for one l and four k, if those of F are neighbours too.
"""

from functools import cache

from pyggml.backends.webgpu.wgsl.tiles import QUAD, FactorReading, factor_start, quad_function

AT_ONCE = 8  # f
_THREADS = 256
_TOGETHER = 4  # l, or quads of them, of a workgroup
_SLICES = _THREADS // _TOGETHER  # of the sum over k
_AHEAD = {1: 8, QUAD: 2}  # steps of so many k, so that their loads are under way together

_SHADER = """
var<workgroup> parts0: array<vec4<f32>, 256>;
var<workgroup> parts1: array<vec4<f32>, 256>;
fn add_up(me: u32, part: u32, a: vec4<f32>, b: vec4<f32>) {
    parts0[part] = a;
    parts1[part] = b;
    workgroupBarrier();
    for (var n = 128u; n >= 4u; n = n / 2u) {
        if (me < n) {
            parts0[me] += parts0[me + n];
            parts1[me] += parts1[me + n];
        }
        workgroupBarrier();
    }
}
fn put(z: u32, l: u32, f: u32, value: f32) {
    if (l >= N_L || f >= N_F) { return; }
    let c_index = z * C_BATCH + C_FIRST + l * C_L + f * C_F;
    var sum = value;
    if (ADDS) { sum += c_at(c_index); }
    put_c(c_index, sum);
}
"""


def rows_of_group(along_k: bool) -> int:
    """l of a workgroup."""
    return _TOGETHER if along_k else _TOGETHER * QUAD


@cache
def few_source(of_l: FactorReading, of_f: FactorReading) -> str:
    """A whole shader that names l, f, c and the constants of a product."""
    slices, part = f"me % {_SLICES}u", f"me % {_SLICES}u * {_TOGETHER}u + me / {_SLICES}u"
    mine, per_step = f"me / {_SLICES}u", QUAD if of_f.along_k else 1
    if not of_l.along_k:
        slices, part = f"me / {_TOGETHER}u", "me"
        mine, per_step = f"me % {_TOGETHER}u * {QUAD}u", 1
    step, ahead = f"{_SLICES * per_step}u", _AHEAD[per_step]
    terms = [_terms(f"(k + {i} * {step})", of_l.along_k, of_f.along_k) for i in range(ahead)]
    n_sums = AT_ONCE // QUAD if of_l.along_k else AT_ONCE
    return f"""{quad_function("l", "N_L", of_l)}{quad_function("f", "N_F", of_f)}{_SHADER}
@compute @workgroup_size({_THREADS})
fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {{
    let z = at.z + P[0].x * 0u;
    let first_l = at.x * {rows_of_group(of_l.along_k)}u;
    let first = at.y * {AT_ONCE}u;
    let l_start = {factor_start("L")};
    let f_start = {factor_start("F")};
    let l = first_l + {mine};
    {" ".join(f"var s{i} = vec4<f32>();" for i in range(n_sums))}
    for (var k = {slices} * {per_step}u; k < K; k += {ahead} * {step}) {{
        {" ".join(terms)}
    }}
    {_puts(of_l.along_k, n_sums, part)}
}}
"""


def _terms(k: str, l_along_k: bool, f_along_k: bool) -> str:
    """Add the products at k, or at k … k + 3, to the sums."""
    of_l = f"let v = l_quad(l_start, l, {k}, K);"
    quads = range(AT_ONCE // QUAD)
    if not l_along_k:  # s_f: of four l
        lines = [f"let w{j} = f_quad(f_start, first + {QUAD * j}u, {k}, K);" for j in quads]
        if f_along_k:
            lines = [f"let w{j} = vec4({_ones(k, j)});" for j in quads]
        lines += [f"s{f} = fma(v, vec4(w{f // QUAD}[{f % QUAD}]), s{f});" for f in range(AT_ONCE)]
    elif f_along_k:  # s_j: of four f
        lines = [f"let w{f} = f_quad(f_start, first + {f}u, {k}, K);" for f in range(AT_ONCE)]
        for j in quads:
            dots = ", ".join(f"dot(v, w{QUAD * j + i})" for i in range(QUAD))
            lines.append(f"s{j} += vec4({dots});")
    else:  # one k, so that neighbouring threads read neighbouring numbers of both
        of_l = f"let v = l_one(l_start, l, {k}, K);"
        lines = [
            f"s{j} = fma(vec4(v), f_quad(f_start, first + {QUAD * j}u, {k}, K), s{j});"
            for j in quads
        ]
    return f"{{ {of_l} {' '.join(lines)} }}"


def _ones(k: str, j: int) -> str:
    """Four f at one k, where neighbours follow k."""
    return ", ".join(f"f_quad(f_start, first + {QUAD * j + i}u, {k}, K).x" for i in range(QUAD))


def _puts(along_k: bool, n_sums: int, part: str) -> str:
    lines = []
    for i in range(0, n_sums, 2):
        lines.append(f"add_up(me, {part}, s{i}, s{i + 1});")
        for half in (0, 1):
            sums = f"parts{half}[me]"
            puts = (
                f"put(z, first_l + me, first + {QUAD * half + c}u, {sums}[{c}]);"
                if along_k
                else f"put(z, first_l + {QUAD}u * me + {c}u, first + {i + half}u, {sums}[{c}]);"
                for c in range(QUAD)
            )
            lines.append(f"if (me < {_TOGETHER}u) {{ {' '.join(puts)} }}")
        lines.append("workgroupBarrier();")
    return "\n".join(lines)
