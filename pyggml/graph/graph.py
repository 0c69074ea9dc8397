"""Graph: the nodes that some results need, in an order in which they can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from pyggml.errors import GraphError
from pyggml.graph.op import SAVED, has_kernel
from pyggml.graph.overwriting import readers_of_overwritten, refuse_late_reads
from pyggml.graph.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Notes:
    """What a builder knows of its tensors, for the passes over the finished graph.

    boundaries  handed from one layer to the next
    large       large and inside a layer: the backward pass may read a rounded copy instead
    backward    node of a gradient → the forward node whose rule built it
    sums        node that adds gradients up → the tensor whose gradients they are
    gradients   tensor that gradients flow to → its gradient, complete
    """

    boundaries: frozenset[Tensor] = frozenset()
    large: frozenset[Tensor] = frozenset()
    backward: Mapping[Tensor, Tensor] = field(default_factory=dict)
    sums: Mapping[Tensor, Tensor] = field(default_factory=dict)
    gradients: Mapping[Tensor, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """Nodes in the order of execution, leaves with data, and outputs, which are kept for the
    caller. `graph["loss"]` is the output of that name.

    A pass makes a new graph from a graph, by `rewrite`; its outputs have the same positions and
    names.

    names   of the outputs; "" for one without
    """

    nodes: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    notes: Notes = field(default_factory=Notes)
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, *outputs: Tensor, steps: Iterable[Tensor] = (), **named: Tensor) -> Graph:
        """The graph of these outputs, with no node that they do not need.

        It computes the `steps` first, each right after its sources, and then the outputs. Raises
        GraphError if a node or an output needs numbers that an earlier node must overwrite, and
        for what is no tensor.
        """
        every = (*outputs, *named.values())
        if strangers := [t for t in every if not isinstance(t, Tensor)]:
            raise GraphError(f"Graph.of takes tensors, as Graph.of(loss); found {strangers[0]!r}")
        graph = cls.in_order(every, steps, (*("" for _ in outputs), *named))
        refuse_late_reads((*graph.leaves, *graph.nodes), every)
        return graph

    @classmethod
    def in_order(
        cls, every: Sequence[Tensor], steps: Iterable[Tensor] = (), names: Sequence[str] = ()
    ) -> Graph:
        """`of` for outputs of a graph that was checked before: a pass does not check it again."""
        reached = reachable(*every)
        order = _in_order([*(s for s in steps if s in reached), *every], reached)
        return cls(
            nodes=tuple(t for t in order if t.op is not None),
            leaves=tuple(t for t in order if t.op is None),
            outputs=tuple(every),
            names=tuple(names) or ("",) * len(every),
        )

    def __getitem__(self, name: str) -> Tensor:
        """The output of this name. GraphError lists the names."""
        if not name or name not in self.names:
            names = ", ".join(filter(None, self.names)) or "none"
            raise GraphError(f"no output is named {name!r}; the names are: {names}")
        return self.outputs[self.names.index(name)]

    def outputs_of(self, kind: str) -> dict[str, Tensor]:
        """The outputs named "kind:name", by name: `outputs_of("grad")`."""
        named = zip(self.names, self.outputs, strict=False)
        return {
            name.removeprefix(f"{kind}:"): t for name, t in named if name.startswith(f"{kind}:")
        }

    @cached_property
    def readers(self) -> Mapping[Tensor, Sequence[Tensor]]:
        """The nodes that read each tensor, once each, in their order. A saved result does not read
        its maker."""
        readers: dict[Tensor, list[Tensor]] = {t: [] for t in (*self.leaves, *self.nodes)}
        for node in self.nodes:
            readers |= {s: [] for s in node.saved if s not in readers}
            for s in dict.fromkeys(node.src if node.op is not SAVED else ()):
                readers[s].append(node)
        return readers

    @cached_property
    def by_op(self) -> Mapping[str, Sequence[Tensor]]:
        """The nodes of each op, by its name, in their order."""
        by_op = defaultdict[str, list[Tensor]](list)
        for node in self.nodes:
            assert node.op is not None
            by_op[node.op.name].append(node)
        return by_op

    @cached_property
    def users(self) -> Mapping[Tensor, Sequence[Tensor]]:
        """The nodes with a kernel that read each owner's memory, by whatever view, once each."""
        users = defaultdict[Tensor, list[Tensor]](list)
        for node in self.nodes:
            for owner in {s.root: None for s in node.src} if has_kernel(node) else ():
                users[owner].append(node)
        return users

    @cached_property
    def kept(self) -> Set[Tensor]:
        """The owners of the memory that the caller reads."""
        return {t.root for t in self.outputs}

    @cached_property
    def places(self) -> Mapping[Tensor, int]:
        """Where each node stands."""
        return {t: i for i, t in enumerate(self.nodes)}

    def forget(self) -> None:
        """Free what was found out about the graph until it is asked for again."""
        for name in vars(self).keys() - self.__dataclass_fields__.keys():
            del vars(self)[name]

    def with_notes(self, notes: Notes) -> Graph:
        """The same graph with other notes."""
        return replace(self, notes=notes)

    def __repr__(self) -> str:
        """<Graph of loss and 2 more: nodes 812, leaves 311>"""
        first, *rest = (t.name or repr(t) for t in self.outputs)
        more = f" and {len(rest)} more" if rest else ""
        return f"<Graph of {first}{more}: nodes {len(self.nodes)}, leaves {len(self.leaves)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same line where IPython or Hypothesis would print every field of a dataclass."""
        printer.text(repr(self))

    def __str__(self) -> str:
        """One line a node: number, op, type and shape, numbers of its sources, name; of a node of
        the backward pass the forward node that it belongs to."""
        number = {t: str(i) for i, t in enumerate(self.nodes)}
        lines, behind = [], False
        for t in self.nodes:
            src = ", ".join(number.get(s) or s.name or "leaf" for s in t.src)
            assert t.op is not None
            about = f"{t.dtype!r}{list(t.shape)}  ({src})  {t.name}".rstrip()
            mark = self._mark(t, number) or ("   <- in the backward pass" if behind else "")
            lines.append(f"{number[t]:>5} {t.op.name:<22} {about}{mark}")
            behind = behind or (bool(self.notes.backward) and t is self.outputs[0])
        return "\n".join(lines)

    def _mark(self, t: Tensor, number: Mapping[Tensor, str]) -> str:
        """What a node of the backward pass belongs to, in words; "" of others."""

        def label(of: Tensor) -> str:
            plain = of.op.name if of.op is not None else "leaf"
            return " ".join(filter(None, (number.get(of), of.name or plain)))

        if t in self.notes.sums:
            return f"   <- adds up the gradients of {label(self.notes.sums[t])}"
        of = self.notes.backward.get(t)
        return "" if of is None else f"   <- backward of {label(of)}"


def expect_graph(verb: str, graph: object) -> None:
    """GraphError unless it is a graph; `verb` is the function that takes it."""
    if not isinstance(graph, Graph):
        of = "Graph.of(t)" if isinstance(graph, Tensor) else "Graph.of(loss)"
        raise GraphError(f"{verb} takes a graph, such as {of}; found {graph!r}")


def topological(*roots: Tensor) -> list[Tensor]:
    """All tensors that the roots depend on, leaves included, sources before users.

    The order is that of the roots, and each root's sources come in their own order right before it.
    A node that overwrites a tensor stands after all readers of the old numbers; raises GraphError
    if one of these depends on it.
    """
    return _in_order(roots, reachable(*roots))


def _in_order(roots: Sequence[Tensor], tensors: Collection[Tensor]) -> list[Tensor]:
    """`topological` of roots that depend on these tensors."""
    overwrites = readers_of_overwritten(tensors)
    order: dict[Tensor, None] = {}
    entered: set[Tensor] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        t, complete = stack.pop()
        if complete:
            order[t] = None
        elif t not in entered:
            entered.add(t)
            stack.append((t, True))
            first = (*t.src, *overwrites[t]) if t in overwrites else t.src
            stack += [(s, False) for s in reversed(first) if s not in order]
        elif t not in order:
            raise GraphError(f"{t!r} is needed by what must run before something is written over")
    return list(order)


def reachable(*roots: Tensor) -> Collection[Tensor]:
    """The roots and all that they depend on. The order has no meaning, but is always the same."""
    reached = dict.fromkeys(roots)
    stack = list(reached)
    while stack:
        for s in stack.pop().src:
            if s not in reached:
                reached[s] = None
                stack.append(s)
    return reached.keys()
