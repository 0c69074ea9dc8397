"""On random graphs: nothing alive overlaps, the peak holds, sharing memory changes no number."""

import itertools
import tracemalloc

import numpy as np
import pytest
from arenas import bound
from graphs import graphs, results, used
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.alloc import Plan, plan
from pyggml.alloc.plan import _Pieces
from pyggml.alloc.usage import bytes_at, moment, peak
from pyggml.backends.cpu import CPU
from pyggml.backward import Keep, build_backward, rematerialise, round_large
from pyggml.graph import Graph, Notes
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F32, I32
from pyggml.graph.op import SAVED, Memory
from pyggml.graph.tensor import Tensor, leaf, zeros
from pyggml.ops import (
    add,
    add1,
    flash_attn_ext,
    mul_mat,
    narrow,
    scale,
    silu,
    sqr,
    sum_,
    transpose,
)
from pyggml.runtime import Devices, bind, schedule

# -- the planner's promises, from the graph alone --------------------------------------------------

FOREVER = 1 << 40


def lives_of(graph: Graph) -> dict[Tensor, tuple[int, int]]:
    """Owner of memory -> the indices of the node that writes it and of the last that reads it."""
    lives = {}
    for i, node in enumerate(graph.nodes):
        if node.op is SAVED:
            continue
        for written in (*node.saved, *([node] if node.base is None else [])):
            lives[written] = [i, i]
        for source in node.src:
            owner = source if source.base is None else source.base
            if owner in lives:
                lives[owner][1] = i
    for t in graph.outputs:
        owner = t if t.base is None else t.base
        if owner in lives:
            lives[owner][1] = FOREVER
    return {t: (first, last) for t, (first, last) in lives.items()}


def assert_nothing_overlaps(p: Plan) -> None:
    lives = lives_of(p.graph)
    assert lives.keys() == p.offsets.keys()
    index = {t: i for i, t in enumerate(p.graph.nodes)}
    pieces = [(p.offsets[t], t.n_bytes, *lives[t], t) for t in lives]
    for node, offset in p.scratch.items():
        i = index[node]
        pieces.append((offset, p.backend.scratch(node), i, i, None))
    for j, (start, size, first, last, a) in enumerate(pieces):
        assert start % 64 == 0
        assert start + size <= p.n_bytes
        for other, n, begin, end, b in pieces[:j]:
            apart_in_time = end < first or last < begin
            apart_in_memory = start + size <= other or other + n <= start
            shared = {(a, b), (b, a)} & p.reused.items()
            assert apart_in_time or apart_in_memory or shared, (a, b)


def assert_reuse_is_legal(p: Plan) -> None:
    lives = lives_of(p.graph)
    for node, source in p.reused.items():
        assert lives[source][1] == lives[node][0], "the source dies where the node is born"
        assert p.offsets[node] == p.offsets[source]
        assert node.n_bytes == source.n_bytes
        seen = [s for s in node.src if (s.base or s) is source]
        assert all(s.is_contiguous and s.shape == node.shape and not s.offset for s in seen)
        if node.op.memory is Memory.INPLACE_FIRST:
            assert seen == [node.src[0]]
        else:
            assert node.op.memory is Memory.INPLACE


@pytest.mark.quick
@given(graphs())
@settings(max_examples=150)
def test_nothing_alive_overlaps(graph):
    p = plan(graph, CPU())
    assert_nothing_overlaps(p)
    assert_reuse_is_legal(p)


@given(graphs())
@settings(max_examples=100)
def test_what_lies_behind_the_rest_keeps_the_promises(graph):
    """Any tensors may lie behind; a plan takes those alive at its peak, results in place of their
    sources included."""
    pieces = _Pieces(graph, CPU(), reuse=True, share=True)
    found = pieces.place()
    alive = {found.origin(t) for t in peak(found).alive}
    for lasting in (alive, set(found.offsets)):
        p = pieces.place(lasting)
        assert_nothing_overlaps(p)
        assert_reuse_is_legal(p)
        assert plan(graph, CPU()).n_bytes <= found.n_bytes
        places = [p.offsets[t] for t in lasting if t in p.offsets]
        assert all(at < min(places, default=at + 1) for at in p.scratch.values())


@given(graphs())
@settings(max_examples=50)
def test_without_reuse_every_tensor_keeps_its_place(graph):
    p = plan(graph, CPU(), reuse=False)
    assert_nothing_overlaps(p)
    assert not p.reused
    places = sorted(
        [(at, t.n_bytes) for t, at in p.offsets.items()]
        + [(at, p.backend.scratch(t)) for t, at in p.scratch.items()]
    )
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(places))
    assert p.n_bytes >= plan(graph, CPU()).n_bytes


def _results(p: Plan, arena=None) -> list[np.ndarray]:
    bound(p, arena)()
    return [np.array(array(t)) for t in p.graph.outputs]


@given(graphs())
@settings(max_examples=60)
def test_sharing_memory_changes_no_number(graph):
    """Not even if every byte of the arena is NaN before: nothing is read before it is written."""
    separate = plan(graph, CPU(), reuse=False)
    arena = CPU().alloc(separate.n_bytes)
    arena[:] = 0
    wanted = _results(separate, arena)
    shared = plan(graph, CPU())
    arena = CPU().alloc(shared.n_bytes)
    arena.view(np.float32)[:] = np.nan
    for found, expected in zip(_results(shared, arena), wanted, strict=True):
        np.testing.assert_array_equal(found, expected)


@st.composite
def noted(draw):
    """A graph of a loss and its gradients, with notes on any of its tensors."""
    nodes, leaves = draw(results())
    some = st.frozensets(st.sampled_from(nodes), max_size=3)
    notes = Notes(boundaries=draw(some), large=draw(some))
    forward = Graph.of(sum_(sqr(nodes[-1]))).with_notes(notes)
    return build_backward(forward, used(nodes[-1], leaves))


@given(noted(), st.sampled_from([F32, BF16]))
@settings(max_examples=60)
def test_computing_nodes_again_changes_no_gradient(graph, kept_as):
    """Nor do boundaries, wherever they are, nor which of the rounded tensors are kept."""
    graph = round_large(graph, kept_as)
    wanted, *others = (_results(plan(rematerialise(graph, keep), CPU())) for keep in Keep)
    for other in others:
        for a, b in zip(wanted, other, strict=True):
            np.testing.assert_array_equal(b, a)


@given(graphs())
@settings(max_examples=50)
def test_usage_is_what_overlaps_in_time(graph):
    p, lives = plan(graph, CPU()), lives_of(graph)
    highest = peak(p)
    i = graph.nodes.index(highest.node)
    handed_on = {s for t, s in p.reused.items() if lives[t][0] == i}
    wanted = {t for t, (first, last) in lives.items() if first <= i <= last} - handed_on
    assert set(highest.alive) == wanted
    assert bool(wanted) <= highest.n_bytes <= p.n_bytes  # a graph of views alone takes none
    assert sum(n for _, _, n in highest.by_kind()) == highest.n_bytes
    assert bytes_at(p) == [moment(p, i).n_bytes for i in range(len(graph.nodes))]


@given(graphs())
@settings(max_examples=20)
def test_a_program_can_run_again(graph):
    program = bind(schedule(graph, Devices()))
    program()
    first = [np.array(array(t)) for t in graph.outputs]
    program()
    for t, before in zip(graph.outputs, first, strict=True):
        np.testing.assert_array_equal(array(t), before)


# -- single facts ----------------------------------------------------------------------------------


def test_a_chain_of_elementwise_nodes_needs_one_buffer():
    t = zeros((100, 100))
    for _ in range(10):
        t = scale(t, 2.0)
    assert plan(Graph.of(t), CPU()).n_bytes == 40_000


@pytest.mark.parametrize("in_place", [False, True])
def test_what_lives_at_the_peak_leaves_no_gaps(in_place):
    """Eight times a large tensor lives while a small one is made, and dies before a middle one is;
    these two are kept, or results in their place. Best fit puts the middle one in the large one's
    place; the rest stays empty."""
    large, middle, small = (leaf(np.ones(n, np.float32)) for n in (3000, 2000, 1100))
    kept, steps = [], []
    for i in range(8):
        dies, one = scale(large, float(i)), scale(small, float(i))
        other = add1(middle, sum_(dies))
        if in_place:
            one, other = sqr(one), sqr(other)
        kept, steps = [*kept, one, other], [*steps, dies, one, other]
    p = plan(Graph.of(*kept, steps=steps), CPU())
    assert p.n_bytes <= 1.01 * peak(p).n_bytes + large.n_bytes
    assert_nothing_overlaps(p)
    assert bool(p.reused) == in_place


def test_a_leaf_takes_no_memory():
    assert plan(Graph.of(zeros((4,))), CPU()).n_bytes == 0


def test_planning_touches_no_memory():
    """Tensors of 1 GiB each: the plan knows of 2 of them at a time and takes none."""
    x = Tensor((1 << 14, 1 << 14), F32, name="x")
    y = transpose(scale(x, 2.0))
    for _ in range(5):
        y = transpose(scale(y, 2.0))
    graph = Graph.of(y)
    tracemalloc.start()
    p = plan(graph, CPU())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert p.n_bytes == 2 << 30
    assert peak < 1 << 20
    assert all(t.data is None for t in graph.nodes)


def test_scratch_is_shared_by_nodes_that_follow_one_another():
    x, w = zeros((64, 4096)), zeros((4096, 4096))
    one = plan(Graph.of(mul_mat(w, x)), CPU())
    three = plan(Graph.of(mul_mat(w, mul_mat(w, mul_mat(w, x)))), CPU())
    assert max(one.n_scratch.values()) > 1 << 20
    assert three.n_bytes <= one.n_bytes + 2 * 64 * 4096 * 4


def test_little_scratch_is_not_given_to_the_next_nodes_which_may_run_beside():
    x, thin = zeros((64, 64)), [zeros((8, 64)) for _ in range(9)]
    p = plan(Graph.of(*(mul_mat(a, x) for a in thin)), CPU())
    places = [range(at, at + p.n_scratch[t]) for t, at in p.scratch.items()]
    near = [(a, b) for i, a in enumerate(places) for b in places[i + 1 : i + 1 + CPU.beside]]
    assert len(near) > CPU.beside
    assert all(a.stop <= b.start or b.stop <= a.start for a, b in near)


def test_what_is_saved_for_nobody_still_has_a_place():
    q = zeros((16, 2, 8))
    o = flash_attn_ext(q, q, q, zeros((16, 2), I32), 1.0)
    p = plan(Graph.of(o), CPU())
    assert o.saved[0] in p.offsets
    assert_nothing_overlaps(p)


def test_a_given_arena_isused():
    x = leaf(np.arange(4, dtype=np.float32))
    y = scale(x, 2.0)
    p = plan(Graph.of(y), CPU())
    arena = CPU().alloc(p.n_bytes)
    bound(p, arena)()
    assert np.shares_memory(y.data, arena)
    np.testing.assert_array_equal(arena.view(np.float32)[:4], [0, 2, 4, 6])


@pytest.mark.parametrize("n", [1, 63, 1000])
def test_buffers_are_aligned(n):
    buffer = CPU().alloc(n)
    assert buffer.shape == (n,)
    assert buffer.dtype == np.uint8
    assert buffer.ctypes.data % 64 == 0


def test_a_plan_prints_as_a_table_of_a_dozen_lines():
    x, w = zeros((64, 64), name="x"), zeros((64, 64), name="w")
    loss = sum_(sqr(add(mul_mat(w, silu(mul_mat(w, x))), x))).named("loss")
    p = plan(build_backward(Graph.of(loss), [x, w]), CPU())
    assert repr(p) == f"<Plan of loss on cpu: nodes {len(p.graph.nodes)}, bytes {p.n_bytes:,}>"
    first, results_, *lines = str(p).splitlines()
    assert first == repr(p) and 6 <= len(lines) <= 10
    n = len(p.reused)
    assert f"{len(p.offsets) - n} their own, {n} that of a source which dies" in results_
    at = peak(p)
    assert f"{at.n_bytes:,} bytes while node {at.index}, " in str(p)
    rows = [line.split() for line in lines if line.split()[1].endswith("%")]
    assert sum(int(row[0].replace(",", "")) for row in rows) == at.n_bytes
    assert sum(int(row[2]) for row in rows) == len(at.alive) + bool(at.n_scratch)
    assert str(plan(Graph.of(x), CPU())) == "<Plan of x on cpu: nodes 0, bytes 0>"


def test_the_smaller_kinds_of_tensors_stand_in_one_row():
    x = zeros((9,), name="x")
    rows = [scale(narrow(x, 0, 0, n), 2.0) for n in range(1, 10)]
    text = str(plan(Graph.of(*rows), CPU(), reuse=False))
    assert text.count("scale F32") == 5 and text.splitlines()[-1].endswith("4 kinds more")
