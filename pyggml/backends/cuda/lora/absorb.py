"""Wide matrices take in what makes them, where nothing else reads that:

    wide_rows(swiglu(gate, up), …)           the kernel computes the formula as it rounds
    wide_gradient(swiglu_back_gate(…), …)    likewise
    gradient_of_a(D, swiglu(…))              likewise
    cpy of a BF16 tensor to F32              is read as BF16

A product whose result only such kernels read, or a copy in BF16, is written in BF16 at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from pyggml.backends.cuda.lora.operands import FORMULAS
from pyggml.backends.cuda.lora.ops import absorbing
from pyggml.dtypes import BF16, F32
from pyggml.graph import Graph
from pyggml.op import SAVED
from pyggml.tensors import Tensor

_TAKES_IN = {"wide_rows": 0, "wide_gradient": 0, "gradient_of_a": 1}  # op -> the source
_MAY_ROUND = ("wide_product", "wide_back")


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
        self._rounded = {t for t in graph.nodes if t not in outputs and self._may_round(t)}

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

    def _may_round(self, t: Tensor) -> bool:
        """Whether all who read t would round it, or compute with it in their own registers."""
        if t.op is None or t.op.name not in _MAY_ROUND or not self._readers[t]:
            return False
        takers = [r for r in self._readers[t] if r in self._taken]
        return bool(takers) and all(r in takers or _rounds(r) for r in self._readers[t])

    def run(self) -> Graph:
        for t in self._graph.nodes:
            if t.op is SAVED or t in self._taken:
                continue
            if t in self._rounded:
                new = replace(self._anew(t), dtype=BF16, strides=())
            elif _rounds(t) and t.src[0] in self._rounded:
                self._new[t] = self._now(t.src[0])
                continue
            else:
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
        if at is None:
            return new
        made = t.src[at]
        if made in self._taken:
            assert made.op is not None
            return absorbing(new, made.op.name, [self._narrow(s) for s in made.src], at)
        narrow = self._narrow(made) if t.op.name == "gradient_of_a" else made
        return new if narrow is made else new.reading((*new.src[:at], narrow, *new.src[at + 1 :]))

    def _narrow(self, t: Tensor) -> Tensor:
        """The BF16 tensor of which t, or what t is a view of, is a copy; else t as it now is."""
        copy = t.src[0] if t.is_view and t.is_contiguous else t
        if copy.op is None or copy.op.name != "cpy" or copy.src[0].dtype is not BF16:
            return self._now(t)
        source = self._now(copy.src[0])
        if copy is t or not source.is_contiguous or t.n_elements != source.n_elements:
            return source if copy is t else self._now(t)
        view = replace(t, src=(source,), dtype=BF16, strides=(), base=source.root, data=None)
        self._steps.append(view)
        return view


def _rounds(t: Tensor) -> bool:
    """Whether t is a copy in BF16 of an F32 tensor."""
    return t.op is not None and t.op.name == "cpy" and t.dtype is BF16 and t.src[0].dtype is F32
