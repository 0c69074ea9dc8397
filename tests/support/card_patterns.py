"""The ops that a card's passes put into graphs, and graphs in which they do."""

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.dtypes import F32
from pyggml.graph.op import SAVED, changed_by
from pyggml.graph.tensor import as_leaf, zeros
from pyggml.ops import add_inplace, out_prod, scale


def own_ops():
    """The ops that a card's passes put into graphs, by name."""
    from pyggml.backends.cuda import rewrites
    from pyggml.backends.cuda.runtime.kernel import OWN_OPS

    assert rewrites.FUSIONS, "they are declared"
    return OWN_OPS


RNG = np.random.default_rng(11)


def numbers(*shape):
    return as_leaf(RNG.standard_normal(shape))


def _summed(rng):
    product = out_prod(*(as_leaf(rng.standard_normal(shape)) for shape in ((3, 7), (3, 5))))
    return Graph.of(add_inplace(zeros((5, 7)), product))


def patterns():
    """By the name of the op that stands for its nodes: what makes the graph of a pattern."""
    from pyggml.backends.cuda.rewrites import FUSIONS

    return {fusion.name: fusion.sample for fusion in FUSIONS} | {"out_prod_add": _summed}


def ops_named(pattern):
    """The names of the ops that a pattern looks for."""
    return {op for lines in pattern.ways for line in lines.values() for op in line.ops}


def sample_of(name):
    """The graph of a pattern, the same each time, and the leaves that it changes."""
    graph = patterns()[name](np.random.default_rng(11))
    return graph, [*dict.fromkeys(root for t in graph.nodes for root in changed_by(t))]


def with_nodes_before(graph):
    """The graph with a node in place of each leaf of random numbers, so that its memory is free."""
    changed = {root for t in graph.nodes for root in changed_by(t)}
    known = {}

    def anew(t):
        if t.op is SAVED:
            return anew(t.src[0]).saved[t.src[0].saved.index(t)]
        if t not in known and t.op is not None:
            known[t] = t.reading(tuple(map(anew, t.src)))
        elif t not in known:
            known[t] = scale(t, 1.0) if t.dtype is F32 and t not in changed else t
        return known[t]

    return Graph.of(*map(anew, graph.outputs))
