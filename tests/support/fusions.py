"""Graphs of a card's fusions on the host: each fused node as the nodes that it stands for."""

from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite


def unfused(graph):
    """The graph with the nodes of all fusions as they were; what these read is what it is now."""
    replacements = {}
    for t in graph.nodes:
        if "of" in t.params:
            replacements |= _apart(t, graph)
    return rewrite(graph, replacements)


def _apart(t, graph):
    of = t.params["of"]
    known = dict(zip(of.sources, t.src, strict=True))

    def anew(s):
        if s not in known and s.op is SAVED:
            return anew(s.src[0]).saved[s.src[0].saved.index(s)]
        if s not in known:
            known[s] = s.reading(tuple(map(anew, s.src)))
        return known[s]

    found = {new: anew(old) for old, new in zip(of.results, (t, *t.saved), strict=True)}
    written = {known[w.src[0]]: anew(w) for w in of.writers}
    views = (r for r in graph.readers[t] if r.op.name == "after" and r.src[0] in written)
    return found | {r: written[r.src[0]] for r in views}
