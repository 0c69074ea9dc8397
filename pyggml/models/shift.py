"""Rows of the cache moved to other positions, as when a full context drops some of its tokens.

Keys are cached after their rotation, and rotations add up: R(p + d) k = R(d) R(p) k. So a key that
moves by d positions is turned by d more, in float32; values, and keys without rotation, are moved
as they are. What a token has taken from tokens that are gone stays in its rows, as in llama.cpp.
"""

from dataclasses import dataclass

import numpy as np

from pyggml.graph.arrays import write
from pyggml.graph.tensor import Tensor
from pyggml.models.build import Parts
from pyggml.models.net import Cache, Inputs, Net


@dataclass(frozen=True, slots=True)
class Shift:
    """The graph that moves rows: `inputs` number them before (tokens) and after (rows), and say by
    how many positions each moves (positions)."""

    inputs: Inputs
    outputs: tuple[Tensor, ...]

    def fill(self, source: int, target: int, length: int) -> None:
        """Rows from `source` on become those from `target` on, as many positions away. length: of
        the sequence whose rotary factors they have."""
        n = self.inputs.tokens.n_elements
        assert self.inputs.rows is not None
        write(self.inputs.tokens, source + np.arange(n))
        write(self.inputs.rows, target + np.arange(n))
        write(self.inputs.positions, np.full(n, target - source))
        write(self.inputs.length, np.full(n, length))


def build_shift(parts: Parts, cache: Cache, n_rows: int) -> Shift:
    """The graph that moves n_rows rows of a cache."""
    inputs = Inputs.empty(n_rows, with_rows=True)
    return Shift(inputs, parts.decoder.shift(Net(parts.weights, inputs, (), cache)))
