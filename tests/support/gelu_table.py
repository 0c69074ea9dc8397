"""llama.cpp's table of GELUs: ggml's CPU looks the value up by its argument rounded to float16
(GGML_GELU_FP16 in ggml/src/ggml-cpu/vec.h)."""

from math import pi, sqrt

import numpy as np
from reference_backend import ReferenceBackend

OPS = ("gelu", "geglu")
_ROOT, _CUBE, _HALF, _END = np.float32([sqrt(2 / pi), 0.044715, 0.5, 10])


class GeluTable(ReferenceBackend):
    """A device that computes GELUs alone, and these as ggml's CPU does."""

    name = "table"

    def __init__(self):
        super().__init__(OPS)

    def _compute(self, node):
        self.computed[node.op.name] = self.computed.get(node.op.name, 0) + 1
        x, *up = (self._exact(s).astype(np.float32) for s in node.src)
        y = rounded_gelu(x)
        self._stored(node)[...] = y * up[0] if up else y


def rounded_gelu(x: np.ndarray) -> np.ndarray:
    """gelu of x (float32) as the table has it: of a half, a half; 0 and x beyond ±10."""
    half = x.astype(np.float16).astype(np.float32)
    y = _HALF * half * (1 + np.tanh(_ROOT * half * (1 + _CUBE * half * half)))
    return np.where(np.abs(x) < _END, y.astype(np.float16), np.where(x < 0, 0, x)).astype("f4")
