"""Shaders: WGSL made of a body, the tensors it names, and constants; and how one is dispatched.

A body is the inside of `main`, or a whole shader. For each tensor `x` that is named there are
`x_at(i)` and, for those that are written, `put_x(i, value)`, with i counted in elements from the
tensor's first. `me` is the thread's number in its workgroup, `group` the workgroup's, from 0.

Tensors of one buffer whose ranges overlap are bound once: a shader may not bind one range twice and
write to it. No more of a buffer is bound than the tensors take, so a buffer may be larger than the
device's limit of a binding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import wgpu

from pyggml.errors import DeviceError
from pyggml.sizes import round_up

THREADS = 256  # of a workgroup
MOST_GROUPS = 65535  # along an axis
WORD = 4  # bytes
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class View:
    """A range of a buffer on the device. kind: "f32", "i32" or "u8", which is read as `u32`."""

    buffer: Any
    start: int  # bytes
    n_bytes: int
    kind: str = "f32"
    is_written: bool = False

    @property
    def end(self) -> int:
        return self.start + self.n_bytes

    def part(self, first: int, n: int) -> View:
        """n elements from element `first` on."""
        size = 1 if self.kind == "u8" else WORD
        return View(self.buffer, self.start + size * first, size * n, self.kind, self.is_written)

    def written(self) -> View:
        return View(self.buffer, self.start, self.n_bytes, self.kind, True)


@dataclass(slots=True)
class _Window:
    """A bound range of a buffer, and the tensors in it."""

    buffer: Any
    start: int
    end: int
    names: list[str]
    is_written: bool


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A shader with its bindings and its number of workgroups."""

    pipeline: Any
    bindings: Any
    groups: tuple[int, int, int]


class Shaders:
    """Makes dispatches on a device; equal shaders are compiled once.

    limit    the most bytes of one binding
    """

    def __init__(self, device: Any, limit: int) -> None:
        self._device, self.limit = device, limit
        self._aligned = int(device.limits["min-storage-buffer-offset-alignment"])
        self._compiled = cache(self._compile)

    def dispatch(
        self,
        body: str,
        views: Mapping[str, View],
        groups: int | tuple[int, int, int],
        constants: Mapping[str, int | float] | None = None,
        threads: int = THREADS,
    ) -> Dispatch:
        """`groups` workgroups, or as many along each of three axes, which `body` reads as `at`."""
        windows = self._windows({n: v for n, v in views.items() if v.n_bytes})
        place = {name: i for i, w in enumerate(windows) for name in w.names}
        offsets = [0] * round_up(len(views) or 1, 4)
        for slot, (name, view) in enumerate(views.items()):
            if name in place:
                size = 1 if view.kind == "u8" else WORD
                offsets[slot] = (view.start - windows[place[name]].start) // size
        text = "\n".join(
            [
                _bound(windows, len(offsets) // 4),
                *(
                    _accessors(n, v, slot, place.get(n))
                    for slot, (n, v) in enumerate(views.items())
                ),
                *(_constant(name, value) for name, value in (constants or {}).items()),
                _MAIN.format(body=body, threads=threads) if "fn main" not in body else body,
            ]
        )
        pipeline = self._compiled(text)
        return Dispatch(pipeline, self._bindings(pipeline, windows, offsets), _grid(groups))

    def _windows(self, views: Mapping[str, View]) -> list[_Window]:
        """The ranges to bind, those that overlap joined."""
        found: list[_Window] = []
        for name, v in sorted(views.items(), key=lambda item: (id(item[1].buffer), item[1].start)):
            start, end = v.start // self._aligned * self._aligned, round_up(v.end, WORD)
            last = found[-1] if found else None
            if last is not None and last.buffer is v.buffer and start < last.end:
                last.end, last.is_written = max(last.end, end), last.is_written or v.is_written
                last.names.append(name)
            else:
                found.append(_Window(v.buffer, start, end, [name], v.is_written))
        changed = {id(w.buffer) for w in found if w.is_written}
        for window in found:
            window.is_written = id(window.buffer) in changed  # a buffer has one use in a dispatch
            n = window.end - window.start
            if n > self.limit:
                raise DeviceError(
                    f"webgpu: {', '.join(window.names)} take {n:,} bytes of one buffer, wanted at "
                    f"most {self.limit:,}, the device's limit of a binding"
                )
        return found

    def _bindings(self, pipeline: Any, windows: Sequence[_Window], offsets: Sequence[int]) -> Any:
        uniform = self._device.create_buffer_with_data(
            data=np.array(offsets, np.uint32), usage=wgpu.BufferUsage.UNIFORM
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
        module = self._device.create_shader_module(code=text)
        return self._device.create_compute_pipeline(
            layout="auto", compute={"module": module, "entry_point": "main"}
        )


_MAIN = """
@compute @workgroup_size({threads})
fn main(
    @builtin(local_invocation_index) me: u32,
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {{
    let group = at.x + at.y * groups.x + P[0].x * 0u;
{body}
}}
"""


def _bound(windows: Sequence[_Window], n_vectors: int) -> str:
    lines = [f"@group(0) @binding(0) var<uniform> P: array<vec4<u32>, {n_vectors}>;"]
    for i, window in enumerate(windows):
        access = "read_write" if window.is_written else "read"
        lines.append(f"@group(0) @binding({i + 1}) var<storage, {access}> b{i}: array<u32>;")
    return "\n".join(lines)


def _accessors(name: str, view: View, slot: int, binding: int | None) -> str:
    """The functions that read a tensor's elements, and write them if it is written."""
    offset = f"P[{slot // 4}].{'xyzw'[slot % 4]}"
    if binding is None:  # an empty tensor, or none
        return f"fn {name}_at(i: u32) -> {view.kind} {{ return {view.kind}(0); }}"
    word = f"b{binding}[{offset} + i]"
    if view.kind == "u8":
        read = f"(b{binding}[({offset} + i) >> 2u] >> (8u * (({offset} + i) & 3u))) & 255u"
        return f"fn {name}_at(i: u32) -> u32 {{ return {read}; }}"
    lines = [f"fn {name}_at(i: u32) -> {view.kind} {{ return bitcast<{view.kind}>({word}); }}"]
    if view.is_written:
        lines.append(f"fn put_{name}(i: u32, v: {view.kind}) {{ {word} = bitcast<u32>(v); }}")
    return "\n".join(lines)


def _constant(name: str, value: int | float) -> str:
    if isinstance(value, bool):
        return f"const {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        return f"const {name} = {value}u;"
    return f"const {name} = {number(value)};"


def number(value: float) -> str:
    """A float32 as WGSL writes it, exactly."""
    if abs(value) > _LARGEST:
        value = math.copysign(_LARGEST, value)  # WGSL has no infinity
    return f"f32({float(np.float32(value)).hex()})"


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
