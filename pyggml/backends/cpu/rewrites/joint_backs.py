"""The backward pass of swiglu in one node, on the CPU.

Where gate and up are kept as bfloat16, it is five: the two widened to float32, swiglu_back_gate,
swiglu(gate, dy), and swiglu(gate, up) made again. They move 52 bytes for each number of gate, and
take three exponentials. swiglu_back moves 20 and takes one; its bits are the same.
"""

from collections.abc import Iterator

from pyggml.backends.gated import GatedBack, gated_backs
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass
from pyggml.ops.activation.glu import SWIGLU_BACK
from pyggml.ops.layout.cpy import CPY


@graph_pass
def with_joint_backs(graph: Graph) -> Graph:
    """The graph with a swiglu_back wherever all of its results are computed apart.

    What reads y then waits for dy. So it stays as it is where dy needs y, and where anything else
    reads gate or up; a graph with nothing to join is returned itself.
    """
    return rewrite(graph, {t: new for a in _matches(graph) for t, new in _joint(a)})


def _joint(backs: GatedBack) -> Iterator[tuple[Tensor, Tensor]]:
    gate, up, dy = backs.dgate.src
    joint = SWIGLU_BACK(gate.src[0], up.src[0], dy)
    return zip(backs, (joint, *joint.saved), strict=True)


def _matches(graph: Graph) -> Iterator[GatedBack]:
    matches = [a for a in gated_backs(graph) if _can_join(a, graph)]
    for i, a in enumerate(matches):  # its dy needs nothing that those behind it will give
        late = (t for later in matches[i + 1 :] for t in (later.dup, later.y))
        if not any(graph.needs([a.dgate.src[2]], [t]) for t in late):
            yield a


def _can_join(backs: GatedBack, graph: Graph) -> bool:
    """Whether they could be joined, if there were no others to join."""
    gate, up, dy = backs.dgate.src
    if not (_is_widened(gate) and _is_widened(up)):
        return False
    ours, readers = set(backs), (*graph.readers[gate], *graph.readers[up])
    alone = ours.issuperset(readers) and ours.isdisjoint(graph.outputs)
    return alone and not graph.needs([dy], [backs.y])


def _is_widened(t: Tensor) -> bool:
    return t.op is CPY and t.src[0].dtype is BF16 and t.src[0].is_contiguous
