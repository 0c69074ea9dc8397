"""The ops of LoRA's wide products by their references: a gated unit and its gradients, adapted, are
in float64 what the plain graph computes."""

import numpy as np
from extras import need

from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.graph.graph import topological
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import in_float64
from pyggml.ops import add, mul_mat, scale, swiglu
from pyggml.ops.product.matmul import mul_mat_add
from pyggml.quants import quantize

need("numba_cuda")
M, K, N, RANK = 20, 32, 64, 4


def unit():
    """The loss's graph with the gradients of all factors and of a factor before the unit."""
    rng, factors = np.random.default_rng(2), []

    def numbers(*shape):
        return leaf(rng.standard_normal(shape).astype(np.float32))

    def adapted(x, n, k):
        raw = quantize(rng.standard_normal((n, k), np.float32), "Q8_0")
        a, b = numbers(RANK, k), numbers(n, RANK)
        factors.extend((a, b))
        u = scale(mul_mat(a, x), 1.5)
        return mul_mat_add(mul_mat(leaf(raw, dtype=DTYPES["Q8_0"]), x), b, u)

    before = numbers(M, K)
    x = add(numbers(M, K), before)
    h = swiglu(adapted(x, N, K), adapted(x, N, K))
    y = adapted(h, K, N)
    parameters = [*factors, before]
    totals = [zeros(t.shape) for t in parameters]
    graph = build_backward(Graph.of(y), parameters, numbers(M, K), totals)
    again = (t for t in graph.readers[h] if t.op.name == "out_prod")  # as to save memory
    return rewrite(graph, {t: t.reading((swiglu(*h.src), t.src[1])) for t in again})


def values(graph):
    """Of the outputs, in float64; what an op saves, by the card's own ops alone."""
    known = {}
    for t in topological(*graph.outputs):
        if t.op is None:
            known[t] = in_float64(t)
        elif t.op is not SAVED:
            arrays = [known[s] for s in t.src]
            if hasattr(t.op, "results"):
                known |= zip((t, *t.saved), t.op.results(*arrays, **t.params), strict=True)
            else:
                known[t] = np.asarray(t.op.ref(*arrays, **t.params))
    return [known[t] for t in graph.outputs]


def test_each_pass_computes_what_the_graph_before_it_does():
    from pyggml.backends.cuda.rewrites import LORA
    from pyggml.backends.cuda.rewrites.sums import with_sums

    graph, ops = unit(), set()
    wanted = values(graph)
    for change in (*LORA, lambda graph: with_sums(graph, None)):
        graph = change(graph)
        ops |= {t.op.name for t in graph.nodes}
        for a, b in zip(values(graph), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * abs(b).max())
    assert ops >= {
        "wide_rows", "wide_gradient", "gated_gradients", "wide_product", "wide_back",
        "wide_back_add", "gradient_of_a_add", "gradient_of_b_add",
    }  # fmt: skip
    assert {t.dtype is F32 for t in graph.nodes} == {True, False}
