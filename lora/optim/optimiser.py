"""The common part of all optimisers: clip, step. A subclass defines the step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.arrays import array, write
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.op import Op
from pyggml.graph.tensor import Tensor, zeros
from pyggml.jit import compile_for
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.lora.optim.whole_gradient import WholeGradient, gather_whole
from pyggml.ops import clip_factor, clip_norm, opt_step_half
from pyggml.ops.arithmetic.dropout import DRAW, draw_words
from pyggml.ops.optim import CLIPPED
from pyggml.runtime import Arenas, Devices, Program, bind, schedule

_LONGEST = 1e19  # its square, 1e38, is a float32
_NOT_OF_DROPOUT = 0x9E3779B97F4A7C15  # makes of a seed another one


class FlatOptimiser(ABC):
    """An optimiser of parameters and their moments; on the CPU unless told otherwise.

    op            takes a step of F32 numbers, in place: of gradient, moments and settings
    moments       the buffers of Parameters that it updates in each step
    n_settings    how many further numbers a step reads
    has_squares   whether a moment is a mean of the gradient's squares
    is_by_tensor  whether a step is one of each tensor, else of each group
    """

    op: ClassVar[Op]
    moments: ClassVar[tuple[str, ...]]
    n_settings: ClassVar[int]
    has_squares: ClassVar[bool] = False
    is_by_tensor: ClassVar[bool] = False

    def __init__(
        self, parameters: Parameters, config: TrainConfig, devices: Devices | None = None
    ) -> None:
        self.config, self.parameters, self._devices = config, parameters, devices or Devices()
        rates = {rate for *_, rate in parameters.groups}
        # On the host alone a step of a whole group reads the gradient as it is, and clips it.
        by_tensor = self.is_by_tensor or parameters.has_halves or config.step_in_backward
        alone = not (by_tensor or self._devices.have_copies)
        self._clips = alone and self.op in CLIPPED
        n = self.n_settings + self._clips
        self._settings = {rate: zeros((n,), F32, "settings") for rate in rates}
        self._factor = 1.0  # of the gradient, in the next step that clips
        self._draw = zeros((DRAW,), I32, "draw")
        self._streams = {name: i for i, name in enumerate(parameters.tensors)}

    @abstractmethod
    def settings(self, lr: float, n: int) -> Sequence[float]:
        """The n_settings numbers of step n, counted from 1."""

    @classmethod
    def state_arrays(cls, parameters: Parameters) -> Mapping[str, np.ndarray]:
        """What steps keep besides the parameters, by name; memory is taken when they are made."""
        return {name: getattr(parameters, name) for name in cls.moments}

    @property
    def work_bytes(self) -> int:
        """Bytes that a step is computed in."""
        return 0

    def step_of(self, name: str, gradient: Tensor) -> Tensor:
        """The node that takes a step of one tensor, whose moments are leaves of their own: of a
        part of a leaf, a graph's checks would count all as changed."""
        moments = [self.parameters.part(name, getattr(self.parameters, m)) for m in self.moments]
        settings = self._settings[self.parameters.rate(name)]
        return self._step(self.op, name, gradient, *moments, settings)

    def _step(self, op: Op, name: str, *sources: Tensor) -> Tensor:
        """The node of one tensor, with gradient, moments and settings; a half is rounded by
        chance."""
        data = self.parameters.tensors[name]
        if data.dtype is F32:
            return op(data, *sources)
        return opt_step_half(op, data, *sources, self._draw, stream=self._streams[name])

    def clip(self) -> float:
        """Have the next step shorten the gradient to `config.clip` if it is longer; returns its
        length. The gradient itself is shortened unless the step reads it as it is."""
        return self.begin_clip()()

    def begin_clip(self) -> Callable[[], float]:
        """Begin to clip; what waits for the length."""
        clip, *_ = self._programs
        if self._whole_gradient is not None:
            self._whole_gradient.collect()
        clip()
        (norm,) = clip.schedule.graph.outputs
        return partial(self._end_clip, clip.begin_read(norm))

    def _end_clip(self, read: Callable[[], np.ndarray]) -> float:
        length, *factor = map(float, read())
        self._factor = factor[0] if factor else 1.0
        is_clipped = self.config.clip and length >= np.float32(self.config.clip)
        if self._whole_gradient is not None and is_clipped:
            self._whole_gradient.spread()
        return length

    def check_length(self, length: float) -> None:
        """Refuse a gradient of this length before it is clipped, if a moment cannot hold squares of
        its elements: that would be infinite from then on, and its parameter stand still.

        Raises PyggmlError.
        """
        clipped = min(length, self.config.clip or length)
        if self.has_squares and clipped > _LONGEST:
            raise PyggmlError(
                [
                    f"the gradient's length is {length:g}, whose square float32 does not hold",
                    ("clip", f"is {self.config.clip:g}, wanted 0 < clip <= {_LONGEST:g}"),
                ]
            )

    def step(self, lr: float, n: int) -> None:
        """Update the parameters with the gradient; n counts the steps from 1."""
        self.begin(lr, n)
        self.update()

    def update(self) -> None:
        """The same, of the step that has begun."""
        _, *updates = self._programs
        for settings in self._settings.values() if self._clips else ():
            array(settings)[-1] = self._factor
        self._factor = 1.0
        for update in updates:
            update()

    def begin(self, lr: float, n: int) -> None:
        """Give all nodes the settings of step n."""
        for rate, settings in self._settings.items():
            write(settings, (*self.settings(rate * lr, n), *[1.0] * self._clips))
        write(self._draw, draw_words(self.config.seed ^ _NOT_OF_DROPOUT, n))

    def compile(self) -> None:
        """Compile the kernel of `step`; nothing is updated."""
        _, *updates = self._programs
        for call in (call for update in updates for call in update.calls):
            compile_for(call.kernel, call.arguments)

    def bind(self) -> None:
        """Take the memory of `clip` and `step`, once."""
        _ = self._programs

    @cached_property
    def _whole_gradient(self) -> WholeGradient | None:
        """The gradient in one piece, if it is in several parts."""
        several = len(self.parameters.buffers["gradient"]) > 1
        return gather_whole(self.parameters, self._devices) if several else None

    @cached_property
    def _programs(self) -> list[Program]:
        """That of `clip`, then those of `step`."""
        (whole, *_), of_norm = self.parameters.buffers["gradient"], self._devices
        if self._whole_gradient is not None:
            whole, of_norm = self._whole_gradient.whole, self._whole_gradient.devices
        clip = clip_factor if self._clips else clip_norm
        norms = [schedule(Graph.of(clip(whole, self.config.clip)), of_norm)]
        schedules = norms + [schedule(g, self._devices) for g in self._graphs()]
        arenas = Arenas(*schedules)
        return [bind(each, arenas=arenas) for each in schedules]

    def _graphs(self) -> Iterator[Graph]:
        """Those of a step: one for each node on the host, else one, which is launched at once."""
        if self._devices.have_copies:
            yield Graph.of(*self._updates())
        else:
            yield from map(Graph.of, self._updates())

    def _updates(self) -> Iterator[Tensor]:
        """One node for each tensor, of halves always, or for each group of each part of the
        buffers."""
        p = self.parameters
        if self.is_by_tensor or p.has_halves:
            yield from (self.step_of(name, gradient) for name, gradient in p.gradients.items())
            return
        for rate, parts in p.pieces("data", "gradient", *self.moments):
            yield (CLIPPED[self.op] if self._clips else self.op)(*parts, self._settings[rate])
