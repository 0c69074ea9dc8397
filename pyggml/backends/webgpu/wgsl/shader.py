"""Shaders: WGSL made of a body, the tensors it names, and constants; and how one is dispatched.

A body is the inside of `main`, or a whole shader. For each tensor `x` that is named there are
`x_at(i)` and, for those that are written, `put_x(i, value)`, with i counted in elements from the
tensor's first: in quads of numbers where the view has them. A tensor of bytes has `x_word(i)` too,
the 32 bits that begin at byte i; those past its end may be anything. `me` is the thread's number in
its workgroup, `group` the workgroup's, from 0.

Tensors of one buffer whose ranges overlap are bound once: a shader may not bind one range twice and
write to it. No more of a buffer is bound than the tensors take, so a buffer may be larger than the
device's limit of a binding. The grids of weight types need no view: whoever names them has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import wgpu
from wgpu.backends import wgpu_native
from wgpu.backends.wgpu_native import _api

from pyggml.backends.webgpu.wgsl.group import ARGUMENTS, FIRST_LINE, with_functions
from pyggml.backends.webgpu.wgsl.weights import GRIDS, grid_words
from pyggml.errors import DeviceError
from pyggml.sizes import round_up

THREADS = 256  # of a workgroup
MOST_GROUPS = 65535  # along an axis
WORD, LINE = 4, 64  # bytes; parts of scratch begin at a line
QUADS = "vec4<f32>"
HALF_QUADS = "halves"
TRUE_HALF_QUADS = "vec4<f16>"
_QUAD_BYTES = {QUADS: 16, HALF_QUADS: 8, TRUE_HALF_QUADS: 8, "f32": 16, "f16": 8}  # of four
_AS_WORDS = {QUADS: "vec4<u32>", HALF_QUADS: "vec2<u32>", TRUE_HALF_QUADS: "vec4<f16>"}


_NAMED_GRIDS = re.compile(rf"\b{GRIDS}(\w+)_at\b")


@dataclass(frozen=True, slots=True)
class BufferRange:
    """A range of a buffer on the device.

    kind    how elements are read: "f32", "i32" or "u32"; QUADS, four float32 at once; HALF_QUADS,
            four float16 as float32; TRUE_HALF_QUADS, four float16 as they are, which only devices
            with float16 read and none writes; "f16" or "bf16", which give an f32; "u16" or "u8",
            which give a u32. Only those of 32 bits or more can be written.
    """

    buffer: Any
    start: int  # bytes
    n_bytes: int
    kind: str = "f32"
    is_written: bool = False

    @property
    def end(self) -> int:
        return self.start + self.n_bytes

    @property
    def has_quads(self) -> bool:
        """Whether its numbers can be taken four at a time."""
        size = _QUAD_BYTES.get(self.kind, 0)
        return bool(size) and self.start % size == 0 and self.n_bytes % size == 0

    @property
    def in_quads(self) -> BufferRange:
        """The same numbers, four at a time."""
        return self.of(HALF_QUADS if self.kind == "f16" else QUADS)

    def part(self, first: int, n: int) -> BufferRange:
        """n elements from element `first` on."""
        start, n_bytes = self.start + self.size * first, self.size * n
        return replace(self, start=start, n_bytes=n_bytes)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        if self.kind in _AS_WORDS:
            return _QUAD_BYTES[self.kind]
        return WORD // _PER_WORD.get(self.kind, 1)

    def of(self, kind: str) -> BufferRange:
        """The same bytes, read as another kind of elements."""
        return replace(self, kind=kind)

    def for_writing(self) -> BufferRange:
        return replace(self, is_written=True)


@dataclass(slots=True)
class _Window:
    """A bound range of a buffer, and the tensors in it."""

    buffer: Any
    start: int
    end: int
    views: dict[str, BufferRange]
    is_written: bool

    @property
    def element(self) -> str:
        """Its WGSL type: a vector only where all in it are such quads."""
        kinds = {v.kind for v in self.views.values()}
        kind = next(iter(kinds))
        if len(kinds) > 1 or kind not in _AS_WORDS or self.start % _QUAD_BYTES[kind]:
            return "u32"
        return _AS_WORDS[kind] if all(v.has_quads for v in self.views.values()) else "u32"

    def offset(self, name: str) -> int:
        """Elements of the array before the tensor's first; bytes before its first byte."""
        view = self.views[name]
        size = WORD if view.kind in _AS_WORDS and self.element == "u32" else view.size
        return (view.start - self.start) // size


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A shader with its bindings and its number of workgroups."""

    pipeline: Any
    bindings: Any
    groups: tuple[int, int, int]


class Shaders:
    """Makes dispatches on a device; equal shaders are compiled once.

    limit     the most bytes of one binding
    in_f16    whether weights are unpacked to float16 rather than float32
    has_f16   whether shaders compute in float16
    """

    def __init__(self, device: Any, limit: int, in_f16: bool = False) -> None:
        self._device, self.limit, self.in_f16 = device, limit, in_f16
        self._has_subgroups, self.has_f16 = (
            f in device.features for f in ("subgroup", "shader-f16")
        )
        self._aligned = int(device.limits["min-storage-buffer-offset-alignment"])
        self._compiled, self._grids = cache(self._compile), cache(self._make_grids)

    def dispatch(
        self,
        body: str,
        views: Mapping[str, BufferRange],
        groups: int | tuple[int, int, int],
        constants: Mapping[str, int | float] | None = None,
    ) -> Dispatch:
        """`groups` workgroups, or as many along each of three axes, which `body` reads as `at`.

        constants: numbers that the body names. They are no part of the shader, so that those of
        other shapes are not compiled anew.
        """
        views = {**views, **{GRIDS + n: self._grids(n) for n in _NAMED_GRIDS.findall(body)}}
        windows = self._windows({n: v for n, v in views.items() if v.n_bytes})
        window_of = {name: i for i, w in enumerate(windows) for name in w.views}
        words = [_bits(value) for value in (constants or {}).values()]
        words += [windows[window_of[n]].offset(n) if n in window_of else 0 for n in views]
        words += [0] * (-len(words) % 4)
        body = body if "fn main" in body else whole(body)
        body = with_functions(body, self._has_subgroups)
        accessors = []
        for i, (name, view) in enumerate(views.items()):
            b, offset = window_of.get(name), _word(len(constants or {}) + i)
            element = "u32" if b is None else windows[b].element
            accessors.append(_accessors(name, view, offset, b, element))
        text = "\n".join(
            [
                *["enable f16;"] * ("<f16>" in body),
                _bindings(windows, len(words) // 4),
                *accessors,
                _with_words(body, constants or {}),
            ]
        )
        pipeline = self._compiled(text)
        return Dispatch(pipeline, self._bindings(pipeline, windows, words), _grid(groups))

    def each(
        self,
        body: str,
        n: int,
        views: Mapping[str, BufferRange],
        constants: Mapping[str, int | float] | None = None,
        functions: str = "",
    ) -> Dispatch:
        """The dispatch of a body for each i below n, a thread for each; functions: what it calls
        besides."""
        text = functions + whole(f"let i = group * 256u + me;\nif (i < COUNT) {{\n{body}\n}}")
        return self.dispatch(text, views, per_element(n), {**(constants or {}), "COUNT": n})

    def _make_grids(self, name: str) -> BufferRange:
        """The grids of a weight type, on the device once."""
        words = grid_words(name)
        usage = wgpu.BufferUsage.STORAGE
        buffer = self._device.create_buffer_with_data(data=words, usage=usage)
        return BufferRange(buffer, 0, words.nbytes, "u32")

    def _windows(self, views: Mapping[str, BufferRange]) -> list[_Window]:
        """The ranges to bind, those that overlap joined."""
        windows: list[_Window] = []
        buffers = list(dict.fromkeys(id(v.buffer) for v in views.values()))
        by_place = sorted(views.items(), key=lambda i: (buffers.index(id(i[1].buffer)), i[1].start))
        for name, v in by_place:
            start, end = v.start // self._aligned * self._aligned, round_up(v.end, WORD)
            last = windows[-1] if windows else None
            if last is not None and last.buffer is v.buffer and start < last.end:
                last.end, last.is_written = max(last.end, end), last.is_written or v.is_written
                last.views[name] = v
            else:
                windows.append(_Window(v.buffer, start, end, {name: v}, v.is_written))
        changed = {id(w.buffer) for w in windows if w.is_written}
        for window in windows:
            window.is_written = id(window.buffer) in changed  # a buffer has one use in a dispatch
            n = window.end - window.start
            if n > self.limit:
                raise DeviceError(
                    f"webgpu: {', '.join(window.views)} take {n:,} bytes of one buffer, wanted at "
                    f"most {self.limit:,}, the device's limit of a binding"
                )
        return windows

    def _bindings(self, pipeline: Any, windows: Sequence[_Window], words: Sequence[int]) -> Any:
        uniform = self._device.create_buffer_with_data(
            data=np.array(words, np.uint32), usage=wgpu.BufferUsage.UNIFORM
        )
        ranges = [(uniform, 0, uniform.size)]
        ranges += [(w.buffer, w.start, w.end - w.start) for w in windows]
        entries = [
            {"binding": i, "resource": {"buffer": buffer, "offset": start, "size": size}}
            for i, (buffer, start, size) in enumerate(ranges)
        ]
        layout = pipeline.get_bind_group_layout(0)
        return self._device.create_bind_group(layout=layout, entries=entries)

    def _compile(self, text: str) -> Any:
        return self._device.create_compute_pipeline(
            layout="auto", compute={"module": _module(self._device, text), "entry_point": "main"}
        )


def _module(device: Any, text: str) -> Any:
    """A shader whose bounds are checked and whose loops are not: wgpu would count their turns, lest
    they never end, which takes a fifth of a product's time. All loops here end."""
    create = getattr(_api.libf, "wgpuDeviceCreateShaderModuleTrusted", None)
    if create is None:  # an older wgpu
        return device.create_shader_module(code=text)
    ffi, code = wgpu_native.ffi, text.encode()
    source, data = ffi.new("WGPUShaderSourceWGSL *"), ffi.new("char[]", code)
    source.chain.sType = wgpu_native.lib.WGPUSType_ShaderSourceWGSL
    source.code.data, source.code.length = data, len(code)
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", source)
    checks = wgpu_native.lib.WGPUShaderRuntimeChecks_BoundsChecks
    return _api.GPUShaderModule("", create(device._internal, descriptor, checks), device)


_MAIN = f"""
@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) me: u32,
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,{ARGUMENTS}
) {{
    {FIRST_LINE}
    let group = at.x + at.y * groups.x + P[0].x * 0u;
BODY
}}
"""


def whole(body: str) -> str:
    """The shader with this inside of `main`, which may call `summed` and `highest` (group.py)."""
    return _MAIN.replace("BODY", body)


def _bindings(windows: Sequence[_Window], n_vectors: int) -> str:
    lines = [f"@group(0) @binding(0) var<uniform> P: array<vec4<u32>, {n_vectors}>;"]
    for i, window in enumerate(windows):
        access = "read_write" if window.is_written else "read"
        kind = f"var<storage, {access}> b{i}: array<{window.element}>"
        lines.append(f"@group(0) @binding({i + 1}) {kind};")
    return "\n".join(lines)


def _word(i: int) -> str:
    """Word i of the uniform that every shader has: its constants, then where its tensors begin."""
    return f"P[{i // 4}].{'xyzw'[i % 4]}"


_PER_WORD = {"f16": 2, "bf16": 2, "u16": 2, "u8": 4}
_READ_AS = {HALF_QUADS: QUADS, "f16": "f32", "bf16": "f32", "u16": "u32", "u8": "u32"}
_OF_BITS = {
    "f16": "unpack2x16float({} & 65535u).x",
    "bf16": "bitcast<f32>({} << 16u)",
    "u16": "{} & 65535u",
    "u8": "{} & 255u",
}
_WORD_OF_BYTES = """
fn {name}_word(i: u32) -> u32 {{
    let at = {offset} + i;
    let shift = 8u * (at & 3u);
    return ({b}[at >> 2u] >> shift) | (({b}[(at >> 2u) + 1u] << 1u) << (31u - shift));
}}
"""


def _accessors(name: str, view: BufferRange, offset: str, binding: int | None, element: str) -> str:
    """The functions that read a tensor's elements, and write them if it is written.

    element: the WGSL type of the elements of its binding
    """
    kind, at = _READ_AS.get(view.kind, view.kind), f"({offset} + i)"
    if binding is None:  # an empty tensor, or none
        return (
            f"fn {name}_at(i: u32) -> {kind} {{ return {kind}(0); }}\n"
            f"fn put_{name}(i: u32, v: {kind}) {{}}"
        )
    b, word = f"b{binding}", f"b{binding}[{offset} + i]"
    if view.kind in _PER_WORD:
        n = _PER_WORD[view.kind]
        bits = f"({b}[{at} / {n}u] >> ({32 // n}u * ({at} % {n}u)))"
        of_bits = _OF_BITS[view.kind].format(bits)
        more = _WORD_OF_BYTES.format(name=name, offset=offset, b=b) if n == WORD else ""
        return f"fn {name}_at(i: u32) -> {kind} {{ return {of_bits}; }}{more}"
    read, put = f"bitcast<{kind}>({word})", f"{word} = bitcast<{element}>(v);"
    if view.kind in _AS_WORDS:
        n = _QUAD_BYTES[view.kind] // WORD
        words = [f"{b}[{offset} + {n}u * i + {c}u]" for c in range(n)]
        if element != "u32":
            words = [f"{word}[{c}]" for c in range(n)]
        read, puts = _quad_words(view.kind, words)
        if view.kind == TRUE_HALF_QUADS:
            read = word if element == TRUE_HALF_QUADS else f"{TRUE_HALF_QUADS}({read})"
        put = " ".join(f"{word} = {value};" for word, value in zip(words, puts, strict=True))
    lines = [f"fn {name}_at(i: u32) -> {kind} {{ return {read}; }}"]
    if view.is_written:
        lines.append(f"fn put_{name}(i: u32, v: {kind}) {{ {put} }}")
    return "\n".join(lines)


def _quad_words(kind: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Four numbers read from words, and what each word gets of the four of `v`."""
    if kind == QUADS:
        puts = [f"bitcast<u32>(v[{c}])" for c in range(4)]
        return f"bitcast<vec4<f32>>(vec4<u32>({', '.join(words)}))", puts
    finite = "clamp(v, vec4(-65504.0), vec4(65504.0))"
    puts = [f"pack2x16float({finite}.{pair})" for pair in ("xy", "zw")]
    return f"vec4({', '.join(f'unpack2x16float({word})' for word in words)})", puts


def _with_words(body: str, constants: Mapping[str, int | float]) -> str:
    """The body with each constant's name replaced by the word of the uniform that holds it."""
    words = {}
    for i, (name, value) in enumerate(constants.items()):
        words[name] = _word(i)
        if isinstance(value, bool):
            words[name] = f"({_word(i)} != 0u)"
        elif isinstance(value, float):
            words[name] = f"bitcast<f32>({_word(i)})"
    if not words:
        return body
    return re.sub(rf"\b({'|'.join(words)})\b", lambda windows: words[windows[0]], body)


def _bits(value: int | float) -> int:
    """A constant as a word: floats as float32."""
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return int(value) & 0xFFFFFFFF


def _grid(groups: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """Workgroups along three axes; of one number, at least so many along two."""
    if not isinstance(groups, int):
        return groups
    if groups <= MOST_GROUPS:
        return max(groups, 1), 1, 1
    return MOST_GROUPS, -(-groups // MOST_GROUPS), 1


def per_element(n: int) -> int:
    """Workgroups of n elements."""
    return -(-n // THREADS)
