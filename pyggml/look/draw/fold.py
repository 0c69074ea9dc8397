"""A graph → its sections: the start, runs of equal blocks, and the end.

A node belongs to a block by the weights that it reads (blk.3.…) and by its sources: a forward node
to the last block among them, a backward node to the first. The backward nodes of a block stand
beside its forward nodes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pyggml.graph import Graph, reachable
from pyggml.graph.op import has_kernel
from pyggml.graph.tensor import Tensor

_BLOCK = re.compile(r"(?:^|\()blk\.(\d+)\.")
_BEFORE = -1


@dataclass(frozen=True, slots=True)
class Section:
    """Equal neighbouring parts of a graph: forward and backward nodes of the first of them.

    title   "start", "block 0", "blocks 1 to 27", "end"
    first   the number of the first block; -1 of the start, and of the end the number of blocks
    n       how many there are
    """

    title: str
    first: int
    n: int
    forward: tuple[Tensor, ...]
    backward: tuple[Tensor, ...]


@dataclass(slots=True)
class _Part:
    forward: list[Tensor] = field(default_factory=list)
    backward: list[Tensor] = field(default_factory=list)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for parts with the same ops, shapes and types in the same order."""
        both = (self.forward, self.backward)
        return tuple(tuple((t.op, t.shape, t.dtype.name) for t in nodes) for nodes in both)


def sections(graph: Graph, folded: bool = True) -> list[Section]:
    """The sections of a graph in the order of the forward pass; not folded: one for each block."""
    forward = forward_tensors(graph)
    behind = _n_blocks(graph)
    parts = defaultdict[int, _Part](_Part)
    number = _numbers(graph, forward, behind)
    for node in graph.nodes:
        part = parts[number[node]]
        (part.forward if node in forward else part.backward).append(node)
    merged: list[Section] = []
    for i in sorted(parts):
        part, last = parts[i], merged[-1] if merged else None
        inside = _BEFORE < i < behind
        is_same = folded and inside and parts[i - 1].key == part.key
        if is_same and last and last.title.startswith("block"):
            title = f"blocks {last.first} to {i}"
            merged[-1] = replace(last, title=title, n=last.n + 1)
            continue
        title = f"block {i}" if inside else "start" if i == _BEFORE else "end"
        merged.append(Section(title, i, 1, tuple(part.forward), tuple(part.backward)))
    return merged


def forward_tensors(graph: Graph) -> frozenset[Tensor]:
    """What the first output is made of, and of a loss's graph all outputs but the gradients."""
    outputs = graph.outputs[:1]
    if "loss" in graph.names:
        named = zip(graph.names, graph.outputs, strict=True)
        outputs = tuple(t for name, t in named if not name.startswith("grad:"))
    return frozenset(reachable(*outputs))


def _n_blocks(graph: Graph) -> int:
    numbers = [n for t in graph.leaves if (n := _block_number(t)) is not None]
    return max(numbers, default=_BEFORE) + 1


def _block_number(t: Tensor) -> int | None:
    """The block in a tensor's name."""
    match = _BLOCK.search(t.name)
    return int(match[1]) if match else None


def _numbers(graph: Graph, forward: frozenset[Tensor], behind: int) -> dict[Tensor, int]:
    """The block of every node; _BEFORE and `behind` stand for those outside."""
    numbers: dict[Tensor, int] = {}
    for node in graph.nodes:
        named = [n for s in node.src if (n := _block_number(s)) is not None and s.op is None]
        if node in forward:
            of_sources = [numbers[s] for s in node.src if s in numbers]
            if _is_last(node, of_sources):
                of_sources.append(behind)
            numbers[node] = max([*named, *of_sources], default=_BEFORE)
        else:
            numbers[node] = _backward(node, named, numbers, forward, behind)
    return numbers


def _is_last(node: Tensor, numbers: Sequence[int]) -> bool:
    """Whether a node reads a weight that stands behind the blocks, such as the last norm's."""
    weights = [s for s in node.src if s.op is None and s.name.endswith((".weight", ".bias"))]
    return max(numbers, default=_BEFORE) > _BEFORE and any(
        _block_number(w) is None for w in weights
    )


def _backward(
    node: Tensor,
    named: list[int],
    numbers: dict[Tensor, int],
    forward: frozenset[Tensor],
    behind: int,
) -> int:
    if _is_last(node, [0]):
        return behind
    grads = [numbers[s] for s in node.src if s in numbers and s not in forward]
    read = [numbers[s] for s in node.src if s in forward and s in numbers]
    inside = [n for n in (*named, *read) if n > _BEFORE]
    return min([*grads, max(inside)] if inside else grads, default=behind)


def op_counts(nodes: Sequence[Tensor]) -> list[tuple[str, int]]:
    """How often each op occurs, in the order of first use; views, which run nothing, left out."""
    return [*Counter(t.op.name for t in nodes if t.op is not None and has_kernel(t)).items()]
