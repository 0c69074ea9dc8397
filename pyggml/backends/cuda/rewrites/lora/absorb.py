"""Wide matrices take in what makes them, where nothing else reads that:

wide_rows(swiglu(gate, up), …)           the kernel computes the formula as it rounds
wide_gradient(swiglu_back_gate(…), …)    likewise
gradient_of_a(D, swiglu(…))              likewise
"""

from __future__ import annotations

from collections import defaultdict

from pyggml.backends.cuda.rewrites.lora.operands import FORMULAS
from pyggml.backends.cuda.rewrites.lora.ops import absorbing
from pyggml.graph import Graph
from pyggml.graph.op import SAVED
from pyggml.graph.tensor import Tensor

_TAKES_IN = {"wide_rows": 0, "wide_gradient": 0, "gradient_of_a": 1}  # op -> the source


def with_formulas(graph: Graph) -> Graph:
    """The graph of with_wide_products, with fewer results in memory."""
    return _Absorber(graph).run()


class _Absorber:
    def __init__(self, graph: Graph) -> None:
        self._graph, self._new = graph, dict[Tensor, Tensor]()
        self._steps: list[Tensor] = []
        readers: dict[Tensor, list[Tensor]] = defaultdict(list)
        for t in graph.nodes:
            if t.op is not SAVED:
                for s in dict.fromkeys(t.src):
                    readers[s].append(t)
        self._readers, outputs = readers, set(graph.outputs)
        self._taken = {t for t in graph.nodes if t not in outputs and self._is_taken(t)}

    def _is_taken(self, t: Tensor) -> bool:
        """Whether the only reader of t can compute it."""
        readers = self._readers[t]
        if t.op is None or t.op.name not in FORMULAS or t.params or len(readers) != 1:
            return False
        op = readers[0].op
        assert op is not None
        at = _TAKES_IN.get(op.name)
        whole = all(s.is_contiguous and s.shape == t.shape for s in t.src)
        return at is not None and readers[0].src[at] is t and whole

    def run(self) -> Graph:
        for t in self._graph.nodes:
            if t.op is SAVED or t in self._taken:
                continue
            new = self._anew(t)
            self._steps.append(new)
            if new is not t:
                self._new[t] = new
                self._new |= zip(t.saved, new.saved, strict=True)
        outputs = tuple(self._now(t) for t in self._graph.outputs)
        return Graph.of(*outputs, steps=self._steps).noted(self._graph.notes)

    def _now(self, t: Tensor) -> Tensor:
        return self._new.get(t, t)

    def _anew(self, t: Tensor) -> Tensor:
        src = tuple(self._now(s) for s in t.src)
        new = t if src == t.src else t.reading(src)
        assert t.op is not None
        at = _TAKES_IN.get(t.op.name)
        if at is None or t.src[at] not in self._taken:
            return new
        made = t.src[at]
        assert made.op is not None
        return absorbing(new, made.op.name, [self._now(s) for s in made.src], at)
