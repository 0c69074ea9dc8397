"""rewrite: the one way to change a finished graph.

A pass is a function `Graph -> Graph` of two parts: a match, which walks `graph.nodes` and
`graph.readers` and yields replacements, and `rewrite`, which does the rest:

    def fused(graph):
        return rewrite(graph, {t: MUL_ADD(*t.src[0].src, t.src[1]) for t in graph.nodes if …})

A new tensor is made of tensors of the old graph, as if nothing else were replaced. If several nodes
become one, its saved results stand for the others: `{dgate: joint, dup: joint.saved[0]}`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pyggml.errors import GraphError
from pyggml.graph.graph import Graph, Notes
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor

Replacements = Mapping[Tensor, Tensor]


def rewrite(
    graph: Graph, replacements: Replacements, steps: Iterable[Tensor] | None = None
) -> Graph:
    """The graph in which all read new tensors instead of old ones: {old: new}.

    Nodes whose sources change are built anew; the others stay the same objects. Names, notes and
    outputs pass to what stands for their tensors, and so do saved results, by position, unless
    `replacements` names them. What no output needs is left out. If nothing changes, the graph
    itself is returned.

    The order is that of `steps`: nodes of the graph, of which none is missing, and new tensors; by
    default the nodes as they are. A new tensor stands at the first step that it replaces for which
    its sources are there; a step that needs it before waits until then. What is no step stands
    right before its first reader, and so do saved results, of which nothing runs.

    Raises GraphError if a replacement needs itself, if a saved result that is read has no
    successor, or if something is needed after it is written over.
    """
    if not replacements and steps is None:
        return graph
    if replacements:
        _pass_names_on(graph, replacements)
    images = _images(graph.outputs, replacements)
    order = [_maker(images[t]) for t in steps or graph.nodes if t in images]
    new = Graph.in_order([images[t] for t in graph.outputs], _when_ready(order))
    return replace(new, notes=_renew(graph.notes, images), names=graph.names)


def _pass_names_on(graph: Graph, replacements: Replacements) -> None:
    """Name the new nodes after the results that they replace."""
    old = {*graph.nodes, *graph.leaves}
    for t, new in replacements.items():
        if not new.name and new.op is not SAVED and new not in old:
            new.name = t.name


def _images(outputs: Iterable[Tensor], replacements: Replacements) -> dict[Tensor, Tensor]:
    """What stands for each tensor that the outputs still need, new ones included."""
    images: dict[Tensor, Tensor] = {}
    entered: set[Tensor] = set()
    stack = list(outputs)
    while stack:
        t, n = stack[-1], len(stack)
        if t in images:
            stack.pop()
            continue
        changes = t in replacements
        for s in (replacements[t],) if changes else t.src:
            if s not in images:
                stack.append(s)
            elif images[s] is not s:
                changes = True
        if len(stack) == n:
            images[stack.pop()] = _image(t, replacements, images) if changes else t
        elif t in entered:
            raise GraphError(f"{t!r} is needed by what replaces it")
        else:
            entered.add(t)
    return images


def _image(t: Tensor, replacements: Replacements, images: Mapping[Tensor, Tensor]) -> Tensor:
    """What stands for t, once that is known of all that it needs."""
    if t in replacements:
        return images[replacements[t]]
    src = tuple(images[s] for s in t.src)
    if t.op is not SAVED:
        return t.reading(src)
    (maker,), at = src, t.src[0].saved.index(t)
    if at >= len(_maker(maker).saved):
        raise GraphError(f"{t!r} is read, and {maker!r}, which replaces its maker, saves no such")
    return _maker(maker).saved[at]


def _maker(t: Tensor) -> Tensor:
    """The node whose kernel writes t."""
    return t.src[0] if t.op is SAVED else t


def _when_ready(order: Sequence[Tensor]) -> list[Tensor]:
    """The nodes in this order, but each after all that it needs of the others."""
    steps = set(order)
    complete: set[Tensor] = set()
    waiting: list[Tensor] = []
    ready: list[Tensor] = []
    missing: set[Tensor] = set()  # what the waiting ones need first

    def enter(node: Tensor) -> bool:
        """Append a node, unless it was before, or a step that it needs is missing."""
        if node in complete:
            return False
        needs = [node]  # and new nodes that are no steps
        for t in needs:
            for s in t.src:
                maker = _maker(s)
                if maker.op is None or maker in complete:
                    continue
                if maker in steps:
                    waiting.append(node)
                    missing.add(maker)
                    return False
                if maker not in needs:
                    needs.append(maker)
        complete.update(needs)
        ready.append(node)
        return True

    for t in order:
        entered = [t] if enter(t) else []
        while not missing.isdisjoint(entered):
            again, entered = waiting.copy(), []
            waiting.clear()
            missing.clear()
            entered = [node for node in again if enter(node)]
    return ready


def _renew(notes: Notes, images: Mapping[Tensor, Tensor]) -> Notes:
    boundaries, large = (
        frozenset(images.get(t, t) for t in tensors) for tensors in (notes.boundaries, notes.large)
    )
    backward, sums, gradients = (
        {images.get(t, t): images.get(of, of) for t, of in pairs.items()}
        for pairs in (notes.backward, notes.sums, notes.gradients)
    )
    return Notes(boundaries, large, backward, sums, gradients)
