"""What the CPU puts in a graph that it runs alone: other nodes, the same bits."""

from functools import partial

import numpy as np
import pytest
from arenas import bound
from numba.core import config
from processes import python

from pyggml import ops, threads
from pyggml.alloc import plan
from pyggml.backends.cpu import CPU, rewrites
from pyggml.backends.cpu.rewrites.early_rows import early_rows
from pyggml.backends.cpu.rewrites.joint_backs import JOINT_BACK
from pyggml.backends.cpu.rewrites.joint_products import JOINT_PRODUCTS
from pyggml.backends.cpu.rewrites.onto_sums import ONTO_SUMS
from pyggml.backends.cpu.rewrites.thin_first import thin_first
from pyggml.backward import Keep, build_backward, rematerialise, round_large
from pyggml.backward.rounding import round_gradients
from pyggml.graph import Graph, Notes
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.op import OPS
from pyggml.graph.table import by_table
from pyggml.graph.tensor import leaf
from pyggml.jit import JIT
from pyggml.kernels.gemm import paths, rounds_matrices
from pyggml.ops.activation.glu import SWIGLU_BACK
from pyggml.ops.layout.cpy import packed_leaf
from pyggml.runtime import Devices, results, run, schedule

T, N, FF, R = 5, 24, 40, 3
RNG = np.random.default_rng(7)


def normal(*shape):
    return leaf(RNG.standard_normal(shape).astype(np.float32))


def rounded(*shape):
    bits = RNG.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16
    return leaf(bits.astype(np.uint16), dtype=BF16)


def same_bits(found, wanted):
    return len(found) == len(wanted) and all(
        a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True)
    )


def same(found, wanted):
    """Bit for bit as users compile kernels. Loops that check bounds are no vectors, and LLVM then
    adds in another order."""
    if JIT and not config.BOUNDSCHECK:
        return same_bits(found, wanted)
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.skipif(not JIT, reason="plain Python rounds swiglu another way")
@pytest.mark.skipif(
    not config.BOUNDSCHECK,
    reason="bounds are not checked: all tests of this file compare bits here",
)
def test_the_bits_without_bounds_checks():
    """Of joint products, which compile for long, each rank, each number of tokens and each way to
    compute."""
    chosen = "not joint_products or 3-5-f32 or 20-18-bf16 or 20-18-int8 or 3-2-int8"
    words = "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen
    found = python(*words, NUMBA_BOUNDSCHECK="0")
    assert found.returncode == 0, found.stdout


def names(graph):
    return [t.op.name for t in graph.nodes]


# -- swiglu_back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (67,), (5, 70), (2, 4100), (64, 768)])
def test_all_three_results_are_those_of_nodes_apart(shape):
    gate, up, dy = rounded(*shape), rounded(*shape), normal(*shape)
    joint = ops.swiglu_back(gate, up, dy)
    g, u = (ops.cpy(t, F32) for t in (gate, up))
    apart = OPS["swiglu_back_gate"](g, u, dy), ops.swiglu(g, dy), ops.swiglu(g, u)
    assert same(run(joint, *joint.saved), run(*apart))


def feed_forward(n_layers=2, before_down=lambda y: y, noted=True, rank=R, n_tokens=T):
    """The gradients by A and B of LoRA on every product of a stack of gated layers, as they are
    computed in training; and the forward graph's large tensors."""
    x, large, trained = normal(n_tokens, N), [], []

    def linear(x, n):
        w = leaf((RNG.standard_normal((n, x.shape[1])) / 8).astype(np.float16))
        a, b = normal(rank, x.shape[1]), normal(n, rank)
        trained.extend((a, b))
        return ops.mul_mat_add(ops.mul_mat(w, x), b, ops.scale(ops.mul_mat(a, x), 0.03))

    for _ in range(n_layers):
        gate, up = linear(x, FF), linear(x, FF)
        large += [gate, up]
        x = ops.add(x, linear(before_down(ops.swiglu(gate, up)), N))
    forward = Graph.of(ops.sum_(ops.sqr(x))).with_notes(
        Notes(large=frozenset(large if noted else ()))
    )
    graph = round_large(build_backward(forward, trained), BF16)
    return rematerialise(graph, Keep.COSTLY)


def as_it_is(graph, compute="f32"):
    """The outputs of a graph that the CPU computes without rewriting it."""
    program = bound(plan(graph, CPU(compute)))
    program()
    return [program.read(t) for t in graph.outputs]


@pytest.mark.skipif(not JIT, reason="plain Python rounds swiglu another way")
@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_a_step_has_joint_nodes_and_the_same_numbers(compute):
    graph = feed_forward()
    devices = Devices([CPU(compute)])
    (rewritten,) = (p.graph for p in schedule(graph, devices).plans.values())
    assert names(rewritten).count("swiglu_back") == 2
    assert "swiglu_back_gate" not in names(rewritten)
    assert names(rewritten).count("swiglu") == 2  # the forward pass alone
    wanted = as_it_is(graph, compute)
    assert same(results(graph, devices), wanted) and all(w.any() for w in wanted)


def norm(y):
    return ops.rms_norm_mul(y, normal(FF))


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(lambda: feed_forward(noted=False), id="no rounded copies"),
        pytest.param(lambda: feed_forward(before_down=norm), id="dy needs y"),
    ],
)
def test_what_cannot_be_joined_stays(graph):
    graph = graph()
    assert "swiglu_back_gate" in names(graph) and by_table(graph, [JOINT_BACK]) is graph


@pytest.mark.parametrize("also", ["dgate", "dup", "gate"])
def test_what_others_read_stays(also):
    gate, up, dy = ops.cpy(rounded(T, N), F32), ops.cpy(rounded(T, N), F32), normal(T, N)
    apart = {"dgate": OPS["swiglu_back_gate"](gate, up, dy), "dup": ops.swiglu(gate, dy)}
    results_ = [ops.scale(t, 2.0) for t in (*apart.values(), ops.swiglu(gate, up))]
    joined = by_table(Graph.of(*results_), [JOINT_BACK])
    assert any(t.op is SWIGLU_BACK for t in joined.nodes)
    graph = Graph.of(*results_, ops.sqr(gate) if also == "gate" else apart[also])
    assert by_table(graph, [JOINT_BACK]) is graph


def swiglus(dy, other_dy):
    """Two swiglus and their results apart, each with the dy that it gets of both y."""
    pairs = [[ops.cpy(rounded(T, N), F32) for _ in range(2)] for _ in range(2)]
    ys = [ops.swiglu(*pair) for pair in pairs]
    dz = normal(T, N)
    dys = dy(dz, ys), other_dy(dz, ys)
    apart = [
        (OPS["swiglu_back_gate"](*pair, d), ops.swiglu(pair[0], d), y)
        for pair, d, y in zip(pairs, dys, ys, strict=True)
    ]
    return [ops.scale(t, 2.0) for one in apart for t in one]


@pytest.mark.skipif(not JIT, reason="plain Python rounds swiglu another way")
@pytest.mark.parametrize(
    "first, second",
    [
        pytest.param(lambda dz, ys: ops.mul(dz, ys[1]), lambda dz, _: ops.sqr(dz), id="the first"),
        pytest.param(lambda dz, _: ops.sqr(dz), lambda dz, ys: ops.mul(dz, ys[0]), id="the second"),
        pytest.param(
            lambda dz, ys: ops.mul(dz, ys[1]), lambda dz, ys: ops.mul(dz, ys[0]), id="each"
        ),
    ],
)
def test_no_node_is_left_beside_a_joint_one(first, second):
    """Where one swiglu's dy needs what the other gives, the one that comes too early stays."""
    graph = Graph.of(*swiglus(first, second))
    joined = by_table(graph, [JOINT_BACK])
    n_joint = names(joined).count("swiglu_back")
    assert n_joint and names(joined).count("swiglu_back_gate") == 2 - n_joint
    assert names(joined).count("swiglu") == names(joined).count("cpy") == 2 * (2 - n_joint)
    assert same(as_it_is(joined), as_it_is(graph))


# -- joint products -------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("rank, n_tokens", [(R, T), (20, 18), (R, 2)])
def test_a_step_has_joint_products_and_the_same_numbers(rank, n_tokens, compute):
    """All six products of two layers, of which gate's and up's are kept rounded; and the gradients
    by what four of them read, but for the first x."""
    graph = feed_forward(rank=rank, n_tokens=n_tokens)
    devices = Devices([CPU(compute)])
    (rewritten,) = (p.graph for p in schedule(graph, devices).plans.values())
    found = names(rewritten)
    forward = [t for t in rewritten.nodes if t.op.name == "mul_mat_low_rank"]
    assert [len(t.saved) for t in forward] == [1, 1, 0] * 2
    assert found.count("out_prod_low_rank") + found.count("out_prod_low_rank_add") == 4
    assert not {"mul_mat_add", "out_prod_add", "cpy"}.intersection(found)
    wanted = as_it_is(graph, compute)
    assert same(results(graph, devices), wanted) and all(w.any() for w in wanted)


def adapted(x, n=FF, rank=R, weight=np.float16):
    """The two products of an adapted matrix."""
    w = leaf((RNG.standard_normal((n, x.shape[1])) / 8).astype(weight))
    y = ops.mul_mat(w, x)
    return y, ops.mul_mat_add(y, normal(n, rank), ops.mul_mat(normal(rank, x.shape[1]), x))


def backwards(n=FF):
    """The same of its gradient by x."""
    dy, s = normal(T, N), normal(T, R)
    w = leaf((RNG.standard_normal((N, n)) / 8).astype(np.float16))
    first = ops.out_prod(normal(R, n), ops.transpose(s))
    return first, ops.out_prod_add(first, w, ops.transpose(dy))


def test_lone_pairs_are_joined():
    x = ops.scale(normal(T, N), 2.0)
    graph = Graph.of(adapted(x)[1], backwards()[1])
    joined = by_table(graph, JOINT_PRODUCTS)
    assert names(joined) == ["scale", "mul_mat", "mul_mat_low_rank", "out_prod_low_rank"]
    assert same(as_it_is(joined), as_it_is(graph))


def gradient(so_far, m, n, add=ops.add_inplace):
    """A product, and the sum to which it is added."""
    product = ops.out_prod(normal(T, m), normal(T, n))
    return product, add(so_far, product)


def embedding(so_far, n, add):
    """The gradient of a table that is the output matrix, too; ids repeat."""
    ids = leaf(RNG.integers(0, 3, T).astype(np.int32))
    back = ops.get_rows_back(normal(T, n), ids, so_far.shape[0])
    return add(so_far, ops.add(ops.out_prod(normal(T, n), normal(T, FF)), back))


@pytest.mark.parametrize("keeps", [None, 0, 1])
def test_gradients_are_added_where_they_are_made(keeps):
    """Or written there, which is known as the graph runs."""
    word = leaf(np.array([keeps or 0], np.float32))
    add = ops.add_inplace if keeps is None else partial(ops.accumulate, keeps=word)
    shapes, begin = ((R, N), (N, R), (N, FF), (FF, N), (FF, N)), 0 if keeps != 0 else np.nan
    sums = [np.full(shape, begin, np.float32) for shape in shapes]
    leaves = [leaf(x) for x in sums]
    back = ops.get_rows_back(normal(T, N), leaf(np.array([7, 1, 7, 7, 0], np.int32)), FF)
    gradients = [gradient(x, *reversed(x.shape), add)[1] for x in leaves[:3]]
    graph = Graph.of(*gradients, add(leaves[3], back), embedding(leaves[4], N, add))
    joined = by_table(graph, ONTO_SUMS)
    assert names(joined) == ["out_prod_add"] * 3 + [
        "get_rows_back_add", "out_prod_add", "get_rows_back_add"
    ]  # fmt: skip
    wanted = as_it_is(graph)
    for x in sums:
        x[:] = begin
    assert same(as_it_is(joined), wanted)
    assert same([*sums], wanted) and all(w.any() for w in wanted)


def overwritten(x):
    """The first product reads x, the second what is then written over it."""
    y = ops.mul_mat(leaf((RNG.standard_normal((FF, N)) / 8).astype(np.float16)), x)
    x = ops.set_rows(x, normal(1, N), leaf(np.zeros(1, np.int32)))
    return [ops.mul_mat_add(y, normal(FF, R), ops.mul_mat(normal(R, N), x))]


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(lambda x: adapted(x), id="the base's result is an output"),
        pytest.param(lambda x: backwards(), id="the low rank's result is an output"),
        pytest.param(lambda x: (ops.sqr(y := adapted(x)[0]), y), id="no adapter"),
        pytest.param(lambda x: [ops.sqr(y) for y in adapted(x)], id="others read the base's"),
        pytest.param(lambda x: adapted(x, weight=np.float32)[1:], id="a float32 weight"),
        pytest.param(lambda x: adapted(x, n=16)[1:], id="few columns, summed in lanes"),
        pytest.param(lambda x: backwards(n=16)[1:], id="few columns backward"),
        pytest.param(lambda x: adapted(x, rank=65)[1:], id="no low rank"),
        pytest.param(overwritten, id="x is written over between"),
        pytest.param(lambda x: gradient(normal(R, N), N, R), id="the gradient is an output"),
        pytest.param(
            lambda x: [ops.add(normal(R, N), ops.out_prod(normal(T, N), normal(T, R)))],
            id="a sum of its own",
        ),
    ],
)
def test_other_products_stay(outputs):
    graph = Graph.of(*outputs(ops.scale(normal(T, N), 2.0)))
    assert by_table(graph, JOINT_PRODUCTS + ONTO_SUMS) is graph


# -- narrow ---------------------------------------------------------------------------------------


def trained_in_float32(n_rows=64, n=64, n_ff=96):
    """The gradients of gated layers, whose matrices are trained in F32 and multiplied in BF16."""
    x, large, trained = normal(n_rows, n), [], [normal(n)]

    def linear(x, n_out):
        trained.append(leaf((RNG.standard_normal((n_out, x.shape[1])) / 8).astype(np.float32)))
        return ops.mul_mat(ops.cpy(trained[-1], BF16), x)

    for _ in range(2):
        normed = ops.rms_norm_mul(x, trained[0])
        large += [linear(normed, n_ff), linear(normed, n_ff)]
        x = ops.add(x, linear(ops.swiglu(*large[-2:]), n))
    forward = Graph.of(ops.sum_(ops.sqr(x))).with_notes(Notes(large=frozenset(large)))
    sums = [normal(*w.shape) for w in trained]
    for each in sums:
        each.data[:] = 0
    graph = build_backward(forward, trained, accumulators=sums)
    return rematerialise(round_gradients(round_large(graph, BF16), BF16), Keep.COSTLY), sums


@pytest.mark.skipif(not JIT, reason="plain Python rounds swiglu another way")
@pytest.mark.skipif(not rounds_matrices("bf16"), reason="no products round to bfloat16 here")
def test_products_read_rows_in_bfloat16_and_round_matrices():
    graph, sums = trained_in_float32()
    devices = Devices([CPU("bf16")])
    (rewritten,) = (p.graph for p in schedule(graph, devices).plans.values())
    rows = [t for t in rewritten.nodes if t.op.name in ("rms_norm_mul", "swiglu", "swiglu_back")]
    assert len(rows) >= 6 and all(t.dtype is BF16 for t in rows)
    products = [t for t in rewritten.nodes if t.op.name in ("mul_mat", "out_prod", "out_prod_add")]
    matrices = [t.src[-2] for t in products if t.src[-2].root.op is None]
    assert len(matrices) == 12 and all(w.dtype is F32 for w in matrices)
    assert names(rewritten).count("cpy") == 4  # gate and up, which are kept
    wanted = as_it_is(graph, "bf16")
    for each in sums:
        each.data[:] = 0
    assert same(results(graph, devices), wanted) and all(w.any() for w in wanted)


# -- thin_first -----------------------------------------------------------------------------------


def test_thin_products_stand_before_packed_ones_of_their_source():
    x, kinds = ops.scale(normal(T, N), 2.0), []
    for n in (FF, N):
        w = leaf(RNG.standard_normal((n, N)).astype(np.float16))
        kinds += [ops.mul_mat(w, x), ops.mul_mat(normal(R, N), x)]
    graph = Graph.of(*kinds)
    rewritten = thin_first(graph)
    products = [t.src[0].dtype for t in rewritten.nodes if t.op.name == "mul_mat"]
    assert [d is F16 for d in products] == [False, False, True, True]
    assert rewritten.outputs == graph.outputs
    assert same_bits(as_it_is(rewritten), as_it_is(graph))


def test_packed_products_of_a_source_follow_one_another_where_threads_are_many(monkeypatch):
    x = ops.scale(normal(T, N), 2.0)
    ws = [leaf(RNG.standard_normal((n, N)).astype(np.float16)) for n in (FF, N)]
    graph = Graph.of(*(ops.sqr(ops.mul_mat(w, x)) for w in ws))
    monkeypatch.setattr(threads, "most", lambda: 2)
    assert thin_first(graph) is graph
    monkeypatch.setattr(threads, "most", lambda: 4)
    rewritten = thin_first(graph)
    assert [t.op.name for t in graph.nodes] == ["scale", "mul_mat", "sqr", "mul_mat", "sqr"]
    assert [t.op.name for t in rewritten.nodes] == ["scale", "mul_mat", "mul_mat", "sqr", "sqr"]
    assert same_bits(as_it_is(rewritten), as_it_is(graph))
    assert thin_first(rewritten) is rewritten


def test_wide_float_matrices_and_lone_products_stay():
    x = ops.scale(normal(T, N), 2.0)
    w = leaf(RNG.standard_normal((FF, N)).astype(np.float16))
    wide = Graph.of(ops.mul_mat(w, x), ops.mul_mat(normal(FF, N), x))
    apart = Graph.of(ops.mul_mat(w, x), ops.mul_mat(normal(R, N), ops.sqr(x)))
    assert thin_first(wide) is wide and thin_first(apart) is apart


# -- rows that alone are read ---------------------------------------------------------------------


def last_rows(n_read, n_tokens=40, also_read=False):
    """Rows of a norm of a sum, of which a product with a weight is one part."""
    x, o = normal(n_tokens, N), normal(n_tokens, N)
    w = leaf((RNG.standard_normal((N, N)) / 8).astype(np.float16))
    total = ops.add(x, ops.mul_mat(w, o))
    h = ops.rms_norm_mul(total, normal(N))
    ids = leaf(RNG.integers(0, n_tokens, n_read).astype(np.int32))
    return Graph.of(ops.get_rows(h, ids), *[total] * also_read)


def test_what_is_read_of_a_result_is_computed_alone():
    graph = last_rows(n_read=36)
    early = early_rows(graph, "f32")
    assert sorted(names(early)) == ["add", "get_rows", "get_rows", "mul_mat", "rms_norm_mul"]
    assert {t.shape[0] for t in early.nodes} == {36}
    assert same_bits(as_it_is(early), as_it_is(graph))


@pytest.mark.parametrize("also_read", [False, True])
def test_a_product_of_fewer_rows_by_another_path_stays_and_so_does_what_others_read(also_read):
    graph = last_rows(n_read=36 if also_read else 1, also_read=also_read)
    early = early_rows(graph, "f32")
    (product,) = (t for t in early.nodes if t.op.name == "mul_mat")
    assert len(product.shape) == 2 and product.shape[0] == 40
    assert same_bits(as_it_is(early), as_it_is(graph))


# -- products on tiles ----------------------------------------------------------------------------


@pytest.fixture
def tiles(monkeypatch):
    """Products of many rows are on tiles, emulated where the CPU has none. Their tasks are machine
    code: without the JIT there are none to try."""
    if not JIT:
        pytest.skip("tasks need the JIT")
    at = paths.PATHS.index(paths.strided.STRIDED) + 1
    monkeypatch.setattr(paths, "PATHS", (*paths.PATHS[:at], paths.tiles.MANY, *paths.PATHS[at:]))
    of_paths = paths.path_of, paths.scratch_bytes, paths.packing
    for remembered in of_paths:
        remembered.cache_clear()
    yield
    for remembered in of_paths:
        remembered.cache_clear()


def q8_0(*shape):
    return packed_leaf(RNG, shape, "Q8_0")


def test_rows_that_a_product_reads_as_columns_are_rounded_beside_packed_weights(tiles):
    """As dx = out_prod(W, dyᵀ) reads those of dy."""
    dy = ops.rms_norm_mul(normal(50, 96), normal(96))
    graph = Graph.of(ops.out_prod(q8_0(96, 64), ops.transpose(dy)))
    rewritten = rewrites.rewritten(graph, "bf16")
    assert [t.dtype for t in rewritten.nodes] == [BF16, BF16, F32]
    assert same(as_it_is(rewritten, "bf16"), as_it_is(graph, "bf16"))


# -- gate and up ----------------------------------------------------------------------------------


def unit_of_products(unit, is_read=False, n_tokens=50):
    x, g, u, down = normal(n_tokens, 64), q8_0(96, 64), q8_0(96, 64), q8_0(32, 96)
    gate, up = ops.mul_mat(g, x), ops.mul_mat(u, x)
    return Graph.of(ops.mul_mat(down, unit(gate, up)), *[up] * is_read)


@pytest.mark.parametrize("unit", [ops.swiglu, ops.geglu])
def test_gate_and_up_are_one_product_on_tiles_and_the_bits_are_the_same(unit, tiles):
    """What comes of it is written in bfloat16, as down's product rounds it."""
    graph = unit_of_products(unit)
    joint = rewrites.rewritten(graph, "bf16")
    assert names(joint) == ["mul_mat_gated", "mul_mat"] and joint.nodes[0].dtype is BF16
    assert same(as_it_is(joint, "bf16"), as_it_is(graph, "bf16"))


def test_up_that_is_read_and_products_of_few_rows_stay_apart(tiles):
    for graph in (
        unit_of_products(ops.swiglu, is_read=True),
        unit_of_products(ops.swiglu, n_tokens=20),
    ):
        assert names(rewrites.rewritten(graph, "bf16")).count("mul_mat") == 3
    assert names(rewrites.rewritten(unit_of_products(ops.swiglu), "f32")).count("mul_mat") == 3


def test_on_many_threads_gate_and_up_stay_apart(tiles, monkeypatch):
    graph = unit_of_products(ops.swiglu)
    monkeypatch.setattr(threads, "most", lambda: 17)
    assert names(rewrites.rewritten(graph, "bf16")).count("mul_mat") == 3
