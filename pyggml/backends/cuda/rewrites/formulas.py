"""Wide matrices take in what makes them, where nothing else reads that:

wide_rows(swiglu(gate, up), …)           the kernel computes the formula as it rounds
wide_gradient(swiglu_back_gate(…), …)    likewise
gradient_of_a(D, swiglu(…))              likewise
"""

from pyggml.backends.cuda.ops.lora.operands import FORMULAS
from pyggml.backends.cuda.runtime.kernel import again, is_of
from pyggml.graph import Graph
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import Tensor
from pyggml.graph.verify import graph_pass

_TAKES_IN = {"wide_rows": 0, "wide_gradient": 0, "gradient_of_a": 1}  # op -> the source


@graph_pass
def with_formulas(graph: Graph) -> Graph:
    """The graph of with_wide_products, with fewer results in memory."""
    return rewrite(graph, {t: _absorb(t) for t in graph.nodes if _takes_in(t, graph)})


def _takes_in(t: Tensor, graph: Graph) -> bool:
    """Whether t can compute one of its sources, which no other reads."""
    if not is_of(t, *_TAKES_IN):
        return False
    x = t.src[_operand(t)]
    is_formula = is_of(x, *FORMULAS) and not x.params and graph.is_only_for(x, t)
    return is_formula and all(s.is_contiguous and s.shape == x.shape for s in x.src)


def _absorb(t: Tensor) -> Tensor:
    at = _operand(t)
    x = t.src[at]
    assert x.op is not None
    return again(t, *t.src[:at], *x.src, *t.src[at + 1 :], formula=x.op.name)


def _operand(t: Tensor) -> int:
    assert t.op is not None
    return _TAKES_IN[t.op.name]
