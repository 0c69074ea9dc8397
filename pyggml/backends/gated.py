"""The backward pass of a gated unit, y = silu(gate)·up: the nodes that a device may join."""

from collections.abc import Iterator
from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.graph.tensor import Tensor
from pyggml.ops.activation.glu import SWIGLU, SWIGLU_BACK_GATE


class GatedBack(NamedTuple):
    """What reads gate, and up or dy: both gradients, and the unit itself for that of a factor."""

    dgate: Tensor
    dup: Tensor
    y: Tensor


def gated_backs(graph: Graph) -> Iterator[GatedBack]:
    """The units whose gradients and results are made of one gate and one up. Others may read these
    too."""
    for dgate in graph.nodes:
        if dgate.op is SWIGLU_BACK_GATE:
            gate, up, dy = dgate.src
            units = {t.src: t for t in graph.readers[gate] if t.op is SWIGLU}
            dup, y = units.get((gate, dy)), units.get((gate, up))
            if dup is not None and y is not None:
                yield GatedBack(dgate, dup, y)
