"""The common part of all optimisers: clip, step. A subclass defines the step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pyggml.errors import PyggmlError
from pyggml.graph import Graph
from pyggml.graph.arrays import write
from pyggml.graph.dtypes import F32
from pyggml.graph.tensor import Tensor, window, zeros
from pyggml.jit import compile_for
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.config import TrainConfig
from pyggml.ops import clip_norm
from pyggml.runtime import Arenas, Devices, bind, schedule

_LONGEST = 1e19  # its square, 1e38, is a float32


class FlatOptimiser(ABC):
    """An optimiser bound to parameters and their moments; on the CPU unless told otherwise.

    moments       the buffers of Parameters that it updates in each step
    n_settings    how many further numbers a step reads
    has_squares   whether a moment is a mean of the gradient's squares
    """

    moments: ClassVar[tuple[str, ...]]
    n_settings: ClassVar[int]
    has_squares: ClassVar[bool] = False

    def __init__(
        self, parameters: Parameters, config: TrainConfig, devices: Devices | None = None
    ) -> None:
        self.config = config
        gradient = parameters.buffers["gradient"]
        self._norm = clip_norm(gradient, config.clip)
        self._rates = [rate for *_, rate in parameters.groups]
        self._settings = [zeros((self.n_settings,), F32, "settings") for _ in parameters.groups]
        updates = [
            self.update(*self._part(parameters, first, n), settings)
            for (first, n, _), settings in zip(parameters.groups, self._settings, strict=True)
        ]
        devices = devices or Devices()
        schedules = [schedule(Graph.of(out), devices) for out in (self._norm, *updates)]
        arenas = Arenas(*schedules)
        self._clip, *self._updates = (bind(each, arenas=arenas) for each in schedules)

    @abstractmethod
    def update(self, data: Tensor, gradient: Tensor, *moments_and_settings: Tensor) -> Tensor:
        """The node that takes one step, in place."""

    @abstractmethod
    def settings(self, lr: float, n: int) -> Sequence[float]:
        """The n_settings numbers of step n, counted from 1."""

    def clip(self) -> float:
        """Shorten the gradient to `config.clip` if it is longer; returns its length before."""
        self._clip()
        return float(self._clip.read(self._norm)[0])

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
        for rate, settings, update in zip(self._rates, self._settings, self._updates, strict=True):
            write(settings, self.settings(rate * lr, n))
            update()

    def compile(self) -> None:
        """Compile the kernel of `step`; nothing is updated."""
        for call in (call for update in self._updates for call in update.calls):
            compile_for(call.kernel, call.arguments)

    def _part(self, p: Parameters, first: int, n: int) -> list[Tensor]:
        """One group's parameters, gradient and moments; the whole buffers if there is one group."""
        buffers = [p.buffers[name] for name in ("data", "gradient", *self.moments)]
        return buffers if len(p.groups) == 1 else [window(b, first, (n,)) for b in buffers]
