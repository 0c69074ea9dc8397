"""The parameters of the step that validated best, kept beside those of the last one."""

import numpy as np

from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.trainer.reports import History
from pyggml.runtime import Devices

_PIECE = 1 << 20  # numbers that are copied at a time


class BestParameters:
    """A copy of some parameters, made whenever none validated better; nothing without `keeps`.

    is_taken   whether the parameters are the best, and the last ones are here
    """

    def __init__(self, parameters: Parameters, devices: Devices, keeps: bool) -> None:
        self._parameters, self._devices, self._keeps = parameters, devices, keeps
        arrays = parameters.arrays if keeps else {}
        self._arrays = {name: np.zeros_like(a) for name, a in arrays.items()}
        self.is_taken = False

    @property
    def buffers(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds of it."""
        names = {name: f"best {name}" for name in self._arrays} | {"parameters": "best"}
        return {names[name]: a for name, a in self._arrays.items()}

    def note(self, history: History) -> None:
        """Copy the parameters, which the host has, if the last validation was the best."""
        if self._keeps and history.best is history.validations[-1]:
            for name, a in self._arrays.items():
                a[...] = self._parameters.arrays[name]

    def take(self, history: History, step: int) -> None:
        """Give the parameters, which are of this step, the numbers that validated best. Where no
        step was validated yet, they stay as they are."""
        has_validated = any(v.step for v in history.validations)
        best = history.best
        if self._keeps and not self.is_taken and has_validated and best and best.step != step:
            self._exchange()

    def put_back(self) -> None:
        """Give the parameters the numbers of the last step again."""
        if self.is_taken:
            self._exchange()

    def _exchange(self) -> None:
        parameters = self._parameters
        self._devices.gather(*parameters.trained_leaves)
        for name, a in self._arrays.items():
            one, other = parameters.arrays[name].reshape(-1), a.reshape(-1)
            for i in range(0, len(one), _PIECE):
                piece = slice(i, i + _PIECE)
                one[piece], other[piece] = other[piece], one[piece].copy()
        parameters.pack(self._devices)
        self.is_taken = not self.is_taken
