"""verify: what holds of every graph. RULES and GRAPH_RULES say it, a line for each rule.

A pass, a function that makes a graph, is declared by `@graph_pass`. While `verifying`, or with
PYGGML_VERIFY=1 in the environment, every graph that it makes is verified, and a fault names both
the pass and the node. `recording_passes` lists the passes that run.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Flag, auto
from functools import cached_property, wraps
from typing import Any, NamedTuple, ParamSpec
from weakref import WeakSet

from pyggml.errors import GraphError, PyggmlError
from pyggml.graph.graph import Graph
from pyggml.graph.op import COPIED, RETURNED, SAVED, SEEN, SENT, STREAMED, Memory, Spec, computes
from pyggml.graph.overwriting import extent, refuse_late_reads
from pyggml.graph.tensor import Shape, Tensor, contiguous_strides, fits_array

ENVIRONMENT = "PYGGML_VERIFY"
_VERIFIES = ContextVar("_VERIFIES", default=os.environ.get(ENVIRONMENT, "") not in ("", "0"))


class Kind(Flag):
    """What a tensor of a graph is."""

    LEAF = auto()
    RESULT = auto()  # in memory of its own, which a source may have had before
    VIEW = auto()  # of its first source
    WRITE = auto()  # over its first source
    SAVED = auto()
    COPIED = auto()  # of another device's numbers
    SEEN = auto()  # a view that a schedule adds
    NODE = RESULT | VIEW | WRITE  # what an op's spec describes
    KERNEL = RESULT | WRITE
    OWNER = RESULT | SAVED | COPIED
    INSIDE = VIEW | WRITE  # of its first source's memory
    WINDOW = LEAF | INSIDE


_WRITING = Memory.ALIAS, Memory.INPLACE, Memory.INPLACE_FIRST
_ADDED = {SAVED: Kind.SAVED} | dict.fromkeys((COPIED, STREAMED, RETURNED), Kind.COPIED)
_ADDED |= dict.fromkeys((SEEN, SENT), Kind.SEEN)


def kind_of(t: Tensor) -> Kind:
    """The kind of a tensor, by its op and its memory."""
    if t.op is None:
        return Kind.LEAF
    if t.op in _ADDED:
        return _ADDED[t.op]
    return Kind.VIEW if t.op.is_view else Kind.WRITE if t.base is not None else Kind.RESULT


class DeviceFacts(NamedTuple):
    """What rules ask of a device.

    refusal   why it does not compute a node, None if it does
    has       whether it has the memory of a leaf
    """

    refusal: Callable[[Tensor], str | None]
    has: Callable[[Tensor], bool]


class Standing:
    """Where a tensor stands in a graph, and what its op says of it there.

    before   the leaves of the graph, and the results of the nodes before this one
    device   that computes the graph; None if that is open
    """

    def __init__(self, t: Tensor, before: Collection[Tensor], device: DeviceFacts | None) -> None:
        self.t, self.before, self.device = t, before, device

    @property
    def missing(self) -> list[Tensor]:
        """Sources that nothing before makes. Views of leaves are no nodes of a device's part."""
        missing = [s for s in self.t.src if s not in self.before]
        if self.device is not None and missing:
            missing = [s for s in missing if s.root.op is not None or not s.is_view]
        return missing

    @cached_property
    def answer(self) -> Spec | PyggmlError:
        """What the op's spec says of the sources and settings, or why it refuses them."""
        assert self.t.op is not None
        try:
            return self.t.op.spec(*self.t.src, **self.t.params)
        except PyggmlError as error:
            return error

    @property
    def spec(self) -> Spec:
        """The answer, of a node that is not refused."""
        assert isinstance(self.answer, Spec)
        return self.answer

    @property
    def saved(self) -> list[tuple[Shape, Any]]:
        """Shape and type of each further result of such a node."""
        assert self.t.op is not None
        return _formats(self.t.op.saved(*self.t.src, **self.t.params))

    @property
    def memory(self) -> Memory:
        """Where its op says that the result lives."""
        assert self.t.op is not None
        return self.t.op.memory

    @property
    def layout(self) -> tuple[Any, int, Shape]:
        """Of what lies in its first source's memory: whose that is, the offset, the strides."""
        of, spec = self.t.src[0], self.spec
        strides = spec.strides or contiguous_strides(spec.shape, spec.dtype)
        return of.root, of.offset + spec.offset, strides

    @property
    def refusal(self) -> str | None:
        """Why the device does not compute the node; None if it does, or if it is open."""
        return self.device.refusal(self.t) if self.device and computes(self.t) else None

    @property
    def is_near(self) -> bool:
        """Whether a leaf lies where the device reads it."""
        return self.device is None or self.device.has(self.t)


class Rule(NamedTuple):
    """What holds of all tensors of a kind, if the rules before do, and what is said of one of which
    it does not."""

    of: Kind
    holds: Callable[[Tensor, Standing], bool]
    message: str


# fmt: off
ORDER = Rule(~Kind.LEAF, lambda t, at: not at.missing, "stands before {at.missing[0]}, its source")
RULES = (
    Rule(Kind.LEAF, lambda t, at: not t.src and not t.saved, "is a leaf with sources"),
    Rule(Kind.LEAF, lambda t, at: fits_array(t), "has an array of {t.data.dtype}{t.data.shape}"),
    Rule(Kind.LEAF, lambda t, at: at.is_near, "lies in another device's memory"),
    ORDER,
    Rule(Kind.NODE, lambda t, at: isinstance(at.answer, Spec), "has a wrong source: {at.answer}"),
    Rule(Kind.NODE, lambda t, at: t.shape == at.spec.shape, "has not the shape {at.spec.shape}"),
    Rule(Kind.NODE, lambda t, at: t.dtype is at.spec.dtype, "has not the type {at.spec.dtype}"),
    Rule(Kind.NODE, lambda t, at: _formats(t.saved) == at.saved, "saves {t.saved}, not {at.saved}"),
    Rule(Kind.NODE, lambda t, at: all(s.src == (t,) for s in t.saved), "saves another's {t.saved}"),
    Rule(Kind.SAVED, lambda t, at: t in t.src[0].saved, "is not saved by {t.src[0]}"),

    Rule(Kind.RESULT, lambda t, at: at.memory is not Memory.ALIAS, "is not where its op writes"),
    Rule(Kind.WRITE, lambda t, at: at.memory in _WRITING, "writes over {t.src[0]}, and must not"),
    Rule(Kind.KERNEL, lambda t, at: _walks_sources(t), "reads gaps of {t.src}, which it cannot"),
    Rule(Kind.OWNER, lambda t, at: t.is_contiguous, "owns memory, with strides {t.strides}"),
    Rule(Kind.OWNER, lambda t, at: t.base is None and not t.offset, "owns memory, but in {t.base}"),
    Rule(Kind.INSIDE, lambda t, at: _layout(t) == at.layout, "lies not in its source: {at.layout}"),
    Rule(Kind.WINDOW, lambda t, at: t.base is None or _is_inside(t), "reaches out of {t.base}"),
    Rule(Kind.KERNEL, lambda t, at: _changes_leaves(t), "changes what is no leaf"),
    Rule(Kind.KERNEL, lambda t, at: at.refusal is None, "runs where it cannot: {at.refusal}"),
)
# fmt: on
_RULES_OF = {kind: tuple(rule for rule in RULES if kind in rule.of) for kind in Kind}


class GraphRule(NamedTuple):
    """What holds of a graph as a whole."""

    holds: Callable[[Graph], bool]
    message: str


# fmt: off
GRAPH_RULES = (
    GraphRule(lambda g: all(t.op is None for t in g.leaves), "a node is among the leaves"),
    GraphRule(lambda g: all(t.op is not None for t in g.nodes), "a leaf is among the nodes"),
    GraphRule(lambda g: _are_single((*g.leaves, *g.nodes)), "a tensor stands in it twice"),
    GraphRule(lambda g: len(g.names) in (0, len(g.outputs)), "names and outputs are not as many"),
    GraphRule(lambda g: _are_single(filter(None, g.names)), "a name is that of two outputs"),
    GraphRule(lambda g: _results(g).issuperset(g.outputs), "nothing in it makes an output"),
)
# fmt: on


def verify(
    graph: Graph,
    after: str = "building",
    device: DeviceFacts | None = None,
    earlier: Collection[Tensor] = frozenset(),
) -> None:
    """GraphError, with the node and the rule that it breaks, unless all rules hold of the graph.

    after    the pass that made it, for the message
    device   that computes all of it; None if that is open
    earlier  tensors of which the rules held before; where they stand is looked at again
    """
    for whole in GRAPH_RULES:
        if not whole.holds(graph):
            raise GraphError(f"after {after}: {graph!r}: {whole.message}")
    before = set(graph.leaves)
    for t in (*graph.leaves, *graph.nodes):
        if t not in earlier or not before.issuperset(t.src):
            at = Standing(t, before, device)
            for rule in (ORDER,) if t in earlier else _RULES_OF[kind_of(t)]:
                if not rule.holds(t, at):
                    raise GraphError(f"after {after}: {t!r} {rule.message.format(t=t, at=at)}")
        before.add(t)
        before.update(t.saved)
    if device is not None:  # whose copies of leaves do not tell old numbers from new ones
        return
    try:
        refuse_late_reads((*graph.leaves, *graph.nodes), graph.outputs)
    except GraphError as error:
        raise GraphError(f"after {after}: {error}") from None


# -- when ------------------------------------------------------------------------------------------


def verifies() -> bool:
    """Whether passes verify what they make."""
    return _VERIFIES.get()


@contextmanager
def verifying(on: bool = True) -> Iterator[None]:
    """A context in which passes verify what they make, or do not."""
    token = _VERIFIES.set(on)
    try:
        yield
    finally:
        _VERIFIES.reset(token)


class PassRun(NamedTuple):
    """A pass that has run: its function, and the graph that it was given and the one that it made,
    which is the same one where it found nothing to change. before: None of one that begins without
    a graph."""

    change: Callable[..., Graph]
    before: Graph | None
    after: Graph


_RUNS: ContextVar[list[PassRun] | None] = ContextVar("_RUNS", default=None)


@contextmanager
def recording_passes() -> Iterator[list[PassRun]]:
    """A context that lists the passes that run in it, in their order."""
    runs = list[PassRun]()
    token = _RUNS.set(runs)
    try:
        yield runs
    finally:
        _RUNS.reset(token)


P = ParamSpec("P")
PASSES: dict[str, Callable[..., Graph]] = {}
_SOUND: WeakSet[Graph] = WeakSet()  # graphs of which all rules hold


def graph_pass(change: Callable[P, Graph]) -> Callable[P, Graph]:
    """Declare a pass: a function that makes a graph, most often of a graph. What it leaves as an
    earlier pass made it is not verified again; a schedule does so once, at the end."""

    @wraps(change)
    def change_and_verify(*args: P.args, **kwargs: P.kwargs) -> Graph:
        graph = change(*args, **kwargs)
        if verifies() and graph not in _SOUND:
            graphs = [a for a in args if isinstance(a, Graph) and a in _SOUND]
            verify(graph, change.__name__, earlier={t for g in graphs for t in g.nodes})
            _SOUND.add(graph)
        runs = _RUNS.get()
        if runs is not None:
            before = next((a for a in args if isinstance(a, Graph)), None)
            runs.append(PassRun(change, before, graph))
        return graph

    PASSES[change.__name__] = change_and_verify
    return change_and_verify


# -- what rules ask --------------------------------------------------------------------------------


def _formats(tensors: Iterable[Tensor | Spec]) -> list[tuple[Shape, Any]]:
    return [(t.shape, t.dtype) for t in tensors]


def _walks_sources(t: Tensor) -> bool:
    assert t.op is not None
    return t.op.strided or all(s.is_contiguous for s in t.src)


def _layout(t: Tensor) -> tuple[Any, int, Shape]:
    return t.base, t.offset, t.strides


def _is_inside(t: Tensor) -> bool:
    """Whether all elements of a window lie in the memory that it looks into."""
    return 0 <= t.offset <= extent(t.root) - extent(t)


def _changes_leaves(t: Tensor) -> bool:
    assert t.op is not None
    return all(t.src[i].root.op is None for i in t.op.changes)


def _are_single(things: Iterable[Any]) -> bool:
    """Whether none of these is there twice."""
    every = list(things)
    return len(every) == len(set(every))


def _results(graph: Graph) -> set[Tensor]:
    """All that a graph has: leaves, and the results of its nodes."""
    return {*graph.leaves, *(r for t in graph.nodes for r in (t, *t.saved))}
