"""The shader of products with few rows of one factor, such as those of an adapter.

    C[l, f] (+)= Σ_k L[l, k] · F[f, k]      for at most 8 f at a time

A workgroup has some l. Each of its threads sums up every so-manieth k for one l and all f; then the
sums of an l are added up in the workgroup's memory, in a fixed order.
"""

from __future__ import annotations

import re
from functools import cache

AT_ONCE = 8  # f
_THREADS = 256
_AHEAD = 4  # of k, so that their loads are under way together


_SHADER = """
var<workgroup> parts: array<f32, PARTS>;
@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) me: u32, @builtin(workgroup_id) at: vec3<u32>) {
    let first_l = at.x * MANY + P[0].x * 0u;
    let first = at.y * 8u;
    let l_start = at.z / INNER / L_REPEAT0 * L_STEP0 + at.z % INNER / L_REPEAT1 * L_STEP1;
    let f_start = at.z / INNER / F_REPEAT0 * F_STEP0 + at.z % INNER / F_REPEAT1 * F_STEP1;
    let l_row = l_start + min(first_l + MINE, N_L - 1u) * L_ROW;
    ROWS_AND_SUMS
    for (var k = SLICE; k < K; k += STRIDE) {
        TERMS
    }
    KEEP
    workgroupBarrier();
    if (me < MANY * 8u) {
        let l = me / 8u;
        let f = me % 8u;
        var sum = 0.0;
        for (var j = 0u; j < SLICES; j++) { sum += parts[f * 256u + OTHER]; }
        if (first_l + l < N_L && first + f < N_F) {
            let place = at.z * C_BATCH + C_FIRST + (first_l + l) * C_L + (first + f) * C_F;
            if (ADDS) { sum += c_at(place); }
            put_c(place, sum);
        }
    }
}
"""


def rows_of_group(along_k: bool) -> int:
    """l of a workgroup."""
    return 8 if along_k else 16


@cache
def few_source(along_k: bool) -> str:
    """A whole shader that names l, f, c and the constants of a product.

    along_k: neighbours of L in memory follow k, so neighbouring threads take one k after the other;
    else one l after the other.
    """
    many = rows_of_group(along_k)
    slices, every = _THREADS // many, range(AT_ONCE)
    terms = []
    for i in range(_AHEAD):
        terms.append(f"let k{i} = min(k + {i * slices}u, K - 1u);")
        terms.append(f"let v{i} = select(0.0, l_at(l_row + k{i} * L_K), k + {i * slices}u < K);")
    for i in range(_AHEAD):
        terms += [f"s{f} = fma(v{i}, f_at(f{f} + k{i} * F_K), s{f});" for f in every]
    rows = [f"let f{f} = f_start + min(first + {f}u, N_F - 1u) * F_ROW;" for f in every]
    words = {
        "ROWS_AND_SUMS": "\n".join([*rows, *(f"var s{f} = 0.0;" for f in every)]),
        "TERMS": "\n".join(terms),
        "KEEP": "\n".join(f"parts[{f * _THREADS}u + me] = s{f};" for f in every),
        "MINE": f"me / {slices}u" if along_k else f"me % {many}u",
        "SLICES": f"{slices}u",
        "SLICE": f"me % {slices}u" if along_k else f"me / {many}u",
        "STRIDE": f"{slices * _AHEAD}u",
        "OTHER": f"(l * {slices}u + j)" if along_k else f"(j * {many}u + l)",
        "PARTS": f"{_THREADS * AT_ONCE}",
        "MANY": f"{many}u",
    }
    return re.sub(rf"\b({'|'.join(words)})\b", lambda found: words[found[0]], _SHADER)
