"""rounding: numbers before and after they are stored as a type of fewer bits, and the error.

print(rounding([[0.1234, -1.5, 3.14159, 100.3]], "BF16"))

BF16, 16 bits a number: 1 of 4 unchanged
error   0.2 % of the numbers by root mean square, 0.2 at most, at [0, 3]
  before   [[  0.1234  -1.5      3.1416 100.3   ]]
  after    [[  0.1235  -1.5      3.1406 100.5   ]]
  error    [[ 1.3515e-04  0.0000e+00 -9.6512e-04  2.0000e-01]]
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pyggml.eager.numbers import numbers
from pyggml.eager.value import as_float
from pyggml.errors import QuantError
from pyggml.graph.tensor import Tensor
from pyggml.quants import dequantize, quant, quantize


@dataclass(frozen=True, slots=True, eq=False)
class RoundedNumbers:
    """Numbers before and after, float32 of one shape.

    type    that they were stored as, by ggml's name
    n_bits  of a number on average, scales of blocks included
    """

    type: str
    n_bits: float
    before: np.ndarray
    after: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """after - before, float32."""
        return self.after - self.before

    @property
    def share(self) -> float:
        """The error's root mean square by that of the numbers; 0 if all are 0."""
        squares = (float(np.square(a, dtype=np.float64).sum()) for a in (self.error, self.before))
        error, total = squares
        return (error / total) ** 0.5 if total else 0.0

    @property
    def worst(self) -> tuple[int, ...]:
        """Where the error is largest."""
        at = np.unravel_index(int(np.abs(self.error).argmax()), self.error.shape)
        return tuple(map(int, at))

    def __str__(self) -> str:
        same = int((self.error == 0).sum())
        lines = [
            f"{self.type}, {self.n_bits:.4g} bits a number: {same} of {self.before.size} unchanged"
        ]
        if self.before.size:
            most = f"{self.error[self.worst]:.4g} at most, at {list(self.worst)}"
            share = f"{self.share * 100:.2g} % of the numbers by root mean square"
            lines.append(f"error   {share}, {most}")
        for name in ("before", "after", "error"):
            text = np.array2string(
                getattr(self, name),
                precision=4,
                threshold=20,
                edgeitems=4,
                suppress_small=name != "error",
            )
            lines.append(f"  {name:<7}  " + text.replace("\n", "\n" + " " * 11))
        return "\n".join(lines)


def rounding(x: Any, to: str) -> RoundedNumbers:
    """What storing x as a type does to its numbers, such as "F16", "BF16", "Q8_0" or "Q4_K".

    x: a Value, an array, lists, or a tensor of a graph, which is computed and unpacked.
    Raises QuantError for a type that is unknown or cannot be written, for rows that are no multiple
    of its block, and for numbers that it cannot hold.
    """
    if not isinstance(to, str):
        raise QuantError(f"rounding to {to!r}, wanted the name of a type, such as 'Q4_K'")
    before = np.asarray(numbers(x) if isinstance(x, Tensor) else as_float(x).numpy(), np.float32)
    d = quant(to).dtype
    after = dequantize(quantize(np.atleast_1d(before), to), to).reshape(before.shape)
    return RoundedNumbers(d.name, 8 * d.block_bytes / d.block, before, after)
