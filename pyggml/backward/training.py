"""The passes from the graph of a loss to that of a training step, in their order."""

from collections.abc import Mapping, Sequence

from pyggml.backward.recompute import Keep, rematerialise
from pyggml.backward.rounding import round_attention, round_gradients, round_large
from pyggml.backward.walk import build_backward
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, DType
from pyggml.graph.tensor import Tensor


def training_graph(
    forward: Graph,
    parameters: Sequence[Tensor] | Mapping[str, Tensor],
    accumulators: Sequence[Tensor | None] | None = None,
    kept_as: DType = F32,
    keep: Keep = Keep.ALL,
    *,
    rounds: bool = True,
    keeps: Tensor | None = None,
) -> Graph:
    """The graph of a loss with its gradients; see `build_backward`, whose outputs it has.

    kept_as   the type of large tensors that the backward pass reads
    keep      which forward results stay in memory for it
    rounds    whether attention may round as its backward pass does; a loss that compares the model
              with another, computed without a backward pass, wants both alike

    Each device's own passes follow in the schedule: `Backend.rewritten`.
    """
    graph = build_backward(forward, parameters, accumulators=accumulators, keeps=keeps)
    graph = round_attention(graph) if rounds else graph
    graph = round_gradients(round_large(graph, kept_as), kept_as)
    return rematerialise(graph, keep)
