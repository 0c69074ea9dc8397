"""A GPU through WebGPU as a backend: storage buffers, and dispatches that are encoded together."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import wgpu
from wgpu.backends import wgpu_native

from pyggml.backends.base import Backend
from pyggml.backends.kit.faults import Faults
from pyggml.backends.kit.places import BufferPlace, host_view, span
from pyggml.backends.webgpu.rewrites import rewritten
from pyggml.backends.webgpu.runtime.kernel import ShaderKernel, ShaderSite
from pyggml.backends.webgpu.runtime.table import kernels
from pyggml.backends.webgpu.wgsl.shader import WORD, BufferRange, Dispatch, Shaders
from pyggml.errors import DeviceError, DeviceLostError, PyggmlError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.tensor import Tensor
from pyggml.sizes import round_up

_LINE = 64  # bytes
MOST_BINDINGS = 12  # of an op's tensors: the gradient of attention with a mask
_AT_ONCE = 256  # dispatches
_KINDS = {F32: "f32", I32: "i32"}
_USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
_STAGING = wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ


def name_of(adapter: Any) -> str:
    """The name of an adapter, and what drives it."""
    return f"{adapter.info['device']} through {adapter.info['backend_type']}"


class WebGPUBackend(Backend):
    """One adapter of this machine; all arithmetic is float32.

    limit      the most bytes of one binding, if less than the device's
    features   optional features to use; None: those of FEATURES that the adapter has
    compute    "f16": weights are rounded to float16 where they are unpacked before a product

    Raises DeviceError, which names the adapter and what it lacks, if its limits are too low.
    """

    name = "webgpu"

    def __init__(
        self,
        adapter: Any,
        limit: int | None = None,
        features: Sequence[str] | None = None,
        compute: Literal["f32", "f16"] = "f32",
    ) -> None:
        limits = {name: int(adapter.limits[name]) for name in _LIMITS}
        low = [
            f"{name} is {limits[name]:,}, wanted {least:,}"
            for name, least in _LIMITS.items()
            if limits[name] < least
        ]
        if low:
            raise DeviceError(f"webgpu: {adapter.info['device']} cannot be used: {'; '.join(low)}")
        self._adapter_name = name_of(adapter)
        if features is None:
            features = [name for name in FEATURES if name in adapter.features]
        with self._working():
            self.device = adapter.request_device_sync(
                required_limits=limits, required_features=[*features]
            )
        most = int(limits["max-storage-buffer-binding-size"])
        self.limit, self._most_bytes = min(limit or most, most), int(limits["max-buffer-size"])
        self.shaders, self._kernels = Shaders(self.device, self.limit, compute == "f16"), kernels()
        self._faults = Faults(self._constant(np.zeros(1, np.int32)).for_writing())

    @property
    def about(self) -> str:
        return f"{self._adapter_name}, {'f16' if self.shaders.in_f16 else 'f32'}"

    def refusal(self, node: Tensor) -> str | None:
        assert node.op is not None
        kernel = self._kernels.get(node.op.name)
        if kernel is None:
            return "no kernel is declared"
        for i, t in enumerate((*node.src, node, *node.saved)):
            if t.n_bytes > self.limit and i not in kernel.tiled:
                return f"{t!r} takes {t.n_bytes:,} bytes, a binding at most {self.limit:,}"
            if t.dtype not in _KINDS and i not in (*kernel.tiled, *kernel.mixed):
                return f"{t.dtype} has no kernel here"
        return kernel.lacks(node)

    def rewritten(self, graph: Graph) -> Graph:
        """By the passes of pyggml.backends.webgpu.rewrites."""
        return rewritten(graph)

    # -- memory -----------------------------------------------------------------------------------

    def alloc(self, n_bytes: int) -> Any:
        """A storage buffer."""
        size = round_up(max(n_bytes, _LINE), _LINE)
        if size > self._most_bytes:
            raise DeviceError(
                f"{self.name}: a buffer of {size:,} bytes is wanted, the device's largest has "
                f"{self._most_bytes:,}"
            )
        with self._working(size):
            return self.device.create_buffer(size=size, usage=_USAGE)

    def attach(self, tensor: Tensor, arena: Any, offset: int) -> None:
        tensor.data = BufferPlace(arena, offset)

    def read(self, tensor: Tensor) -> np.ndarray:
        if not tensor.n_elements:
            return np.empty(tensor.shape, tensor.dtype.numpy)
        return np.array(host_view(tensor, self._bytes(tensor)), order="C")

    def write(self, tensor: Tensor, values: np.ndarray) -> None:
        if not tensor.n_elements:
            return
        place, start = self._place(tensor)
        if tensor.is_contiguous and start % WORD == 0 and tensor.n_bytes % WORD == 0:
            spanned = np.empty(tensor.n_bytes, np.uint8)
            first = 0
        else:  # what lies in the gaps, or in the same words, stays
            first = start % WORD
            spanned = self._range(place.buffer, start - first, round_up(first + span(tensor), WORD))
        host_view(tensor, spanned[first:])[...] = values
        with self._working():
            self.device.queue.write_buffer(place.buffer, start - first, spanned)

    def _place(self, t: Tensor) -> tuple[BufferPlace, int]:
        """The memory of a tensor's root, and where the tensor begins in its buffer."""
        place = t.root.data
        assert isinstance(place, BufferPlace), f"{t!r} has no memory on {self.name}"
        return place, place.offset + t.offset

    def _bytes(self, t: Tensor) -> np.ndarray:
        """The bytes from the tensor's first element to its last."""
        place, start = self._place(t)
        first = start % WORD
        n = round_up(first + span(t), WORD)
        return self._range(place.buffer, start - first, n)[first : first + span(t)]

    def _range(self, buffer: Any, start: int, n: int) -> np.ndarray:
        """n bytes of a buffer. Raises PyggmlError if a kernel has found a fault in its data."""
        cell = self._faults.cell
        with self._working(n):
            staging = self.device.create_buffer(size=n + WORD, usage=_STAGING)
            encoder = self.device.create_command_encoder()
            encoder.copy_buffer_to_buffer(buffer, start, staging, 0, n)
            encoder.copy_buffer_to_buffer(cell.buffer, 0, staging, n, WORD)
            self.device.queue.submit([encoder.finish()])
            staging.map_sync("READ")
            data = np.array(np.frombuffer(staging.read_mapped(), np.uint8))
            staging.destroy()
        if fault := int(data[n:].view(np.int32)[0]):
            self.device.queue.write_buffer(cell.buffer, 0, np.zeros(1, np.int32))
            raise PyggmlError(self._faults.sentence(fault))
        return data[:n]

    def _view(self, t: Tensor) -> BufferRange:
        place, start = self._place(t)
        return BufferRange(place.buffer, start, span(t), _KINDS.get(t.dtype, "u8"))

    # -- calls ------------------------------------------------------------------------------------

    def bind(
        self,
        node: Tensor,
        arena: Any,
        scratch: int | None,
        shared: Tensor | None = None,
        in_place: bool = False,
    ) -> Call:
        memory = BufferRange(arena, scratch or 0, self.scratch(node), "f32", True)
        site = ShaderSite(
            node,
            self._view(node).for_writing(),
            tuple(self._view(s) for s in node.src),
            tuple(self._view(s).for_writing() for s in node.saved),
            memory,
            in_place,
            self.shaders,
            self._faults,
            self._constant,
        )
        with self._working():
            return Call(self._run, tuple(self._kernel(node).bind(site)))

    def scratch(self, node: Tensor) -> int:
        return self._kernel(node).scratch(node, self.shaders)

    def join(self, calls: Sequence[Call]) -> Sequence[Call]:
        """One submission of all."""
        every = tuple(d for call in calls for d in call.arguments[0])
        return [Call(self._run, every)] if every else []

    def _run(self, dispatches: Sequence[Dispatch]) -> None:
        """Submit some at a time: the device computes these while the host encodes the next."""
        with self._working():
            for first in range(0, len(dispatches), _AT_ONCE):
                encoder = self.device.create_command_encoder()
                working = encoder.begin_compute_pass()
                _encode(working._internal, dispatches[first : first + _AT_ONCE])
                working.end()
                self.device.queue.submit([encoder.finish()])

    def _constant(self, values: np.ndarray) -> BufferRange:
        """A copy of a small array on the device."""
        data = np.ascontiguousarray(values)
        with self._working(data.nbytes):
            buffer = self.device.create_buffer_with_data(data=data, usage=_USAGE)
        return BufferRange(buffer, 0, data.nbytes, "f32" if data.dtype == np.float32 else "i32")

    def _kernel(self, node: Tensor) -> ShaderKernel:
        assert node.op is not None
        return self._kernels[node.op.name]

    @contextmanager
    def _working(self, n_bytes: int = 0) -> Iterator[None]:
        """What the device refuses becomes a DeviceError. n_bytes: what is asked of its memory."""
        try:
            yield
        except wgpu.GPUOutOfMemoryError as error:
            demand = f": {n_bytes:,} bytes are wanted" if n_bytes else ""
            raise DeviceError(f"{self.name} is out of memory{demand}") from error
        except (wgpu.GPUError, RuntimeError) as error:
            said = _message_of(error)
            if "lost" in said:
                raise DeviceLostError(f"{self.name} has failed: {said}") from error
            raise DeviceError(f"{self.name} has failed: {said}") from error


def _encode(working: Any, dispatches: Sequence[Dispatch]) -> None:
    """Put dispatches into a pass, by the library's own functions: the methods of wgpu look for an
    error after each call, which takes eight of ten microseconds; what is wrong with a pass is said
    when its encoder is finished, too."""
    pipeline, lib, none = None, wgpu_native.lib, wgpu_native.ffi.NULL
    for each in dispatches:
        if each.pipeline is not pipeline:
            pipeline = each.pipeline
            lib.wgpuComputePassEncoderSetPipeline(working, pipeline._internal)
        lib.wgpuComputePassEncoderSetBindGroup(working, 0, each.bindings._internal, 0, none)
        lib.wgpuComputePassEncoderDispatchWorkgroups(working, *each.groups)


def _message_of(error: Exception) -> str:
    """What wgpu says, without the names of its functions and the drawing of a shader's line."""
    said = " ".join(str(error).split()).partition(" ┌─")[0]
    return re.sub(r"^Validation Error Caused by: (In \w+ )?", "", said)[:300]


FEATURES = ("subgroup", "shader-f16")

# What a device is asked for, and the least that the kernels need: a binding for each tensor of an
# op, and what WebGPU promises everywhere.
_LIMITS = {
    "max-storage-buffer-binding-size": 1 << 27,
    "max-buffer-size": 1 << 28,
    "max-storage-buffers-per-shader-stage": MOST_BINDINGS,
    "max-compute-workgroup-storage-size": 1 << 14,
    "max-compute-invocations-per-workgroup": 256,
    "min-storage-buffer-offset-alignment": 0,
}
