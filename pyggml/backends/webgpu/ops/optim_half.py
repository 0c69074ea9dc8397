"""Steps of the optimisers on parameters in 16 bits, rounded by chance: see ops/optim_half.py. The
random bits of each number are the host's.
"""

from collections.abc import Sequence
from functools import partial

from pyggml.backends.webgpu.ops.dropout import PHILOX, TIMES
from pyggml.backends.webgpu.ops.layout import TO_F16, words_of
from pyggml.backends.webgpu.ops.optim import BLOCK_STEP, dispatch_of_blocks, step_text, views_of
from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import Dispatch
from pyggml.formulas.formula import Formula
from pyggml.graph.dtypes import BF16, F16
from pyggml.graph.tensor import Tensor
from pyggml.jit.tasks import SHARE
from pyggml.ops.arithmetic.dropout import EIGHTH
from pyggml.ops.optim import STEPS

_BITS = (
    TIMES
    + PHILOX
    + """
fn bits_of(i: u32) -> u32 {  // 16 random ones
    let at = i % SHARE;
    let eighth = at / EIGHTH;
    let words = philox(at % EIGHTH, i / SHARE);
    return (words[eighth & 3u] >> (16u * (eighth >> 2u))) & 0xffffu;
}
"""
)
_NARROW = {
    BF16: """
fn narrowed(x: f32, r: u32) -> u32 {
    let u = bitcast<u32>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) { return (u >> 16u) | 64u; }
    return select(u + r, u, (u & 0x7f800000u) == 0x7f800000u) >> 16u;
}
""",
    F16: TO_F16
    + """
fn narrowed(x: f32, r: u32) -> u32 {
    let u = bitcast<u32>(x);
    let a = u & 0x7fffffffu;
    if (a < 0x38800000u) {  // below 2^-14: a share of units of 2^-24, which are a half's bits
        let units = bitcast<f32>(a) * 16777216.0;
        let more = u32((units - floor(units)) * 65536.0 >= f32(65536u - r));
        return ((u >> 16u) & 0x8000u) | (u32(units) + more);
    }
    if (a >= 0x7f800000u) { return to_f16(x); }
    return to_f16(bitcast<f32>((u & 0x80000000u) | ((a + (r >> 3u)) & 0xffffe000u)));
}
""",
}
# A thread writes a word of the result, two numbers.
_BY_WORDS = """
    var word = y_at(i);
    for (var h = 0u; h < 2u; h++) {
        let j = 2u * i + h;
        if (j < N) {
            let half = narrowed(stepped(j, p_at(j)), bits_of(j));
            word = (word & (0xffff0000u >> (16u * h))) | (half << (16u * h));
        }
    }
    put_y(i, word);
"""
_BY_BLOCKS = "var<workgroup> halves: array<u32, 256>;\n" + BLOCK_STEP.replace(
    "PUT", "halves[me] = narrowed(x, bits_of(i));"
).replace(
    "LAST",
    """
    if (me < 128u && i + me < N) {
        let w = group * 128u + me;
        let second = select(y_at(w) & 0xffff0000u, halves[2u * me + 1u] << 16u, i + me + 1u < N);
        put_y(w, halves[2u * me] | second);
    }
    """,
)


def _lacks(node: Tensor) -> str | None:
    """Of a parameter that begins within a word."""
    return "it begins between two words" if node.src[0].offset % 4 else None


def _step(of: Formula, site: ShaderSite) -> Sequence[Dispatch]:
    node, n = site.node, site.node.n_elements
    views = views_of(site, of, "draw")
    views |= {"y": words_of(site.out)[0], "p": numbers(site.src[0], node.dtype)}
    functions, constants = _BITS + _NARROW[node.dtype] + step_text(of), {"N": n, **_dice(node)}
    return [site.shaders.each(_BY_WORDS, -(-n // 2), views, constants, functions)]


def _adamw_8bit(site: ShaderSite) -> Sequence[Dispatch]:
    kind = site.node.dtype
    views = {"y": words_of(site.out)[0], "p": numbers(site.src[0], kind), "draw": site.src[-1]}
    body = _BITS + _NARROW[kind] + _BY_BLOCKS
    return dispatch_of_blocks(site, body, views, _dice(site.node))


def _dice(node: Tensor) -> dict[str, int]:
    return {"STREAM": node.params["stream"], "SHARE": SHARE, "EIGHTH": EIGHTH}


declare("opt_step_adamw_8bit_half", _adamw_8bit, lacks=_lacks, mixed=(0, 2, 3, 7))
for _name, _of in STEPS.items():
    _mixed = 0, len(_of.sources) + 2  # p, and the result
    declare(f"{_name}_half", partial(_step, _of), lacks=_lacks, mixed=_mixed)
