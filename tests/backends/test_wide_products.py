"""A LoRA step's graph as a card computes it: every adapted product is found."""

from collections import Counter
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from extras import reason

import pyggml
from pyggml.backends.cpu import CPU
from pyggml.backward import Keep
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16
from pyggml.graph.op import changed_by
from pyggml.graph.tensor import leaf
from pyggml.lora import LoraConfig, attach
from pyggml.lora.trainer.passes import Passes
from pyggml.ops import add_inplace, cpy, mul_mat, scale
from pyggml.runtime import Devices, bind, schedule

GOLDEN = Path(__file__).parents[1] / "golden/models"
pytest.importorskip("numba_cuda", reason=reason("numba_cuda"))


def graphs(name, n_tokens=16, keep=Keep.COSTLY, **settings):
    """Training's graph, the same with wide products, and the number of adapted matrices."""
    from pyggml.backends.cuda.rewrites import LORA

    model = pyggml.load(GOLDEN / f"{name}.gguf", compute="bf16")
    adapter = attach(model, LoraConfig(rank=4, alpha=6.0, **settings))
    with patch.object(
        Devices, "have_copies", True
    ):  # of a card, whose gradients are added to zeros
        graph = Passes(adapter.model, adapter.parameters, n_tokens, keep=keep).training.graph
    wide = graph
    for rewrite in LORA:
        wide = rewrite(wide)
    return graph, wide, len(adapter.parameters.tensors) // 2


def ops_of(graph):
    return Counter(t.op.name for t in graph.nodes)


def gradients_in(graph):
    """The products whose gradients are in wide matrices."""
    makers = (t for t in graph.nodes if t.op.name in ("wide_gradient", "gated_gradients"))
    return sum(len(t.params["scales"]) for t in makers)


@pytest.mark.parametrize("name", ["llama-Q8_0", "qwen2-Q4_K_M", "qwen3-F16"])
def test_every_adapted_product_is_joined(name):
    graph, wide, n_adapted = graphs(name)
    found = ops_of(wide)
    assert found["gradient_of_a"] == found["gradient_of_b"] == n_adapted
    assert found["wide_product"] == n_adapted
    assert gradients_in(wide) == n_adapted
    assert found["gated_gradients"] == n_adapted // 7  # that many layers
    n_layers = n_adapted // 7
    assert found["wide_back"] == 4 * n_layers - 1 and not found["wide_back_add"]
    assert not found["mul_mat_add"] and not found["out_prod_add"]
    assert not found["swiglu"] and not found["swiglu_back_gate"]
    assert [t.shape for t in wide.outputs] == [t.shape for t in graph.outputs]


def test_every_product_of_a_layer_that_is_computed_again_is_joined():
    """The last of a layer is not computed again itself, but its gradients are the same ops."""
    _, wide, n_adapted = graphs("qwen3-F16", keep=Keep.LAYERS)
    found = ops_of(wide)
    assert found["gradient_of_a"] == found["gradient_of_b"] == n_adapted
    assert found["gated_gradients"] == n_adapted // 7
    assert gradients_in(wide) == n_adapted
    names = {"mul_mat", "mul_mat_add", "out_prod", "out_prod_add", "swiglu"}
    assert names.isdisjoint(found)
    loss = wide.nodes.index(wide.outputs[0])
    kept = {s.root for t in wide.nodes[loss + 1 :] for s in t.src} & {*wide.nodes[:loss]}
    assert kept and all(t.dtype.name == "BF16" for t in kept if t.n_bytes > 1024), "boundaries"


def test_what_is_rounded_where_it_is_read_is_bfloat16():
    _, wide, _ = graphs("qwen3-F16", n_tokens=64)
    types = {t.op.name: set() for t in wide.nodes}
    for t in wide.nodes:
        types[t.op.name].add(t.dtype.name)
    assert types["gated_gradients"] == types["wide_rows"] == {"BF16"}
    assert types["add"] == {"F32"}  # residual sums, and gradients of factors
    assert types["cpy"] == {"BF16"}  # copies of residual sums; nothing is widened again
    loss = wide.nodes.index(wide.outputs[0])
    for t in wide.nodes[loss + 1 :]:
        if t.op.name.startswith("rms_norm_mul"):
            assert t.src[0].dtype.name == "BF16"
    for t in wide.nodes[:loss]:
        if t.op.name == "add":
            assert all(wide.nodes.index(r) <= loss for r in wide.nodes if t in r.src)


def test_gradients_that_take_in_a_formula_stay_apart():
    """As where a unit's gradients are not one kernel: its value is read by others too."""
    from pyggml.backends.cuda.rewrites import LORA
    from pyggml.backward import training_graph
    from pyggml.look.gradients import loss_graph
    from pyggml.models.low_rank import tensors_of_adapters

    model = pyggml.load(GOLDEN / "llama-Q8_0.gguf", compute="bf16")
    model = attach(model, LoraConfig(rank=4, alpha=6.0)).model
    parameters = tensors_of_adapters(model.adapters)
    graph = training_graph(loss_graph(model, np.arange(17), parameters=parameters), parameters)
    for rewrite in LORA:
        graph = rewrite(graph)
    taken_in = [t for t in graph.nodes if t.params.get("formula", "").startswith("swiglu")]
    assert "wide_gradient" in {t.op.name for t in taken_in}
    joined = [t for t in graph.nodes if t.op.name == "wide_gradient" and len(t.src) == 6]
    assert joined, "of q, k and v"


def test_a_large_up_is_computed_again_for_its_gradients(monkeypatch):
    from pyggml.backends.cuda.rewrites import gated_gradients as join

    monkeypatch.setattr(join, "LARGE", 0)
    _, wide, n_adapted = graphs("qwen3-F16")
    assert ops_of(wide)["wide_product"] == n_adapted + n_adapted // 7
    loss = wide.nodes.index(wide.outputs[0])
    for t in wide.nodes:
        if t.op.name == "gated_gradients":
            _, up, _ = t.src[:3]
            assert wide.nodes.index(up) > loss and up.op.name == "wide_product"
            assert all(wide.nodes.index(s) < wide.nodes.index(t) for s in up.src if s.op)


def test_sums_of_all_numbers_of_columns_have_room_beside_a_ticket():
    from pyggml.backends.cuda.ops.lora import wide

    every = range(wide.TILE_COLUMNS, wide.MOST_COLUMNS + 1, wide.TILE_COLUMNS)
    forms = [(wide.form_of(m, 2048, n), n) for m in (16, 1025, 8192) for n in every]
    taken = [4 * form.n_warps * wide.ROWS * form.groups * n + 4 for form, n in forms]
    assert max(taken) <= 48 << 10


def test_dropout_keeps_products_apart():
    graph, wide, _ = graphs("llama-Q8_0", dropout=0.1)
    assert ops_of(wide) == ops_of(graph) and wide is graph


def test_few_rows_stay_as_they_are():
    graph, wide, _ = graphs("llama-Q8_0", n_tokens=15)
    assert wide is graph


class Doubling(CPU):
    def rewritten(self, graph):
        (y,) = graph.outputs
        return Graph.of(scale(y.src[0], 2 * y.params["s"]))


def test_a_schedule_reads_the_outputs_of_the_rewritten_graph():
    y = scale(leaf(np.float32([1, 2])), 3.0)
    program = bind(schedule(Graph.of(y), Devices([Doubling()])))
    program()
    np.testing.assert_array_equal(program.read(y), [6, 12])


def products(graph):
    return [t for t in graph.nodes if t.op.name.startswith(("wide_product", "wide_back"))]


@pytest.fixture
def card(monkeypatch):
    """A card that is not there, with a GiB; `card.free` can be set."""
    from dry_card import DryCard

    card = DryCard()
    card.free = 1 << 30
    monkeypatch.setattr(card, "memory", lambda: (card.free, 1 << 30))
    monkeypatch.setattr(card, "own", lambda n_nodes: 0)
    return card


def test_weights_stay_unpacked_where_there_is_room(card):
    from pyggml.alloc import plan
    from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights

    _, graph, n_adapted = graphs("qwen3-F16")
    lasting = with_unpacked_weights(graph, card)
    assert all(t.params["unpacked"] for t in products(lasting))
    n_backs = n_adapted // 7 * 4 - 1  # no gradient flows on from the first layer
    assert len(products(lasting)) == n_adapted + n_backs
    weights = {w for t in products(lasting) for w, _ in card.lasting(t)}
    assert len(weights) == n_adapted
    (loss,) = (t for t in lasting.nodes if t.op.name == "linear_cross_entropy_unpacked")
    assert [*card.lasting(loss)] == [(loss.src[1], 2 * loss.src[1].n_elements)]
    assert [t.src for t in loss.saved] == [(loss,), (loss,)]
    every = dict(chain.from_iterable(map(card.lasting, lasting.nodes)))
    assert len(every) == n_adapted + 1
    n_bytes = sum(n for w, n in every.items() if w is not loss.src[1])
    of_weights = [w.shape for w in weights]
    assert 2 * sum(n * k for n, k in of_weights) < n_bytes
    assert n_bytes < 2 * sum((n + 16) * (k + 128) for n, k in of_weights)
    assert plan(lasting, card).n_bytes <= plan(graph, card).n_bytes
    loss = Graph.of(graph["loss"])  # alone it asks for nothing, but reads what is there
    again = with_unpacked_weights(loss, card)
    assert all(t.params["unpacked"] for t in products(again))
    assert again.nodes[-1].op.name == "linear_cross_entropy_unpacked"
    card.unpacked.clear()
    assert with_unpacked_weights(loss, card) is loss


def test_weights_stay_unpacked_as_many_as_there_is_room_for(card):
    from pyggml.alloc import plan
    from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights

    _, graph, n_adapted = graphs("qwen3-F16")
    leaves = sum(card.allocation(t.n_bytes) for t in {t.root: None for t in graph.leaves})
    written = {root for t in graph.nodes for root in changed_by(t)}  # both moments are as large
    moments = 2 * sum(card.allocation(t.n_bytes) for t in written)
    card.free = plan(graph, card).n_bytes + leaves + moments
    assert moments and with_unpacked_weights(graph, card) is graph
    card.free += 1_000_000
    some = [t for t in products(with_unpacked_weights(graph, card)) if t.params["unpacked"]]
    unpacked = {each for t in some for each in card.lasting(t)}
    assert 0 < len(unpacked) < n_adapted
    assert sum(n_bytes for _, n_bytes in unpacked) <= 500_000
    card.free = 0  # those of earlier graphs stay
    again = [t for t in products(with_unpacked_weights(graph, card)) if t.params["unpacked"]]
    assert {each for t in again for each in card.lasting(t)} == unpacked


def test_weights_of_one_product_lie_side_by_side(card):
    from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights

    _, graph, _ = graphs("qwen3-F16")
    lasting = with_unpacked_weights(graph, card)
    backs = [t for t in products(lasting) if t.op.name == "wide_back"]
    assert {len(t.src) for t in backs} == {3, 5, 7}
    for t in backs:
        ends = [0]
        for i, place in enumerate(t.params["unpacked"]):
            memory, is_new = card._lasting_memory(t, i, place.n_bytes, place)
            assert is_new and memory.size == place.n_bytes
            start = memory.ctypes.data - place.piece.array.ctypes.data
            assert start == ends[-1]
            ends.append(start + place.n_bytes)
        *_, d = (s for s in t.src if s.dtype is BF16)
        assert place.piece.array.size == ends[-1] + 2 * t.params["step"] * 8 * len(ends[1:])
        assert d.shape[1] * t.params["step"] * 2 >= place.piece.array.size
    apart = next(t for t in backs if len(t.src) == 7).src[1]
    card.unpacked[apart] = card.unpacked[apart]._replace(at=0)
    found = [t for t in with_unpacked_weights(graph, card).nodes if apart in t.src]
    assert {t.op.name: bool(t.params["unpacked"]) for t in found} == {
        "wide_product": True, "wide_back": False,
    }  # fmt: skip


def test_a_matrix_is_rounded_once_where_there_is_room(card):
    from pyggml.backends.cuda.rewrites.unpacked import with_shared_copies

    def copies(graph):
        return sum(t.op.name == "cpy" for t in with_shared_copies(graph, card).nodes)

    w, x = leaf(np.ones((48, 32), np.float32)), leaf(np.ones((3, 32), np.float32))
    both = [mul_mat(cpy(w, BF16), factor) for factor in (x, scale(x, 2.0))]
    assert copies(Graph.of(*both)) == 1
    assert copies(Graph.of(both[0], add_inplace(w, w), both[1])) == 2  # it may change in between
    card.free = 0
    assert copies(Graph.of(*both)) == 2


def test_a_weight_that_may_change_is_unpacked_in_every_run(card):
    from pyggml.backends.cuda.ops.lora.products import split_sources
    from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights

    _, graph, _ = graphs("qwen3-F16")
    for t in products(graph):
        for w in split_sources(t.src)[0]:
            w.data = w.data.copy()
    assert with_unpacked_weights(graph, card) is graph


def test_no_weight_stays_unpacked_where_that_saves_too_little(card):
    from pyggml.backends.cuda.rewrites.unpacked import with_unpacked_weights

    _, graph, _ = graphs("qwen3-F16", n_tokens=64)
    assert with_unpacked_weights(graph, card) is not graph
    card.unpacked.clear()
    card.copies_from = 0.8  # of a step, of which 64 tokens spend three quarters on unpacking
    assert with_unpacked_weights(graph, card) is graph


@pytest.mark.parametrize("keep", [Keep.COSTLY, Keep.LAYERS])
def test_what_is_computed_again_for_gates_is_kept_where_there_is_room(card, monkeypatch, keep):
    """But not in layers that are computed again themselves."""
    from pyggml.backends.cuda.rewrites import gated_gradients as join

    monkeypatch.setattr(join, "LARGE", 0)
    _, graph, n_adapted = graphs("qwen3-F16", keep=keep)
    kept = join.with_kept_ups(graph, card)
    if keep is Keep.LAYERS:
        assert kept is graph
        return
    assert ops_of(graph)["wide_product"] > ops_of(kept)["wide_product"] == n_adapted
    ups = [t.src[1] for t in kept.nodes if t.op.name == "gated_gradients"]
    loss = kept.nodes.index(kept.outputs[0])
    assert ups and all(kept.nodes.index(up) < loss for up in ups)
    card.free = 0
    assert join.with_kept_ups(graph, card) is graph
