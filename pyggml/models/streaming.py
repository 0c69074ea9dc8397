"""Weights of blocks that stay in the model's file, and are copied to a device in every pass."""

from collections import Counter
from collections.abc import Mapping

from pyggml.graph.arrays import is_constant
from pyggml.graph.tensor import Tensor
from pyggml.models.placement import group_of
from pyggml.runtime import Devices


def stream_blocks(
    weights: Mapping[str, Tensor], devices: Devices, n_blocks: int, n_streamed: int
) -> None:
    """Have devices stream the weights of so many blocks, evenly spread, if they compute with them.

    It holds of graphs that are scheduled from now on.
    """
    chosen = {
        i for i in range(n_blocks) if (i + 1) * n_streamed // n_blocks > i * n_streamed // n_blocks
    }
    sizes = Counter[int]()
    streamed = set[Tensor]()
    for name, w in weights.items():
        if (block := group_of(name)) in chosen and is_constant(w):
            streamed.add(w)
            sizes[block] += w.n_bytes
    for device in devices.backends:
        if device.streamed is not None:
            device.streamed.clear()
            device.streamed.update(streamed)
    devices.ahead = max(sizes.values(), default=0)
