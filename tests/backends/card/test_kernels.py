"""Every kernel of the card against the op's float64 reference, on the op's own samples."""

import dice
import numpy as np
import pytest
from card_patterns import own_ops

from pyggml.backends.cpu import CPU
from pyggml.backends.cuda import cards, open_cuda
from pyggml.backends.cuda.gemm.cublas import has_cublas
from pyggml.backends.cuda.ops.lora import wide
from pyggml.backends.cuda.ops.norm import norm_mul
from pyggml.backends.cuda.ops.norm.by_row import holds_rows
from pyggml.backends.cuda.runtime.table import kernels
from pyggml.backends.cuda.runtime.toolkit import SIMULATED
from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F16, F32, dtype
from pyggml.graph.op import Memory
from pyggml.graph.tensor import as_leaf, leaf, zeros
from pyggml.look.check import in_float64
from pyggml.ops import OPS, repeat_back, set_rows
from pyggml.ops.in_bf16 import bf16_op
from pyggml.ops.optim import CLIPPED
from pyggml.quants import dequantize
from pyggml.runtime import Devices, results

# The largest error allowed, relative to the largest value of the reference.
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
ROUNDED = 1e-2  # of what is computed of bfloat16, which has 8 bits
MOST_SIMULATED = 1300  # numbers of a sample of a costly op: the simulator takes µs for each product
MOST_OF_OWN = 9000  # of one whose threads are the fewest


def numbers(t, found):
    """The numbers of a result, BF16 and quantised rows unpacked."""
    return dequantize(found, t.dtype.name) if t.dtype is BF16 or t.dtype.quantised else found


def samples_of(op):
    """(sources, parameters) of an op's samples, in the simulator without the large ones."""
    for sample in op.samples(np.random.default_rng(5)):
        sources = [as_leaf(a) for a in sample.arrays]
        most = MOST_SIMULATED if op.costly and op.name in OPS else MOST_OF_OWN
        if not SIMULATED or sum(s.n_elements for s in sources) <= most:
            yield sources, sample.params


@pytest.mark.parametrize("name", sorted(kernels()))
def test_the_kernel_agrees_with_the_reference(name, card):
    op, computed = OPS[name], 0
    for sources, params in samples_of(op):
        wanted = op.ref(*(in_float64(s).copy() for s in sources), **params)
        node = op(*sources, **params)
        if card.refusal(node):
            continue
        found = numbers(node, *results(Graph.of(node), Devices([card, CPU()])))
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        allowed = TOLERANCE.get(node.dtype, 0.13 * node.dtype.quantised) * largest
        np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed, err_msg=repr(node))
        computed += 1
    assert computed


def test_halves_are_rounded_with_the_host_s_dice(card):
    dice.expect_the_host_s(card)


@pytest.fixture
def rounding(monkeypatch):
    """The card, with products in bfloat16; the simulator with twins of what it lacks for them."""
    if SIMULATED:
        from warps import as_instructions, with_products

        as_instructions(monkeypatch), with_products(monkeypatch)
        monkeypatch.setattr(wide, "n_warps", lambda n: 1)  # threads are what costs time here
    elif not has_cublas():
        pytest.skip("cuBLAS is not installed, which multiplies wide matrices")
    monkeypatch.setattr(wide, "MANY_ROWS", 30)  # so some samples have few, others many
    monkeypatch.setattr(wide, "FEW_ROWS", 20)  # and not all are taken by clusters
    return open_cuda(cards()[0].index, "bf16")


@pytest.mark.parametrize("name", sorted(own_ops()))
def test_the_kernel_of_a_card_s_own_op_agrees_with_its_reference(name, rounding):
    """In all its results. Factors are rounded to bfloat16."""
    if SIMULATED and name.endswith("_unpacked"):
        pytest.skip("the simulator takes minutes for its products, whose warps it has not")
    op = own_ops()[name]
    for sources, params in samples_of(op):
        node = op(*sources, **params)
        assert rounding.refusal(node) is None
        holds(node, op.results(*(in_float64(s).copy() for s in sources), **params), rounding)


def holds(node, wanted, card):
    """Whether a node's results, rounded to bfloat16 or made of such numbers, are these."""
    outputs = (node, *node.saved)[: len(wanted := list(wanted))]
    values = results(Graph.of(*outputs), Devices([card, CPU()]))
    for t, found, exact in zip(outputs, values, wanted, strict=True):
        allowed = ROUNDED * np.abs(exact).max(initial=0.0)
        np.testing.assert_allclose(numbers(t, found), exact, rtol=0, atol=allowed, err_msg=repr(t))


# Op → the sources that its kernel reads in BF16, and writes its result so. Attention and products
# with experts have tests of their own, since they take no small ones.
NARROW = {
    "rms_norm_mul": (0,), "rms_norm_mul_back": (0, 2), "rope_apply": (0,), "rope_apply_back": (0,),
    "wide_product": (), "wide_back": (), "swiglu": (0, 1), "swiglu_back_gate": (0, 1, 2),
    "cross_entropy_rows_back": (),
}  # fmt: skip


@pytest.mark.parametrize("name", NARROW)
def test_a_narrowed_op_agrees_with_its_reference(name, rounding):
    op, computed = bf16_op((OPS | own_ops())[name], NARROW[name], (0,)), 0
    for sources, params in samples_of(op):
        node = op(*sources, **params)
        if name.startswith("rms") and not holds_rows(node):
            continue  # rows that the kernel reads twice, in F32
        if node.shape[-1] % 4 and not name.startswith("wide"):
            continue  # rows that do not begin where four numbers are moved at once
        assert node.dtype is BF16
        holds(node, [op.ref(*(in_float64(s).copy() for s in sources), **params)], rounding)
        computed += 1
    assert computed


@pytest.mark.parametrize("name", ["BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_rows_are_packed_as_the_host_packs_them(name, card):
    """Bit for bit, but for a number in a thousand that a fused product rounds another way."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 96)).astype(np.float32)
    x[1, :32] = 0
    ids, kind = leaf(np.array([4, 0, 2], np.int32)), dtype(name)
    on = [Devices([card, CPU()]), Devices([CPU()])]
    graphs = [Graph.of(set_rows(zeros((5, 96), kind), leaf(x), ids)) for _ in on]
    assert card.refusal(graphs[0].outputs[0]) is None
    found, wanted = (results(g, devices)[0] for g, devices in zip(graphs, on, strict=True))
    assert (found != wanted).sum() <= (0 if SIMULATED else 1)


def test_the_gradient_of_a_norm_s_weight_over_many_rows(card, monkeypatch):
    """Of so many that sums of sums are added up."""
    if SIMULATED:
        monkeypatch.setattr(norm_mul, "_CHUNK_ROWS", 2)
        monkeypatch.setattr(norm_mul, "_CHUNK_SUMS", 3)
    x, dy = np.random.default_rng(1).standard_normal((2, 43 if SIMULATED else 70000, 8))
    node = OPS["rms_norm_mul_back_w"](as_leaf(x), as_leaf(dy), eps=1e-3)
    (found,) = results(Graph.of(node), Devices([card, CPU()]))
    wanted = (x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-3) * dy).sum(axis=0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(dy).sum() / 8)


SAVING = [name for name in sorted(kernels()) if OPS[name].saved is not OPS["add"].saved]


@pytest.mark.parametrize("name", SAVING)
def test_what_is_left_for_the_gradient_is_the_host_s(name, card):
    for sources, params in samples_of(OPS[name]):
        node = OPS[name](*sources, **params)
        if node.saved and not card.refusal(node):
            graph = Graph.of(node, *node.saved)
            wanted = results(graph, Devices([CPU()]))[1:]
            found = results(graph, Devices([card, CPU()]))[1:]
            for a, b in zip(found, wanted, strict=True):
                largest = np.abs(b[np.isfinite(b)]).max(initial=0.0)
                np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest, err_msg=repr(node))


def test_every_op_has_a_kernel():
    """But for views, which nothing computes, for what the CPU alone makes of several nodes, and for
    what it alone trains: the output matrix below a fused loss, and the scales of experts."""
    views = {name for name, op in OPS.items() if op.memory is Memory.VIEW}
    joint = {"swiglu_back", "mul_mat_low_rank", "out_prod_low_rank", "out_prod_low_rank_add"}
    joint |= {"mul_mat_gated", "linear_cross_entropy_back_w", "rescale_back_linear_cross_entropy"}
    joint |= {"rescale_back_out_prod_id", "get_rows_back_add", "accumulate"}
    joint |= {"clip_factor", *(step.name for step in CLIPPED.values())}
    assert set(kernels()) == set(OPS) - views - joint


@pytest.mark.parametrize(
    ("shape", "small"), [((64, 8, 4), (1, 1, 4)), ((2, 300, 3), (2, 1, 3)), ((64, 8, 1), (1, 1, 1))]
)
def test_long_sums_over_axes_that_follow_each_other(shape, small):
    """Added up in parts, as a router's gradients are: a thread alone would take milliseconds."""
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    (sums,) = results(Graph.of(repeat_back(leaf(x), small)), Devices([open_cuda(0, "f32"), CPU()]))
    exact = x.astype(float).sum(tuple(i for i, n in enumerate(small) if n != shape[i]))
    np.testing.assert_allclose(sums.reshape(exact.shape), exact, atol=2e-4)
