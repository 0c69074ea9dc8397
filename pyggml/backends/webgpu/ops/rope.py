"""Rotary positions: pairs turned by a table of cosines and sines.

The table itself is the host's: its angles want float64, which WGSL lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyggml.backends.webgpu.runtime.kernel import Kernel, Site
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch, per_element

_TURN = """
    let i = group * 256u + me;
    if (i >= JOBS) { return; }
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


def _turned(sign: float) -> Callable[[Site], Sequence[Dispatch]]:
    def bind(site: Site) -> Sequence[Dispatch]:
        x, table = site.node.src
        (*_, n_heads, d), n_pairs, p = x.shape, table.shape[2], site.node.params
        jobs = x.n_elements // d * (d - n_pairs)
        constants = {
            "JOBS": jobs, "D": d, "PAIRS": n_pairs, "HEADS": n_heads, "TOKENS": table.shape[0],
            "OFFSET": int(p["offset"]), "NEOX": bool(p["neox"]), "SIGN": sign,
        }  # fmt: skip
        views = {"y": site.out, "x": site.src[0], "table": site.src[1]}
        return [site.shaders.dispatch(_TURN, views, per_element(jobs), constants)]

    return bind


declare("rope_apply", Kernel(_turned(1.0)))
declare("rope_apply_back", Kernel(_turned(-1.0)))
