"""AdamW whose moments are in 8 bits by blocks (Dettmers et al. 2022), as bitsandbytes has them.

It keeps a quarter of AdamW's state. Tensors of fewer than LEAST numbers, such as norms and biases,
keep theirs in float32.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from pyggml.graph.tensor import Tensor
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.optim.adamw import FlatAdamW
from pyggml.ops.optim import OPT_STEP_ADAMW
from pyggml.ops.optim_8bit import OPT_STEP_ADAMW_8BIT, n_blocks

LEAST = 4096  # bitsandbytes' min_8bit_size
_SCALES, _SMALL = "scales", "small"
Place = tuple[str, int, int]  # an array, and of what it holds of a tensor the start and the length


class FlatAdamW8bit(FlatAdamW):
    """One node for each tensor: OPT_STEP_ADAMW for a small one, else OPT_STEP_ADAMW_8BIT."""

    moments, is_by_tensor = (), True

    @classmethod
    def state_arrays(cls, parameters: Parameters) -> Mapping[str, np.ndarray]:
        """m and v: the codes of all numbers. scales: of each tensor, those of both moments. small:
        both moments of each small tensor."""
        arrays = parameters.moments
        if not arrays:
            ends = {array: start + n for array, start, n in _places(parameters).values()}
            arrays |= {array: np.zeros(end, np.float32) for array, end in ends.items()}
            if _SCALES in ends:
                arrays |= {m: np.zeros(parameters.gradient.size, np.int8) for m in "mv"}
        return arrays

    def step_of(self, name: str, gradient: Tensor) -> Tensor:
        p, (array, start, n) = self.parameters, self._at[name]
        arrays, settings = self.state_arrays(p), self._settings[p.rate(name)]
        both = arrays[array][start : start + n].reshape(2, -1)
        if array == _SMALL:
            moments = [p.own_leaf(each.reshape(gradient.shape)) for each in both]
            return self._step(OPT_STEP_ADAMW, name, gradient, *moments, settings)
        moments = [*(p.part(name, arrays[m]) for m in "mv"), p.own_leaf(both)]
        return self._step(OPT_STEP_ADAMW_8BIT, name, gradient, *moments, settings)

    @cached_property
    def _at(self) -> Mapping[str, Place]:
        return _places(self.parameters)


def _places(parameters: Parameters) -> Mapping[str, Place]:
    """Where each tensor has its scales, or its moments if it is small."""
    places, ends = dict[str, Place](), {_SCALES: 0, _SMALL: 0}
    for name, t in parameters.tensors.items():
        array = _SMALL if t.n_elements < LEAST else _SCALES
        n = 2 * (t.n_elements if array == _SMALL else n_blocks(t.n_elements))
        places[name] = array, ends[array], n
        ends[array] += n
    return places
