"""How the device computes an op: `ShaderKernel`, and the `ShaderSite` that it is bound to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pyggml.backends.kit import kernels
from pyggml.backends.kit.faults import Faults
from pyggml.backends.webgpu.wgsl.shader import BufferRange, Dispatch, Shaders
from pyggml.graph.dtypes import BF16, F16, F32, I32, DType
from pyggml.graph.tensor import Tensor
from pyggml.quants import QUANTS


@dataclass(frozen=True, slots=True)
class ShaderSite(kernels.NodeSite[BufferRange]):
    """The memory of one node, as a kernel's `bind` gets it. `scratch` is a range of floats.

    Tensors of other types than F32 and I32 are views of bytes; see `BufferRange.of` and `numbers`.
    """

    shaders: Shaders
    faults: Faults  # a kernel notes one by put_fault(0u, number)
    # a small array of the host's, copied to the device
    constant: Callable[[np.ndarray], BufferRange]

    def fault(self, sentence: str) -> tuple[BufferRange, int]:
        """The cell and the number of a fault."""
        cell: BufferRange = self.faults.cell
        return cell, self.faults.number(sentence)

    def each(
        self,
        body: str,
        names: str,
        constants: Mapping[str, int | float] | None = None,
        n: int | None = None,
        functions: str = "",
        **more: BufferRange,
    ) -> list[Dispatch]:
        """`Shaders.each` for the numbers of the result, y, or n others. names: those of the
        sources; more: further views, and others in place of these."""
        views = {"y": self.out, **dict(zip(names.split(), self.src, strict=True)), **more}
        n = self.node.n_elements if n is None else n
        return [self.shaders.each(body, n, views, constants, functions)]


_KINDS = {F32: "f32", I32: "i32", F16: "f16", BF16: "bf16"}


def numbers(view: BufferRange, dtype: DType) -> BufferRange:
    """A tensor of a plain type, read as numbers."""
    return view.of(_KINDS[dtype])


def unread(t: Tensor, *plain: DType) -> str | None:
    """What shaders lack that unpack weights, or read these plain types; None if t is one."""
    is_read = t.dtype in plain or t.dtype.name in QUANTS
    return None if is_read else f"{t.dtype} is unpacked by none of its shaders"


@dataclass(frozen=True, slots=True)
class ShaderKernel(kernels.DeviceKernel[ShaderSite, Sequence[Dispatch], Shaders]):
    """The device's way to compute an op: `bind` returns its dispatches, in their order.

    tiled     positions of sources that may be larger than the limit, and of any type
    mixed     positions of sources, then of the result, whose types `lacks` checks; F32 or I32 else
    """

    tiled: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
