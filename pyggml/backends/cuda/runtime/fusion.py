"""Fusions: nodes that one kernel computes, so that numbers stay in registers between them.

A `Fusion` names the ops of such nodes, in their order, and its kernel. Each family of ops declares
its own; `pyggml.backends.cuda.rewrites` has their order. In a graph, one node stands for them all.
Its op is called "add+rms_norm_mul", say, and its reference is theirs, one after the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from pyggml.backends.cuda.runtime.kernel import Compute, CudaKernel, CudaSite, OwnOp
from pyggml.backends.kit.kernels import no_scratch, nothing_shared
from pyggml.backends.kit.places import span
from pyggml.errors import ShapeError
from pyggml.graph import Graph
from pyggml.graph.call import Call
from pyggml.graph.op import SAVED, Memory, Spec
from pyggml.graph.overwriting import last_write
from pyggml.graph.tensor import Tensor, as_leaf
from pyggml.ops import after

_OVERWRITING = Memory.INPLACE, Memory.INPLACE_FIRST


@dataclass(frozen=True, slots=True)
class Fusion:
    """Nodes that one kernel computes.

    ops      their names, in the order of the graph. Each but the last gives its result to a later
             one, or shares a source with it
    serves   (nodes, is_read, compute) -> whether the kernel computes these. is_read: for each
             node, whether others read its result; else the kernel need not write it
    bind     (sites, is_read) -> Call. A result that no other reads has no array: its site has None
    sample   (rng) -> a graph with such nodes, which may change leaves
    memory   where the result of the new node may lie. It is the first that may overwrite a source
             by itself, else the first. FRESH: nowhere but in memory of its own. INPLACE: the kernel
             reads number i of each source before it writes number i of the result, and no other
             thread reads it. INPLACE_FIRST: so it does of the first source
    leads    the node whose sources are the first ones
    scratch  as CudaKernel has it, of the new node
    shared   likewise
    """

    ops: tuple[str, ...]
    serves: Callable[[Sequence[Tensor], Sequence[bool], Compute], bool]
    bind: Callable[[Sequence[CudaSite], Sequence[bool]], Call]
    sample: Callable[[np.random.Generator], Graph]
    memory: Memory = Memory.FRESH
    leads: int = 0
    scratch: Callable[[Tensor, Compute], int] = no_scratch
    shared: Callable[[Tensor, Compute], tuple[int, str]] = nothing_shared

    @property
    def name(self) -> str:
        return "+".join(self.ops)


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
        """The numbers of all nodes, by their references."""
        known = dict(zip(self.sources, arrays, strict=True))

        def value(t: Tensor) -> np.ndarray:
            if t not in known:
                assert t.op is not None
                known[t] = np.asarray(t.op.ref(*map(value, t.src), **t.params))
            return known[t]

        return {t: value(t) for t in self.nodes}

    def sites(self, site: CudaSite) -> list[CudaSite]:
        """The memory of each node, of that of the one that stands for them."""
        arrays = dict(zip(self.sources, site.src, strict=True))
        arrays |= zip(self.results, (site.out, *site.saved), strict=True)
        for t in self.writers:
            arrays[t] = arrays[t.src[0]]
        return [
            replace(
                site, node=t, out=arrays.get(t), src=tuple(_array(s, arrays) for s in t.src),
                saved=tuple(arrays[s] for s in t.saved),
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


def drawn(rng: np.random.Generator, *shape: int) -> Tensor:
    """For samples: a leaf of random numbers."""
    return as_leaf(rng.standard_normal(shape))


def maker(t: Tensor) -> Tensor:
    """The node whose kernel wrote the numbers of t; a leaf is its own."""
    t = last_write(t)
    return t.src[0] if t.op is SAVED else t


def replacements(
    fusion: Fusion, nodes: Sequence[Tensor], is_read: Sequence[bool]
) -> dict[Tensor, Tensor]:
    """What stands for each result that others read: that of the new node, or one that it saves.

    A node that writes into a source's memory becomes a view of it, after the new node.
    """
    results = [t for t, read in zip(nodes, is_read, strict=True) if read and not t.is_write]
    results.sort(key=lambda t: not (t.op and t.op.memory in _OVERWRITING))  # else in their order
    results += [s for t in nodes for s in t.saved]
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
        refuses={"of": ()}, kernel=kernel, memory=fusion.memory, fuses=fusion.ops, changes=changes,
        strided=True,
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
    return (values[t] for t in of.results if t.op is not SAVED)


def _bind(fusion: Fusion, site: CudaSite) -> Call:
    of = site.node.params["of"]
    return fusion.bind(of.sites(site), of.is_read)
