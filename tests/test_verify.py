"""`verify` after every pass: each rule is broken on purpose in the graph of each pass."""

import ast
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from extras import need

import pyggml
from pyggml.errors import GraphError
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, I32
from pyggml.graph.op import SAVED, over_first
from pyggml.graph.tensor import Tensor, zeros
from pyggml.graph.verify import (
    GRAPH_RULES,
    PASSES,
    RULES,
    DeviceFacts,
    graph_pass,
    verifies,
    verify,
    verifying,
)
from pyggml.lora import LoraConfig, attach, train_tensors
from pyggml.lora.trainer.passes import Passes
from pyggml.ops import (
    OPS,
    add_inplace,
    flash_attn_ext,
    mul_mat,
    reshape,
    silu,
    sqr,
    transpose,
)

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden"


# -- what is planted -------------------------------------------------------------------------------

X, Y, SQUARE, WHOLE = zeros((4,)), zeros((4,)), zeros((4, 4)), zeros((4,), I32)
PLANTED = "planted"


def changed(t, **fields):
    """A tensor with wrong fields, and the name that a fault is to show."""
    for name, value in fields.items():
        setattr(t, name, value)
    return t.named(PLANTED)


def attention():
    q, span = zeros((4, 2, 8)), zeros((4, 2), I32)
    return flash_attn_ext(q, q, q, span, 0.3)


def of_another():
    return [changed(attention(), saved=attention().saved)]


def not_saved():
    t = attention()
    return [t, Tensor(t.saved[0].shape, F32, SAVED, (t,), name=PLANTED)]


def saving_more():
    t = silu(X)
    return [changed(t, saved=(Tensor((1,), F32, SAVED, (t,)),))]


def gaps():
    turned = transpose(SQUARE)
    return [turned, changed(OPS["cumsum"](SQUARE), src=(turned,))]


def changing():
    op, x = replace(OPS["silu"], changes=(0,)), sqr(X)
    return [x, op(x).named(PLANTED)]


def late():
    read, write = silu(X).named(PLANTED), add_inplace(X, Y)
    return [write, read]


# What is said of a tensor → the leaves and nodes that end with it. A leaf is met before the nodes.
TENSORS = {
    "is a leaf with": lambda: [changed(zeros((4,)), src=(X,))],
    "has an array of": lambda: [changed(zeros((4,)), data=np.zeros(3, np.float32))],
    "lies in another": lambda: [zeros((4,)).named(PLANTED)],
    "stands before": lambda: [silu(sqr(X)).named(PLANTED)],
    "has a wrong source": lambda: [changed(silu(X), src=(WHOLE,))],
    "has not the shape": lambda: [changed(silu(X), shape=(2,))],
    "has not the type": lambda: [changed(silu(X), dtype=I32)],
    "saves": saving_more,
    "saves another's": of_another,
    "is not saved by": not_saved,
    "is not where its op writes": lambda: [changed(OPS["cpy_into"](X, Y), base=None)],
    "writes over": lambda: [over_first(mul_mat(SQUARE, SQUARE)).named(PLANTED)],
    "reads gaps of": gaps,
    "owns memory, with": lambda: [changed(silu(SQUARE), strides=(4, 16))],
    "owns memory, but": lambda: [changed(silu(X), offset=4)],
    "lies not in its source": lambda: [changed(reshape(X, (2, 2)), offset=4)],
    "reaches out of": lambda: [changed(zeros((4,)), base=X, offset=4)],
    "changes what is no leaf": changing,
    "runs where it cannot": lambda: [silu(X).named(PLANTED)],
}
GRAPHS = {
    "a node is among": lambda g: replace(g, leaves=(*g.leaves, silu(X))),
    "a leaf is among": lambda g: replace(g, nodes=(*g.nodes, X)),
    "a tensor stands": lambda g: replace(g, nodes=(*g.nodes, g.nodes[-1])),
    "names and outputs": lambda g: replace(g, names=("loss",) * (len(g.outputs) + 1)),
    "a name is that": lambda g: replace(g, outputs=(*g.outputs[:1],) * 2, names=("loss", "loss")),
    "nothing in it": lambda g: replace(g, outputs=(*g.outputs, silu(X)), names=()),
}


def planted(graph, tensors):
    """The graph with further tensors, and the leaves that they read."""
    nodes = tuple(t for t in tensors if t.op is not None)
    read = (s for t in nodes for s in t.src if s.op is None)
    leaves = dict.fromkeys((*graph.leaves, *read, *(t for t in tensors if t.op is None)))
    return replace(graph, nodes=(*graph.nodes, *nodes), leaves=tuple(leaves))


# -- after every pass ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """Pass → a graph that it made: in a step of training and in generation, on the CPU and, where
    its packages are installed, for a card that is not there."""
    with pytest.MonkeyPatch.context() as patch, verifying():
        graphs = {}

        def note(graph, after, device=None, earlier=()):
            graphs.setdefault(after, graph)

        for module in ("pyggml.graph.verify", "pyggml.runtime.schedule"):
            patch.setattr(sys.modules[module], "verify", note)
        train("qwen3-F16")
        train("qwen3-F16", begin=lambda model: train_tensors(model, ["*"]))
        if has_cuda():
            from dry_card import DryCard

            from pyggml.backends.cuda.gemm import cublas
            from pyggml.backends.cuda.rewrites import gated_gradients

            patch.setattr(cublas, "_library", lambda: object())
            patch.setattr(gated_gradients, "LARGE", 0)  # each up is computed again, or kept
            card = DryCard()
            patch.setattr(card, "memory", lambda: (1 << 30, 1 << 30))
            patch.setattr(card, "own", lambda n_nodes: 0)
            train("qwen3-F16", card)
            train("qwen3-F16", card, begin=lambda model: train_tensors(model, ["*"]))
            train("qwen3moe", card)
        return graphs


def has_cuda():
    try:
        need("numba_cuda")
    except pytest.skip.Exception:
        return False
    return True


def train(name, *backends, begin=lambda model: attach(model, LoraConfig(rank=4))):
    """Build and plan the graphs of a step, with large tensors kept as BF16."""
    path = next(GOLDEN.glob(f"*/{name}.gguf"))
    trained = begin(pyggml.load(path, compute="bf16", backends=backends))
    Passes(trained.model, trained.parameters, 32)


def test_every_pass_is_verified(made):
    rooms = {name: change.__module__ or "" for name, change in PASSES.items()}
    passes = {name for name, room in rooms.items() if room.startswith("pyggml")}
    if not has_cuda():
        passes -= {name for name in passes if "cuda" in rooms[name]}
    assert set(made) == passes | {"split"}


def test_every_function_from_graph_to_graph_is_a_pass():
    """But for those that only run passes, or belong to one, and samples, which are drawn."""
    folders = "pyggml/backward", "pyggml/backends"
    functions = [
        node
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "Graph"
        and node.args.args[0].arg != "rng"
    ]  # fmt: skip
    passes = {f.name for f in functions if "graph_pass" in map(ast.unparse, f.decorator_list)}
    others = {f.name for f in functions} - passes
    assert passes >= {"build_backward", "rematerialise", "narrow", "thin_first"}
    assert others == {"training_graph", "with_substitutes", "rewritten"}


@pytest.mark.parametrize("message", TENSORS)
def test_a_wrong_tensor_is_named_after_every_pass(message, made):
    for after, graph in made.items():
        tensors = TENSORS[message]()
        bad = next(t for t in tensors if t.name == PLANTED)
        device = DeviceFacts(
            lambda t: (
                "no kernel" if (t.name, message) == (PLANTED, "runs where it cannot") else None
            ),
            lambda t, bad=bad: t is not bad or message != "lies in another",
        )
        with pytest.raises(GraphError, match=rf"^after {after}: <planted .*> {message}") as caught:
            verify(planted(graph, tensors), after, device)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("message", GRAPHS)
def test_a_wrong_graph_is_refused_after_every_pass(message, made):
    for after, graph in made.items():
        with pytest.raises(GraphError, match=rf"^after {after}: <Graph .*>: {message}"):
            verify(GRAPHS[message](graph), after)


def test_numbers_that_are_read_too_late_are_named_after_every_pass(made):
    """Of whole graphs; their parts keep the order."""
    for after, graph in made.items():
        with pytest.raises(GraphError, match=rf"^after {after}: <planted .*has written over them"):
            verify(planted(graph, late()), after)


def test_every_rule_is_broken_on_purpose():
    for rules, plants in ((RULES, TENSORS), (GRAPH_RULES, GRAPHS)):
        assert len(rules) == len(plants)
        for rule, message in zip(rules, plants, strict=True):
            assert rule.message.startswith(message.rstrip())


def test_what_a_pass_made_is_verified_only_when_asked_for():
    @graph_pass
    def spoil(graph):
        return planted(graph, TENSORS["has not the type"]())

    graph = Graph.of(silu(X))
    assert verifies(), "tests verify"
    try:
        with pytest.raises(GraphError, match="after spoil: <planted I32"):
            spoil(graph)
        with verifying(False):
            assert spoil(graph).nodes[-1].name == PLANTED
            with verifying(), pytest.raises(GraphError, match="after spoil"):
                spoil(graph)
    finally:
        del PASSES["spoil"]
