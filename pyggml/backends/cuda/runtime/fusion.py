"""Fusions: nodes that one kernel computes, so that numbers stay in registers between them.

A `Fusion` is a pattern of such nodes and its kernel. Each family of ops declares its own;
`pyggml.backends.cuda.rewrites` has their order. In a graph, one node stands for them all. Its op is
called "add+rms_norm_mul", say, and its reference is theirs, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite, OwnOp
from pyggml.backends.kit.kernels import no_scratch, nothing_shared
from pyggml.backends.kit.places import span
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import SAVED, Memory, Spec, changed_by
from pyggml.graph.overwriting import last_write, maker
from pyggml.graph.pattern import Match, Pattern
from pyggml.graph.table import Rewrite
from pyggml.graph.tensor import Tensor, as_leaf
from pyggml.ops import after

if TYPE_CHECKING:
    from pyggml.backends.cuda.runtime.device import CudaBackend

_REACH = 24  # so many nodes before the last one of a fusion, views included, are looked at
_OVERWRITING = Memory.INPLACE, Memory.INPLACE_FIRST


@dataclass(frozen=True, slots=True)
class Fusion:
    """Nodes that one kernel computes.

    pattern  a line for each node, the last one of the graph last
    serves   (match, compute) -> whether the kernel computes these
    bind     (sites, is_read) -> Call; both by line. is_read: whether others read the result; one
             that none reads has no array: its site has None
    sample   (rng) -> a graph with such nodes, which may change leaves
    memory   where the result of the new node may lie. It is the first that may overwrite a source
             by itself, else the first. FRESH: nowhere but in memory of its own. INPLACE: the kernel
             reads number i of each source before it writes number i of the result, and no other
             thread reads it. INPLACE_FIRST: so it does of the first source
    leads    the node whose sources are the first ones
    scratch  as CudaKernel has it, of the new node
    shared   likewise
    adds     whether nodes may add to leaves, which the kernel does then
    """

    pattern: Pattern
    serves: Callable[[Match, Compute], bool]
    bind: Callable[[Sequence[CudaSite], Sequence[bool]], Call]
    sample: Callable[[np.random.Generator], Graph]
    memory: Memory = Memory.FRESH
    leads: int = 0
    scratch: Callable[[Tensor, Compute], int] = no_scratch
    shared: Callable[[Tensor, Compute], tuple[int, str]] = nothing_shared
    adds: bool = False

    @property
    def name(self) -> str:
        return "+".join(self.pattern.op_names)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Composition:
    """The nodes that a fused one stands for, as they were.

    sources  what they read of others, the leading node's first
    results  what others may read: of the new node, then of those that it saves
    """

    nodes: tuple[Tensor, ...]
    sources: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    def __repr__(self) -> str:
        return f"<{len(self.nodes)} nodes>"

    @property
    def writers(self) -> list[Tensor]:
        """Nodes whose results lie in memory of a source, which others may read too."""
        return [t for t in self.nodes if t.is_write]

    @property
    def is_read(self) -> list[bool]:
        return [t in self.results or t.is_write for t in self.nodes]

    def values(self, *arrays: np.ndarray) -> dict[Tensor, np.ndarray]:
        """The numbers of the sources and of all nodes, by their references; and of what ops of the
        card's own save."""
        computed = dict(zip(self.sources, arrays, strict=True))

        def value(t: Tensor) -> np.ndarray:
            if t not in computed:
                of = t.src[0] if t.op is SAVED else t
                assert of.op is not None
                results = getattr(of.op, "results", None) or (lambda *a, **p: [of.op.ref(*a, **p)])
                every = map(np.asarray, results(*map(value, of.src), **of.params))
                computed.update(zip((of, *of.saved), every, strict=False))
            return computed[t]

        for t in self.nodes:
            value(t)
        return computed

    def sites(self, site: CudaSite) -> list[CudaSite]:
        """The memory of each node, of that of the one that stands for them."""
        arrays = dict(zip(self.sources, site.src, strict=True))
        arrays |= zip(self.results, (site.out, *site.saved), strict=True)
        for t in self.writers:
            arrays[t] = arrays[t.src[0]]
        return [
            replace(
                site, node=t, out=arrays.get(t), src=tuple(_array(s, arrays) for s in t.src),
                saved=tuple(arrays.get(s) for s in t.saved),
            )
            for t in self.nodes
        ]  # fmt: skip


def _array(t: Tensor, arrays: Mapping[Tensor, Any]) -> Any:
    """Of a tensor, or of a view of one; None if it is in no memory."""
    if t in arrays or not t.is_view:
        return arrays.get(t)
    of = last_write(t)
    whole, size = arrays.get(of), t.dtype.numpy.itemsize
    start = (t.offset - of.offset) // size
    return None if whole is None else whole[start : start + span(t) // size]


def is_sum(t: Tensor) -> bool:
    """Whether a node adds to a leaf that lies as its result does."""
    return t.op is not None and t.op.name == "add" and t.src[0].shape == t.shape


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    """For samples: a leaf of random numbers."""
    return as_leaf(rng.standard_normal(shape))


def near(text: str) -> Pattern:
    """The pattern of a fusion, whose nodes stand near to each other."""
    return Pattern(text, reach=_REACH)


def rewrites(fusions: Iterable[Fusion], card: CudaBackend) -> Iterator[Rewrite]:
    """The fusions as a card has them: of nodes that it computes, which change leaves alone."""

    def holds(fusion: Fusion, m: Match) -> bool:
        writes = [t for t in m.nodes if t.is_write and not (fusion.adds and is_sum(t))]
        writes_are_views = all(t.op and t.op.memory is Memory.ALIAS for t in writes)
        of_leaves = all(root.op is None for t in m.nodes for root in changed_by(t))
        computes = writes_are_views and of_leaves and not any(map(card.refusal, m.nodes))
        return computes and fusion.serves(m, card.compute)

    return (Rewrite(f.pattern, partial(holds, f), partial(_replacements, f)) for f in fusions)


def _replacements(fusion: Fusion, m: Match) -> dict[Tensor, Tensor]:
    """What stands for each result that others read: that of the new node, or one that it saves.

    A node that writes into a source's memory becomes a view of it, after the new node.
    """
    nodes = m.nodes
    results = [t for t in nodes if m.is_read(t) and not t.is_write]
    results.sort(key=lambda t: not (t.op and t.op.memory in _OVERWRITING))  # else in their order
    inside = {s for t in nodes for s in t.saved if m.graph.users[s] and not m.is_read(s)}
    results += [s for t in nodes for s in t.saved if s not in inside]
    sources, changes = list[Tensor](), list[int]()
    for t in (*nodes[fusion.leads :], *nodes[: fusion.leads]):
        for i, s in enumerate(t.src):
            if maker(s) not in nodes:
                if (i == 0 and t.is_write) or (t.op and i in t.op.changes):
                    changes.append(len(sources))
                sources.append(s)
    of = Composition(tuple(nodes), tuple(sources), tuple(results))
    new = _op(fusion, tuple(changes))(*sources, of=of)
    views = {t: after(t.src[0], new) for t in nodes if t.is_write}
    return {**dict(zip(results, (new, *new.saved), strict=True)), **views}


@cache
def _op(fusion: Fusion, changes: tuple[int, ...]) -> OwnOp:
    kernel = CudaKernel(partial(_bind, fusion), scratch=fusion.scratch, shared=fusion.shared)
    return OwnOp(
        name=fusion.name, spec=_spec, saved=_saved, results=_results, samples=lambda rng: iter(()),
        refuses={"of": ()}, kernel=kernel, memory=fusion.memory, fuses=fusion.pattern.op_names,
        changes=changes, strided=True,
    )  # fmt: skip


def _spec(*src: Tensor, of: Composition) -> Spec:
    """The result as it was, of sources as they were."""
    if [(s.shape, s.dtype) for s in src] != [(s.shape, s.dtype) for s in of.sources]:
        raise ShapeError(f"{of!r} read {of.sources}, found {src}")
    return Spec(of.results[0].shape, of.results[0].dtype)


def _saved(*src: Tensor, of: Composition) -> tuple[Spec, ...]:
    return tuple(Spec(t.shape, t.dtype) for t in of.results[1:])


def _results(*arrays: np.ndarray, of: Composition) -> Iterator[np.ndarray]:
    values = of.values(*arrays)
    return (values[t] for t in of.results if t in values)


def _bind(fusion: Fusion, site: CudaSite) -> Call:
    of = site.node.params["of"]
    return fusion.bind(of.sites(site), of.is_read)
