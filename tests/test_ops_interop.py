"""Every op of the registry against ggml's CPU, or a reason why ggml has not got it.

`pytest -m interop` draws some cases of each; `--hypothesis-profile=thousands` a hundred of each.
"""

from itertools import product

import numpy as np
import pytest
from drawing import draw_layout, draw_sample, fed_by_results
from ggml_cpu import Context, numbers
from ggml_twins import BUILT, GRADIENTS, HALVES_REFUSED, ROUNDED, TWINS, WITHOUT, Builder
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pyggml import ops
from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F16, F32, I32, I64
from pyggml.graph.tensor import Tensor, as_leaf, leaf
from pyggml.ops import OPS
from pyggml.quants import QUANTS, dequantize
from pyggml.runtime import results, run

interop = pytest.mark.interop
PAIRS = [*((OPS[name], twin) for name, twin in TWINS.items()), *BUILT]
every_pair = pytest.mark.parametrize(
    ("op", "twin"), [pytest.param(op, twin, id=op.name) for op, twin in PAIRS]
)
SOME = settings(
    max_examples=settings.default.max_examples // 20, suppress_health_check=list(HealthCheck)
)
DERIVED = fed_by_results(OPS)


@pytest.mark.quick
def test_every_op_has_a_twin_or_a_reason():
    built = {name for op, _ in BUILT for name in op.covers}
    assert OPS.keys() == TWINS.keys() | built | WITHOUT.keys()
    assert not WITHOUT.keys() & (TWINS.keys() | built)


def own(t):
    """A leaf with the same numbers and strides in memory of its own."""
    first = t.data.ctypes.data
    last = first + sum((n - 1) * s for n, s in zip(t.data.shape, t.data.strides, strict=True))
    whole = np.zeros(last - first + t.data.itemsize, np.uint8) if t.data.size else t.data
    data = np.ndarray(t.data.shape, t.data.dtype, whole, strides=t.data.strides)
    data[...] = t.data
    return Tensor(t.shape, t.dtype, data=data, strides=t.strides)


def expect_equal(found, wanted, dtype, limit, what):
    """ggml's measure: the squared differences in all, relative to the squared numbers."""
    if dtype in (I32, I64):
        np.testing.assert_array_equal(found, wanted, err_msg=what)
        return
    found, wanted = (
        dequantize(np.atleast_1d(a), dtype.name).astype(np.float64) for a in (found, wanted)
    )
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(found[~finite], wanted[~finite], err_msg=what)
    found, wanted = found[finite], wanted[finite]
    error, size = np.sum((found - wanted) ** 2), np.sum(wanted**2)
    assert error <= limit * size, f"{what}: {error / max(size, 1e-300):.2e} of {limit}"


def agree(op, twin, leaves, params):
    """Compare results, what is saved, and what is written over. False if ggml has not the case."""
    twins = [own(t) for t in leaves]
    node = op(*leaves, **params)
    with Context(node) as g:
        src = [g.leaf(t) for t in twins]
        if not twin.strided:
            src = [s if t.is_contiguous else g.cont(s) for s, t in zip(src, twins, strict=True)]
        theirs = twin.build(g, *src, **params)
        if theirs is None:
            return False
        wanted = g.compute(*(theirs if isinstance(theirs, tuple) else (theirs,)))
        changed = {i: numbers(src[i]) for i in op.changes}
    results = node, *node.saved[: len(wanted) - 1]
    plain = all(t.dtype in (F32, I32, I64) for t in (*leaves, node))
    limit = twin.limit if plain else max(twin.limit, ROUNDED)
    for t, ours, other in zip(results, run(*results), wanted, strict=True):
        other = other.reshape(ours.shape).astype(ours.dtype)
        expect_equal(twin.arranged(ours), twin.arranged(other), t.dtype, limit, repr(t))
    for i, other in changed.items():
        ours = array(leaves[i])
        expect_equal(ours, other.reshape(ours.shape), leaves[i].dtype, limit, f"source {i}")
    return True


@interop
@every_pair
def test_declared_samples(op, twin):
    samples = list(op.samples(np.random.default_rng(0)))
    compared = [
        agree(op, twin, [as_leaf(a) for a in s.arrays], {**s.params, **twin.fixed}) for s in samples
    ]
    assert any(compared), "ggml has none of the samples"


@interop
@every_pair
@SOME
@given(data=st.data())
def test_drawn_sources(op, twin, data):
    arrays, params = draw_sample(data, op, DERIVED)
    assume(agree(op, twin, draw_layout(data, op, arrays), {**params, **twin.fixed}))


@interop
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, id=f"{name}-{kind}")
        for name, kind in product(TWINS, (F16, BF16))
        if OPS[name].halves and name not in HALVES_REFUSED[kind.name]
    ],
)
@SOME
@given(data=st.data())
def test_halves(name, kind, data):
    op, twin = OPS[name], TWINS[name]
    arrays, params = draw_sample(data, op, DERIVED)
    leaves = [narrowed(t, kind) for t in draw_layout(data, op, arrays)]
    assume(agree(op, twin, leaves, {**params, **twin.fixed}))


def narrowed(t, kind):
    """An F32 leaf as one of half the width, its axes in the same order in memory."""
    if t.dtype is not F32:
        return t
    (numbers,) = run(ops.cpy(t, kind))
    data = np.empty_like(t.data, kind.numpy)
    data[...] = numbers
    return leaf(data, dtype=kind)


@interop
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    """Of Σ seed·y, by each source."""
    op, twin, rng = OPS[name], TWINS[name], np.random.default_rng(0)
    for sample in op.samples(rng):
        leaves = [as_leaf(a) for a in sample.arrays]
        node = op(*leaves, **sample.params)
        seed = leaf(np.asarray(rng.standard_normal(node.shape).astype(np.float32)))
        with Context(node) as g:
            src = [g.leaf(t) for t in leaves]
            wanted = g.gradients(twin.build(g, *src, **sample.params), g.leaf(seed), src)
        _, *found = results(build_backward(Graph.of(node), leaves, seed))
        for ours, other in zip(found, wanted, strict=True):
            expect_equal(ours, other.reshape(ours.shape), F32, twin.limit, repr(node))


WEIGHTS = [name for name in QUANTS if name not in ("F32", "Q8_1")]  # Q8_1 is of no file
OF_WEIGHTS = {
    "mul_mat": lambda n, k, few, many: ((*few, n, k), (*many, 3, k), ()),
    "mul_mat_id": lambda n, k, few, many: ((4, n, k), (5, 2, k), (5, 2)),
    "out_prod": lambda n, k, few, many: ((*many, n, k), (*many, n, 3), ()),
    "get_rows": lambda n, k, few, many: ((*many, n, k), (), (*many, 7)),
}


@interop
@pytest.mark.parametrize(
    ("weight", "name"), [c for c in product(WEIGHTS, OF_WEIGHTS) if c != ("BF16", "out_prod")]
)
@SOME
@given(data=st.data())
def test_weights_of_every_type(weight, name, some_weight, data):
    dtype = QUANTS[weight].dtype
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    n, k = (
        data.draw(st.sampled_from((16, 17, 33)), "n"),  # a few results say little of an error
        data.draw(st.integers(1, 3), "blocks"),
    )
    k *= max(dtype.block, 32)
    batches = [((), ()), ((), (2,)), ((2,), (4,)), ((2, 3), (2, 3)), ((1, 2), (3, 2))]
    few, many = data.draw(st.sampled_from(batches), "batches")
    of_w, of_x, of_ids = OF_WEIGHTS[name](n, k, few, many)
    sources = [leaf(some_weight(rng, of_w, weight).view(dtype.numpy), "w", dtype)]
    if of_x:
        sources.append(leaf(rng.standard_normal(of_x).astype(np.float32), "x"))
    if of_ids:
        sources.append(
            leaf(rng.integers(0, of_w[-2 if name == "get_rows" else 0], of_ids, np.int32))
        )
    op = Builder(name, getattr(ops, name), OPS[name].samples, ())
    assert agree(op, TWINS[name], sources, {})
