"""The backward pass of swiglu in one node, on the CPU.

Where gate and up are kept as bfloat16, it is five: the two widened to float32, swiglu_back_gate,
swiglu(gate, dy), and swiglu(gate, up) made again. They move 52 bytes for each number of gate, and
take three exponentials. swiglu_back moves 20 and takes one; its bits are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor
from pyggml.ops.activation.glu import SWIGLU, SWIGLU_BACK, SWIGLU_BACK_GATE
from pyggml.ops.layout.layout import CPY


class _Apart(NamedTuple):
    """The nodes that one swiglu_back replaces: its results, and its sources."""

    dgate: Tensor
    dup: Tensor
    y: Tensor
    gate: Tensor
    up: Tensor


def with_joint_backs(graph: Graph) -> Graph:
    """The graph with a swiglu_back wherever all of its results are computed apart.

    What reads y then waits for dy. So it stays as it is where dy needs y, and where anything else
    reads gate or up; a graph with nothing to join is returned itself.
    """
    found = {a.dgate: a for a in _found(graph)}
    return _joined(graph, found) if found else graph


def _found(graph: Graph) -> Iterator[_Apart]:
    backs = [t for t in graph.nodes if t.op is SWIGLU_BACK_GATE]
    if not backs:
        return
    readers = defaultdict[Tensor, list[Tensor]](list)
    for t in graph.nodes:
        for s in t.src:
            readers[s].append(t)
    number = {t: i for i, t in enumerate(graph.nodes)}
    found = [a for dgate in backs if (a := _apart(dgate, readers, number, graph.outputs))]
    for i, a in enumerate(found):  # its dy needs nothing that those behind it will give
        late = (t for later in found[i + 1 :] for t in (later.dup, later.y))
        if not any(_depends(a.dgate.src[2], t, number) for t in late):
            yield a


def _apart(
    dgate: Tensor,
    readers: Mapping[Tensor, Sequence[Tensor]],
    number: Mapping[Tensor, int],
    outputs: Iterable[Tensor],
) -> _Apart | None:
    """What could be joined with dgate, if there were no other to join."""
    gate, up, dy = dgate.src
    made = {t.src: t for t in readers[gate] if t.op is SWIGLU}
    dup, y = made.get((gate, dy)), made.get((gate, up))
    if dup is None or y is None or not (_is_widened(gate) and _is_widened(up)):
        return None
    ours = {dgate, dup, y}
    alone = ours.issuperset((*readers[gate], *readers[up])) and ours.isdisjoint(outputs)
    if not alone or _depends(dy, y, number):
        return None
    return _Apart(dgate, dup, y, gate.src[0], up.src[0])


def _is_widened(t: Tensor) -> bool:
    return t.op is CPY and t.src[0].dtype is BF16 and t.src[0].is_contiguous


def _depends(t: Tensor, on: Tensor, number: Mapping[Tensor, int]) -> bool:
    """Whether t needs `on`. Only nodes behind `on` can."""
    seen, stack = set[Tensor](), [t]
    while stack:
        t = stack.pop()
        if t is on:
            return True
        if t not in seen and number.get(t, -1) > number[on]:
            seen.add(t)
            stack.extend(t.src)
    return False


def _joined(graph: Graph, found: dict[Tensor, _Apart]) -> Graph:
    """The graph with these joined. What reads `dup` or `y` follows them: it waits for `dgate`."""
    new: dict[Tensor, Tensor] = {}
    steps: list[Tensor] = []
    apart = {t for a in found.values() for t in (a.dup, a.y)}
    late = set(apart)  # what is not made yet

    def follows(t: Tensor) -> bool:
        return any((s.src[0] if s.op is SAVED else s) in late for s in t.src)

    waiting: list[Tensor] = []
    for node in graph.nodes:
        if node in apart or node.op is SAVED:
            continue
        ready = [node]
        if node in found:
            late -= {found[node].dup, found[node].y, *waiting}
            ready, waiting = [node, *waiting], []
        for t in ready:
            if follows(t):
                late.add(t)
                waiting.append(t)
            else:
                steps.append(_renewed(t, found.get(t), new))
    outputs = (new.get(t, t) for t in graph.outputs)
    return Graph.of(*outputs, steps=steps).noted(graph.notes)


def _renewed(t: Tensor, apart: _Apart | None, new: dict[Tensor, Tensor]) -> Tensor:
    """t, reading the new nodes, or the joint node in its place; both are entered in `new`."""
    src = tuple(new.get(s, s) for s in t.src)
    if apart is not None:
        made = SWIGLU_BACK(apart.gate, apart.up, src[2]).named(t.name)
        new[apart.dup], new[apart.y] = made.saved
    else:
        made = t if src == t.src else t.reading(src)
        new.update(zip(t.saved, made.saved, strict=True))
    new[t] = made
    return made
