"""A card's own ops of a LoRA step by their references: a gated unit and its gradients, adapted, and
those of experts, are in float64 what the plain graph computes."""

import numpy as np
import pytest
from card_patterns import patterns, sample_of
from extras import need

from pyggml.backends.cpu import CPU
from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES, F32
from pyggml.graph.graph import topological
from pyggml.graph.op import SAVED
from pyggml.graph.rewrite import rewrite
from pyggml.graph.table import by_table
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import in_float64
from pyggml.ops import (
    add,
    linear_cross_entropy,
    linear_cross_entropy_by_row,
    linear_soft_cross_entropy,
    mul,
    mul_mat,
    mul_mat_id,
    repeat_back,
    reshape,
    scale,
    swiglu,
)
from pyggml.ops.product.matmul import mul_mat_add
from pyggml.quants import quantize
from pyggml.runtime import Devices, bind, schedule

need("numba_cuda")
M, K, N, RANK = 20, 32, 64, 4


class Source:
    """Numbers for a graph, and the factors of its adapted products."""

    def __init__(self):
        self.rng, self.factors = np.random.default_rng(2), []

    def numbers(self, *shape):
        return leaf(self.rng.standard_normal(shape).astype(np.float32))

    def draw_packed(self, *shape):
        raw = quantize(self.rng.standard_normal(shape, np.float32), "Q8_0")
        return leaf(raw, dtype=DTYPES["Q8_0"])

    def adapt(self, x, n, k):
        a, b = self.numbers(RANK, k), self.numbers(n, RANK)
        self.factors += a, b
        u = scale(mul_mat(a, x), 1.5)
        return mul_mat_add(mul_mat(self.draw_packed(n, k), x), b, u)


def unit(keeps_u):
    """The loss's graph with the gradients of all factors and of a factor before the unit.

    keeps_u: whether A·h is kept for the gradient of B, or computed again of h
    """
    source = Source()
    numbers, adapt = source.numbers, source.adapt
    before = numbers(M, K)
    x = add(numbers(M, K), before)
    h = swiglu(adapt(x, N, K), adapt(x, N, K))
    y = adapt(h, K, N)
    parameters = [*source.factors, before]
    totals = [zeros(t.shape) for t in parameters]
    graph = build_backward(Graph.of(y), parameters, numbers(M, K), totals)
    again = (t for t in graph.readers[h] if t.op.name == "out_prod")  # as to save memory
    graph = rewrite(graph, {t: t.reading((swiglu(*h.src), t.src[1])) for t in again})
    if keeps_u:
        return graph
    u = y.src[2]
    of_b = [t for t in graph.readers[u] if t.op.name == "out_prod"]
    u_again = u.reading((mul_mat(u.src[0].src[0], swiglu(*h.src)),))
    return rewrite(graph, {t: t.reading((u_again, t.src[1])) for t in of_b})


def experts():
    """The graph of a mixture behind an adapted product, with the gradients of its factors, of the
    weights of the experts and of a factor before both."""
    source, (n_tokens, n_used, n_experts) = Source(), (40, 2, 3)
    before, weights = source.numbers(n_tokens, K), source.numbers(n_tokens, n_used, 1)
    ids = leaf(source.rng.integers(0, n_experts, (n_tokens, n_used), np.int32))
    x = scale(source.adapt(add(source.numbers(n_tokens, K), before), K, K), 0.05)
    rows = reshape(x, (n_tokens, 1, K))
    gate, up = (mul_mat_id(source.draw_packed(n_experts, N, K), rows, ids) for _ in range(2))
    h = mul(swiglu(gate, up), weights)
    y = repeat_back(mul_mat_id(source.draw_packed(n_experts, K, N), h, ids), (n_tokens, 1, K))
    parameters = [*source.factors, weights, before]
    totals = [zeros(t.shape) for t in parameters]
    y = reshape(y, (n_tokens, K))
    return build_backward(Graph.of(y), parameters, source.numbers(n_tokens, K), totals)


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


@pytest.mark.parametrize("keeps_u, n_of_a", [(True, 3), (False, 3), (True, 2)])
def test_each_pass_computes_what_the_graph_before_it_does(keeps_u, n_of_a, monkeypatch):
    """n_of_a: products that make gradients of A; where rows are many, one for gate and up."""
    from pyggml.backends.cuda.rewrites import LORA, SUM, joined_backs

    monkeypatch.setattr(joined_backs, "_MANY_ROWS", M if n_of_a == 2 else M + 1)
    graph, ops = unit(keeps_u), set()
    wanted = values(graph)
    for change in (*LORA, lambda graph: by_table(graph, [SUM])):
        graph = change(graph)
        ops |= {t.op.name for t in graph.nodes}
        for a, b in zip(values(graph), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * abs(b).max())
    assert ops >= {
        "wide_rows", "wide_gradient", "gated_gradients", "wide_product", "wide_back",
        "wide_back_add", "gradient_of_a_add", "gradient_of_b_add",
    }  # fmt: skip
    assert sum(t.op.name.startswith("gradient_of_a") for t in graph.nodes) == n_of_a
    assert {t.dtype is F32 for t in graph.nodes} == {True, False}
    assert {t.op.name for t in graph.nodes}.isdisjoint({"mul_mat", "out_prod", "out_prod_add"})


@pytest.mark.parametrize(
    "name",
    [name for name in patterns() if {"wide_", "gated"} & {name[:5], name.split("+")[-1][:5]}],
)
def test_nodes_with_a_wide_row_are_one(name, monkeypatch):
    from dry_card import DryCard

    from pyggml.backends.cuda.gemm import cublas

    monkeypatch.setattr(cublas, "_library", lambda: object())
    graph, _ = sample_of(name)
    joined = DryCard().rewritten(graph)
    assert name in {t.op.name for t in joined.nodes}
    for t, a, b in zip(graph.outputs, values(graph), values(joined), strict=True):
        if not t.is_write:
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * abs(b).max())


def test_experts_in_tiles_are_what_they_are_one_by_one():
    from pyggml.backends.cuda.rewrites import LORA
    from pyggml.backends.cuda.rewrites.narrow import narrow

    graph = experts()
    wanted, kinds = values(graph), {}
    for change in LORA:
        graph = change(graph)
        for a, b in zip(values(graph), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * abs(b).max())
        if change is narrow:
            kinds = {(t.op.name, t.dtype.name) for t in graph.nodes}
    assert kinds >= {
        ("weighted_unit", "BF16"), ("unit_gradients", "BF16"), ("mul_mat_id", "BF16"),
        ("mul_mat_id", "F32"), ("mul_mat_id_back", "BF16"), ("mul_mat_id_back", "F32"),
    }  # fmt: skip
    assert {name for name, _ in kinds}.isdisjoint({"swiglu", "swiglu_back_gate", "repeat"})


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(
    "loss", [linear_cross_entropy, linear_cross_entropy_by_row, linear_soft_cross_entropy]
)
def test_a_loss_whose_matrix_stays_unpacked(loss, softcap):
    """Losses, rows with their target on top, and gradients are those of the plain loss."""
    from pyggml.backends.cuda.ops.loss.head import with_lasting_matrix

    source = Source()
    h, w = source.numbers(M, K), source.draw_packed(N, K)
    targets = leaf((h.data @ in_float64(w).T).argmax(-1).astype(np.int32))
    targets.data[::3] = 7
    weights = leaf((np.arange(M) % 4 / M).astype(np.float32))
    wanted, how = (targets, weights), {}
    if loss is linear_soft_cross_entropy:
        several = leaf(np.stack([targets.data, (targets.data + 5) % N], axis=1))
        shares = leaf(source.rng.dirichlet(np.ones(3), M).astype(np.float32))
        wanted, how = (several, shares, weights), {"beta": softcap / 3}
    node = loss(h, w, *wanted, gradient=True, softcap=softcap, **how)
    program = bind(schedule(Graph.of(node, *node.saved), Devices([CPU()])))
    program()
    op = with_lasting_matrix(node).op
    made = list(op.results(*map(in_float64, node.src), **node.params))
    assert op.name == f"{node.op.name}_unpacked" and 0 < made[1] < M
    for found, t in zip(made, (node, *node.saved), strict=True):
        np.testing.assert_allclose(program.read(t), found, rtol=1e-4, atol=1e-6)
