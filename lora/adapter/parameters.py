"""All trained numbers in one flat float32 buffer; gradients and an optimiser's moments in more.
Tensors may be kept in 16 bits instead, each in memory of its own.

An all-reduce, a norm or an optimiser step is one loop over a buffer, whatever the number of
tensors. Every tensor starts at a multiple of 64 bytes; the gaps stay zero.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from pyggml import heap
from pyggml.backends import Backend
from pyggml.errors import QuantError
from pyggml.graph.arrays import read, write
from pyggml.graph.dtypes import DType
from pyggml.graph.tensor import Shape, Tensor, leaf, window, zeros
from pyggml.models.placement import group_of
from pyggml.quants import dequantize, quantize
from pyggml.runtime import Devices
from pyggml.sizes import round_up

_FLOATS = 16  # of a cache line
_PIECE = 1 << 20  # numbers that are looked at at a time
_BF16_INF = np.uint16(0x7F80)


class Parameters:
    """Leaf tensors by name, over one buffer; where a model's blocks are on several devices, over
    parts of it, one for each run of tensors of a block.

    tensors, gradients        name -> leaf, F32 or one of the halves; gradients, all F32, are
                              accumulators for build_backward
    operands                  name -> what graphs read of a tensor: itself, or its numbers packed as
                              another type. Its gradient goes straight through the rounding, so it
                              is the tensor's. Whoever changes the tensors calls `pack`
    data, gradient, m, v      (n,) float32 buffers; memory is taken when they are first written, and
                              not every optimiser writes both moments. One more, `total`, is for
                              sums of gradients. `data` has no room for halves
    arrays                    name -> array: what is trained, `data` and each tensor of halves
    moments                   name -> array of any type: of optimisers with moments of their own
    own_leaves                (address, bytes) -> leaf over a part of a moment, of optimisers that
                              take steps of one tensor each
    keeps                     (1,) F32 leaf: whether the host's passes add to `gradient`, 1, or
                              write over it, 0, as the first pass over a batch does
    length                    (1,) float32: of the last gradient, if the next one is clipped by it
    buffers                   name of each of them -> F32 leaves, one for each part in their order,
                              of which the tensors are windows
    groups                    parts of the buffers: (first number, length, factor of the learning
                              rate), together all
    constants, constant_data  name -> F32 leaf that is not trained, and their buffer: what a
                              checkpoint must hold besides, as it may not come out the same again
    about                     settings that made them, which a resumed run must share
    metadata                  what their file says of what they learned, such as a chat template; a
                              trainer sets it
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        about: Mapping[str, Any] | None = None,
        rates: Mapping[str, float] | None = None,
        constants: Mapping[str, Shape] | None = None,
        types: Mapping[str, DType] | None = None,
        halves: Mapping[str, DType] | None = None,
        devices: Devices | None = None,
    ) -> None:
        """rates: name -> factor of the learning rate, 1 where it is missing. types: name -> type in
        which graphs read it, F32 where it is missing. halves: name -> F16 or BF16, in which it is
        kept and read, of tensors that `types` has not. devices: that hold a model's blocks, and the
        tensors of these."""
        self.about = dict(about or {})
        self.metadata: Mapping[str, str | None] = {}
        halves = halves or {}
        self._starts, self.groups = _layout(shapes, rates or {})
        in_data, groups = _layout({k: s for k, s in shapes.items() if k not in halves}, rates or {})
        arrays = [_zeros(_end(each)) for each in (groups, *4 * [self.groups])]
        self.data, self.gradient, self.m, self.v, self._total = arrays
        names = ("data", "gradient", "m", "v", "total")
        self.moments, self.own_leaves = dict[str, np.ndarray](), dict[tuple[int, int], Tensor]()
        self.length, self.keeps = np.zeros(1, np.float32), leaf(np.ones(1, np.float32), "keeps")
        by_block = devices is not None and bool(devices.homes) and not halves
        self._firsts = _parts(self._starts, by_block)
        self.buffers = {n: self._leaves(n, a) for n, a in zip(names, arrays, strict=True)}
        self.arrays = {"parameters": self.data}
        self.tensors, self.gradients = dict[str, Tensor](), dict[str, Tensor]()
        for name, shape in shapes.items():
            if name in halves:
                self.tensors[name] = self._half(name, shape, halves[name])
            else:
                self.tensors[name] = self._window("data", in_data[name], shape, name)
            self.gradients[name] = self._window("gradient", self._starts[name], shape, f"d({name})")
        self._blocks = {name: zeros(shapes[name], d, name) for name, d in (types or {}).items()}
        self.operands = self.tensors | self._blocks
        self._set_constants(constants or {})
        if devices is not None:
            self._group(devices)

    def _set_constants(self, shapes: Mapping[str, Shape]) -> None:
        starts, groups = _layout(shapes, {})
        self.constant_data = _zeros(_end(groups))
        whole = leaf(self.constant_data, "constants")
        self.constants = {name: window(whole, starts[name], s, name) for name, s in shapes.items()}

    def _half(self, name: str, shape: Shape, kind: DType) -> Tensor:
        self.arrays[name] = np.zeros(shape, kind.numpy)
        return leaf(self.arrays[name], name, kind)

    def _group(self, devices: Devices) -> None:
        for leaves in zip(self._firsts.values(), *self.buffers.values(), strict=True):
            devices.group(*leaves)
        for name, operand in self._blocks.items():
            devices.group(group_of(name), operand)

    @property
    def n_trained(self) -> int:
        """Numbers that are trained, without the gaps."""
        return sum(t.n_elements for t in self.tensors.values())

    def pack(self, devices: Devices) -> None:
        """Make the operands of other types than F32 anew of the tensors' numbers.

        Raises QuantError, naming the tensor, for numbers that its type does not hold.
        """
        if self._blocks:
            devices.gather(*self.buffers["data"])
        for name, operand in self._blocks.items():
            try:
                blocks = quantize(read(self.tensors[name]), operand.dtype.name)
            except QuantError as error:
                raise QuantError([f"{name}: {error}", ("lr", "may be too high")]) from None
            write(operand, blocks.view(operand.dtype.numpy))

    def rate(self, name: str) -> float:
        """The factor of a tensor's learning rate."""
        first = self._starts[name]
        return next(rate for start, n, rate in self.groups if start <= first < start + n)

    def pieces(self, *names: str) -> Iterator[tuple[float, list[Tensor]]]:
        """All of these buffers in pieces of one factor of the learning rate: it, and a piece of
        each."""
        for i, part in enumerate(zip(*(self.buffers[name] for name in names), strict=True)):
            at = [*self._firsts][i]
            for first, n, rate in self.groups:
                start, end = max(first - at, 0), min(first + n - at, part[0].n_elements)
                if start < end:
                    whole = end - start == part[0].n_elements
                    yield rate, [t if whole else window(t, start, (end - start,)) for t in part]

    def share(self, devices: Devices, backend: Backend) -> float:
        """The share of all numbers that a device holds."""
        if not devices.homes:
            return 1.0
        sizes = [t.n_elements for t in self.buffers["data"] if devices.home(t) is backend]
        return sum(sizes) / max(self.data.size, 1)

    def _leaves(self, name: str, array: np.ndarray) -> tuple[Tensor, ...]:
        firsts = [*self._firsts, array.size]
        return tuple(leaf(array[first:end], name) for first, end in pairwise(firsts))

    def _window(self, buffer: str, first: int, shape: Shape, label: str) -> Tensor:
        firsts = [*self._firsts]
        i = bisect_right(firsts, first) - 1
        return window(self.buffers[buffer][i], first - firsts[i], shape, label)

    def part(self, name: str, array: np.ndarray) -> Tensor:
        """A tensor's part of an array of as many numbers as `gradient`, as a leaf of its own."""
        return self.own_leaf(self.part_of(name, array))

    def own_leaf(self, array: np.ndarray) -> Tensor:
        """The leaf over a part of a moment: one, however often it is asked for."""
        key = array.ctypes.data, array.nbytes
        if key not in self.own_leaves:
            self.own_leaves[key] = leaf(array, "moment")
        return self.own_leaves[key]

    @property
    def trained_leaves(self) -> list[Tensor]:
        """All leaves in which what is trained is."""
        return [*self.buffers["data"], *(t for n, t in self.tensors.items() if n in self.arrays)]

    @property
    def moment_leaves(self) -> list[Tensor]:
        """All leaves in which moments are."""
        return [*self.buffers["m"], *self.buffers["v"], *self.own_leaves.values()]

    def part_of(self, name: str, array: np.ndarray) -> np.ndarray:
        """A tensor's part of such an array, in the tensor's shape: a view."""
        t, first = self.tensors[name], self._starts[name]
        return array[first : first + t.n_elements].reshape(t.shape)

    def numbers(self, name: str) -> np.ndarray:
        """A copy of what is trained of a tensor, float32."""
        t = self.tensors[name]
        return np.asarray(dequantize(read(t), t.dtype.name), np.float32)

    def not_finite(self) -> list[str]:
        """The names of `arrays` that hold what is no finite number."""
        return [name for name, a in self.arrays.items() if not _is_finite(a.reshape(-1))]

    @property
    def has_halves(self) -> bool:
        return len(self.arrays) > 1

    @property
    def trained_bytes(self) -> int:
        """Bytes of what is trained."""
        return sum(a.nbytes for a in self.arrays.values())

    def n_bytes(self, more: int) -> int:
        """Bytes of what is trained and of its constants, and `more`, of gradients and moments."""
        n_blocks = sum(t.n_bytes for t in self._blocks.values())
        return self.trained_bytes + self.constant_data.nbytes + n_blocks + more

    def end(self) -> None:
        """Set gradients and moments to 0 and free their memory: training is over."""
        for a in (self.gradient, self.m, self.v, self._total, *self.moments.values()):
            heap.clear(a)


Group = tuple[int, int, float]


def _parts(starts: Mapping[str, int], by_block: bool) -> dict[int, Hashable]:
    """Where each part of a buffer starts → the block of its tensors; without blocks it is one."""
    firsts: dict[int, Hashable] = {}
    last: Hashable = None
    for name, start in starts.items():
        group = group_of(name) if by_block else None
        if not firsts or group != last:
            firsts[start] = last = group
    return firsts or {0: None}


def _layout(
    shapes: Mapping[str, Shape], rates: Mapping[str, float]
) -> tuple[dict[str, int], tuple[Group, ...]]:
    """Where each tensor starts in a buffer, and the parts of equal rates that lie one after the
    other; one part if there are no tensors."""
    starts: dict[str, int] = {}
    groups: list[Group] = []
    n = 0
    for rate in sorted({rates.get(name, 1.0) for name in shapes} or {1.0}):
        first = n
        for name, shape in shapes.items():
            if rates.get(name, 1.0) == rate:
                starts[name] = n
                n += round_up(prod(shape), _FLOATS)
        groups.append((first, n - first, rate))
    return starts, tuple(groups)


def _end(groups: tuple[Group, ...]) -> int:
    return sum(n for _, n, _ in groups)


def _zeros(n: int) -> np.ndarray:
    raw = np.zeros(n + _FLOATS, np.float32)
    start = -raw.ctypes.data % (4 * _FLOATS) // 4
    return raw[start : start + n]


def _is_finite(a: np.ndarray) -> bool:
    """Of floats, or of bits of BF16."""
    pieces = (a[i : i + _PIECE] for i in range(0, a.size, _PIECE))
    if a.dtype == np.uint16:
        return not any(((piece & _BF16_INF) == _BF16_INF).any() for piece in pieces)
    return all(np.isfinite(piece).all() for piece in pieces)
