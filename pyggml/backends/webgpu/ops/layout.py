"""Copies: without gaps, of another type, into a range; and fills."""

from collections.abc import Sequence

from pyggml.backends.webgpu.runtime.kernel import ShaderSite, numbers
from pyggml.backends.webgpu.runtime.table import declare
from pyggml.backends.webgpu.wgsl.shader import WORD, BufferRange, Dispatch, per_element, whole
from pyggml.graph.dtypes import BF16, F16, F32, DType
from pyggml.graph.tensor import MAX_AXES, Shape, Tensor, contiguous_strides
from pyggml.sizes import round_up

_COPY = """
    let outer = i / N2N3;
    put_y(FIRST + outer / N1 * Y0 + outer % N1 * Y1 + i % N2N3 / N3 * Y2 + i % N3 * Y3, FROM);
"""
_FROM = "x_at(outer / N1 * X0 + outer % N1 * X1 + i % N2N3 / N3 * X2 + i % N3 * X3)"

# The bits of the half nearest to v, ties to even; WGSL's own conversion may round otherwise.
TO_F16 = """
fn to_f16(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    let sign = (bits >> 16u) & 0x8000u;
    let a = bits & 0x7fffffffu;
    if (a > 0x7f800000u) { return sign | 0x7e00u; }
    if (a >= 0x477ff000u) { return sign | 0x7c00u; }
    if (a < 0x38800000u) {  // subnormal: a multiple of 2^-24, as is the last bit of 0.5 + v
        return sign | (bitcast<u32>(bitcast<f32>(a) + 0.5) - 0x3f000000u);
    }
    return sign | ((a + 0x0fffu + ((a >> 13u) & 1u) - 0x38000000u) >> 13u);
}
"""
_TO_BF16 = """
fn to_bf16(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) { return (bits >> 16u) | 64u; }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}
"""
# A thread writes a word of the result, two numbers of 16 bits; ODD: the first is a word's second.
_HALVES = """
    let w = group * 256u + me;
    if (w * 2u < N + ODD) {
        var word = y_at(w);
        for (var h = 0u; h < 2u; h++) {
            let i = 2u * w + h - ODD;
            if (i < N) {
                let outer = i / N2N3;
                word = (word & (0xffff0000u >> (16u * h))) | (ROUND(FROM) << (16u * h));
            }
        }
        put_y(w, word);
    }
"""


def _steps(t: Tensor, name: str) -> dict[str, int]:
    """Elements from one to the next along each of four axes."""
    steps = (0,) * (MAX_AXES - len(t.shape)) + tuple(s // t.dtype.block_bytes for s in t.strides)
    return {f"{name}{i}": step for i, step in enumerate(steps)}


def _sizes(shape: Shape) -> dict[str, int]:
    n = (1,) * (MAX_AXES - len(shape)) + shape
    total = n[0] * n[1] * n[2] * n[3]
    return {"N": total, "N1": n[1], "N3": max(n[3], 1), "N2N3": max(n[2] * n[3], 1)}


def _into(site: ShaderSite, x: Tensor, view: BufferRange, first: int = 0) -> Dispatch:
    """Copy x into the range of the result that begins at element `first`; both of 32 bits."""
    whole = site.node
    gapless = contiguous_strides(whole.shape, whole.dtype)
    constants = {**_sizes(x.shape), **_steps(x, "X"), "FIRST": first}
    n_before = MAX_AXES - len(whole.shape)
    steps = (0,) * n_before + tuple(s // WORD for s in gapless)
    constants |= {f"Y{i}": step for i, step in enumerate(steps)}
    views = {"y": site.out.of("u32"), "x": view.of("u32")}
    return site.shaders.each(_COPY.replace("FROM", _FROM), x.n_elements, views, constants)


def words_of(halves: BufferRange) -> tuple[BufferRange, int]:
    """The words that hold numbers of 16 bits, to be written; 1 if the first is a word's second."""
    odd = halves.start % WORD // 2
    start = halves.start - 2 * odd
    n_bytes = round_up(halves.end - start, WORD)
    return BufferRange(halves.buffer, start, n_bytes, "u32", True), odd


def _copy_16_bits(site: ShaderSite, x: Tensor, view: BufferRange) -> Dispatch:
    """Copy x as numbers of 16 bits."""
    to = site.node.dtype
    if x.dtype is to:
        rounding, read = "", view.of("u16")
    else:
        rounding, read = "to_f16" if to is F16 else "to_bf16", numbers(view, x.dtype)
    words, odd = words_of(site.out)
    body = _HALVES.replace("ROUND", rounding).replace("FROM", _FROM)
    body = TO_F16 + _TO_BF16 + whole(body)
    constants = {**_sizes(x.shape), **_steps(x, "X"), "ODD": odd}
    n = words.n_bytes // WORD
    return site.shaders.dispatch(body, {"y": words, "x": read}, per_element(n), constants)


def _copy_of(site: ShaderSite) -> Sequence[Dispatch]:
    (x,), (view,), to = site.node.src, site.src, site.node.dtype
    if to in (F16, BF16):
        return [_copy_16_bits(site, x, view)]
    if x.dtype is to:
        return [_into(site, x, view)]
    body, constants = f"let outer = i / N2N3; put_y(i, {_FROM});", _sizes(x.shape)
    return site.each(body, "x", {**constants, **_steps(x, "X")}, x=numbers(view, x.dtype))


def _copy_lacks(node: Tensor) -> str | None:
    (x,) = node.src
    floats: tuple[DType, ...] = (F32, F16, BF16)
    alike = x.dtype is node.dtype and x.dtype.block_bytes == WORD and not x.dtype.quantised
    return (
        None
        if alike or (x.dtype in floats and node.dtype in floats)
        else f"{x.dtype} to {node.dtype}"
    )


def _step_along(node: Tensor, axis: int) -> int:
    """Elements of the result from one to the next along an axis."""
    return contiguous_strides(node.shape, node.dtype)[axis] // WORD


def _concat(site: ShaderSite) -> Sequence[Dispatch]:
    a, b = site.node.src
    axis = site.node.params["axis"]
    second = a.shape[axis] * _step_along(site.node, axis)
    return [_into(site, a, site.src[0]), _into(site, b, site.src[1], second)]


def fill(site: ShaderSite, value: float) -> Dispatch:
    """One value everywhere in the result."""
    n, constants = site.node.n_elements, {"VALUE": value}
    return site.shaders.each("put_y(i, VALUE);", n, {"y": site.out}, constants)


def _set_among_zeros(site: ShaderSite) -> Sequence[Dispatch]:
    (dy,), p = site.node.src, site.node.params
    first = p["start"] * _step_along(site.node, p["axis"])
    return [fill(site, 0.0), _into(site, dy, site.src[0], first)]


def _fill_all(site: ShaderSite) -> Sequence[Dispatch]:
    (value,) = site.node.params.values()
    return [fill(site, float(value))]


for _name in ("cont", "dup", "cpy"):
    declare(_name, _copy_of, lacks=_copy_lacks, mixed=(0, 1))
declare("concat", _concat)
declare("narrow_back", _set_among_zeros)
declare("fill", _fill_all)
