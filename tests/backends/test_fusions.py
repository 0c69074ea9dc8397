"""Nodes that one kernel of a card computes: what they stand for, and their references."""

from pathlib import Path

import numpy as np
import pytest
from card_patterns import (
    numbers,
    ops_named,
    own_ops,
    patterns,
    sample_of,
    with_nodes_before,
)
from extras import need

import pyggml
from pyggml.alloc import plan as make_plan
from pyggml.backends.cpu import CPU
from pyggml.generation import Session
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F16
from pyggml.graph.op import OPS, SAVED, Memory, changed_by
from pyggml.graph.tensor import leaf, zeros
from pyggml.look.check import in_float64
from pyggml.lora import LoraConfig, attach, loss_and_grads
from pyggml.ops import (
    add,
    add_inplace,
    mul_mat,
    out_prod,
    reshape,
    rms_norm_mul,
    scale,
    set_rows,
)
from pyggml.ops.attention.rope import rope_apply, rope_table
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.quants import dequantize
from pyggml.runtime import Devices, results

need("numba_cuda")
PATTERNS = patterns()
ON_THE_HOST = [name for name in PATTERNS if own_ops().keys().isdisjoint(name.split("+"))]
GOLDEN = Path(__file__).parents[1] / "golden"
PEERS = "exaone", "gemma3", "granite", "olmo2", "qwen3moe"
MODELS = sorted((*GOLDEN.glob("models/*-*_*.gguf"), *(GOLDEN / f"peers/{p}.gguf" for p in PEERS)))
TOKENS = np.arange(20) * 7 % 40


HALVES = 4e-3  # of a row's greatest number: cached in float16, or copied in bfloat16


@pytest.fixture
def dry(monkeypatch):
    """A card that is not there, as it were with cuBLAS: it multiplies nothing."""
    from dry_card import DryCard

    from pyggml.backends.cuda.gemm import cublas

    monkeypatch.setattr(cublas, "_library", lambda: object())
    return DryCard()


@pytest.fixture
def on_host(monkeypatch):
    """Makes the host compute a graph as a card has it, node by node; the ops of fused nodes."""
    from fusions import unfused

    plain = CPU.rewritten

    def compute(card):
        found = set()

        def rewritten(host, graph):
            graph = card.rewritten(graph)
            found.update(t.op.name for t in graph.nodes if "of" in t.params)
            return plain(host, unfused(graph))

        monkeypatch.setattr(CPU, "rewritten", rewritten)
        return found

    return compute


def fused_node(graph, name):
    (node,) = [t for t in graph.nodes if t.op is not None and t.op.name == name]
    return node


@pytest.mark.parametrize("name", ON_THE_HOST)
def test_what_a_fused_node_stands_for_computes_the_same(name, dry, on_host):
    (graph, changed), (same, changed_too) = sample_of(name), sample_of(name)
    assert name in {t.op.name for t in dry.rewritten(graph).nodes}
    wanted = [*results(graph, Devices([CPU()])), *map(array, changed)]
    on_host(dry)
    found = [*results(same, Devices([CPU()])), *map(array, changed_too)]
    exact = name != "out_prod_add"  # a sum that begins with what is added to
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0 if exact else 1e-5)


@pytest.mark.parametrize("name", [name for name in ON_THE_HOST if "+" in name])
def test_a_reference_is_that_of_the_nodes(name, dry):
    """What the new node's op says that it computes is what the host computes."""
    graph, _ = sample_of(name)
    node = fused_node(dry.rewritten(graph), name)
    assert "+".join(node.op.fuses) == name
    assert len(node.src) == len(node.params["of"].sources)
    leaves = [s for s in node.src if s.op is None]
    sources = results(Graph.of(*(s for s in node.src if s.op is not None)), Devices([CPU()]))
    computed = iter(sources)
    arrays = [in_float64(s) if s in leaves else next(computed).astype(float) for s in node.src]
    wanted = node.op.results(*arrays, **node.params)
    old = [t for t in node.params["of"].results if t.op is not SAVED]
    for t, a, b in zip(old, results(Graph.of(*old), Devices([CPU()])), wanted, strict=True):
        assert a.shape == b.shape
        a = dequantize(a, "BF16") if t.dtype is BF16 else a
        allowed = HALVES if "set_rows" in name or t.dtype is BF16 else 1e-5
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed * abs(b).max())
    np.testing.assert_array_equal(
        node.op.ref(*arrays, **node.params), next(iter(node.op.results(*arrays, **node.params)))
    )


def place(t, plan):
    owner = t.root
    start = plan.offsets[owner] + t.offset
    return start, start + t.n_bytes


@pytest.mark.parametrize("name", [name for name in PATTERNS if "+" in name])
def test_a_result_lies_where_no_source_does_that_is_read_after_it(name, dry):
    """But where the kernel reads each number before it writes there: at the same place, whole."""
    graph = dry.rewritten(with_nodes_before(sample_of(name)[0]))
    plan, node = make_plan(graph, dry), fused_node(graph, name)
    written = [place(t, plan) for t in (node, *node.saved)]
    for i, s in enumerate(node.src):
        if s.root.op is None:
            continue
        start, stop = place(s, plan)
        may = node.op.memory is Memory.INPLACE or (i == 0 and node.op.memory is not Memory.FRESH)
        for n, w in enumerate(written):
            apart = w[1] <= start or stop <= w[0]
            assert apart or (may and n == 0 and w == (start, stop)), (i, s)


def dying(*shape):
    return scale(numbers(*shape), 1.0)


def heads():
    """As many of queries as of keys and values; others read the queries, too."""
    table = rope_table(leaf(np.array([3, 7], np.int32)), n_dims=8)
    ids, q, k, v = leaf(np.array([4, 1], np.int32)), *(dying(2, 3, 8) for _ in range(3))
    q_turned, k_turned = (rope_apply(rms_norm_mul(x, numbers(8)), table, "neox") for x in (q, k))
    puts = (set_rows(zeros((6, 24), F16), reshape(x, (2, 24)), ids) for x in (k_turned, v))
    return Graph.of(q_turned, *puts, scale(q, 2.0))


def residual():
    """Others read what is added, too."""
    added = dying(1, 256)
    w = packed_leaf(np.random.default_rng(11), (256, 256), "Q4_K")
    y = mul_mat(w, dying(1, 256))
    return Graph.of(add(added, y), scale(added, 2.0))


@pytest.mark.parametrize(("make", "name"), [
    (heads, "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows"),
    (residual, "mul_mat+add"),
])  # fmt: skip
def test_a_kernel_that_bears_one_source_below_its_result_gets_no_other(make, name, dry):
    graph = dry.rewritten(make())
    plan, node = make_plan(graph, dry), fused_node(graph, name)
    start, stop = place(node, plan)
    for s in node.src:
        if s.root.op is not None:
            first, last = place(s, plan)
            assert last <= start or stop <= first, s


def logits(path):
    """Of a prompt and a token."""
    session = Session(pyggml.load(path, compute="f32"), len(TOKENS))
    return [session.feed(TOKENS[a:b]) for a, b in ((0, 7), (7, 8))]


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_a_model_with_fused_nodes_computes_the_same(path, dry, on_host):
    wanted, found = logits(path), on_host(dry)
    for a, b in zip(logits(path), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert found


def test_a_step_of_training_computes_the_same(on_host):
    from dry_card import DryCard

    def step():
        model = pyggml.load(GOLDEN / "models/qwen3-F16.gguf", compute="f32")
        return loss_and_grads(attach(model, LoraConfig(rank=4)).model, TOKENS)

    (loss, wanted), found = step(), on_host(DryCard("f32"))
    same, gradients = step()
    assert loss == same and found >= {"rms_norm_mul_back+add", "swiglu_back_gate+swiglu"}
    for key, g in gradients.items():
        np.testing.assert_allclose(g, wanted[key], rtol=0, atol=1e-5 * abs(wanted[key]).max())


def test_a_result_that_others_read_is_made(dry):
    total, product = zeros((5, 7)), out_prod(numbers(3, 7), numbers(3, 5))
    graph = Graph.of(add_inplace(total, product), scale(product, 2.0))
    assert "out_prod_add" not in {t.op.name for t in dry.rewritten(graph).nodes}


def test_nodes_that_another_one_stands_between_stay_apart(dry):
    """The sum needs the norm of the gradient twice, once through another node."""
    from pyggml.ops.norm.norm_mul import rms_norm_mul_back

    x, w, dy = numbers(6, 40), numbers(40), numbers(6, 40)
    back = rms_norm_mul_back(x, w, dy, eps=1e-3)
    graph = dry.rewritten(Graph.of(add(scale(back, 2.0), back)))
    assert [t.op.name for t in graph.nodes] == ["rms_norm_mul_back", "scale", "add"]


@pytest.mark.parametrize("name", [name for name in PATTERNS if "+" in name])
def test_a_fused_node_changes_what_its_nodes_do(name, dry):
    node = fused_node(dry.rewritten(sample_of(name)[0]), name)
    apart = [root for t in node.params["of"].nodes for root in changed_by(t)]
    assert changed_by(node) == apart
    assert bool(apart) == any(op in name for op in ("set_rows", "advance", "gradient_of"))


def test_every_op_that_a_table_names_is_one():
    from pyggml.backends.cuda import rewrites

    tables = *rewrites.FUSIONS, *rewrites.EXPERT_UNITS, rewrites.GATED, rewrites.FORMULA
    named = {op for each in (*tables, rewrites.SUM) for op in ops_named(each.pattern)}
    assert named <= OPS.keys() | own_ops().keys() | {"saved"}
