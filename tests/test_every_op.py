"""What holds for every op, checked from its declaration: nothing here names one of them."""

import dataclasses
from enum import IntEnum
from functools import partial
from importlib.util import find_spec
from math import prod

import numpy as np
import pytest
from card_patterns import own_ops
from drawing import conditioned, draw_layout, draw_sample, fed_by_results
from extras import needs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import python

from pyggml import threads
from pyggml.errors import ShapeError
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F16, F32, I32, dtype
from pyggml.graph.op import Memory, NoGrad, Sample
from pyggml.graph.tensor import Tensor, as_leaf, leaf, zeros
from pyggml.jit import JIT
from pyggml.kernels.kernel import KERNELS, Site
from pyggml.look.check import check_gradient, in_float64
from pyggml.ops import OPS, cpy
from pyggml.quants import dequantize
from pyggml.runtime import run

# The largest error allowed, relative to the largest value of the reference.
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
TOLERANCE |= {dtype("Q4_1"): 0.08, dtype("Q5_0"): 0.07, dtype("IQ4_NL"): 0.13}
TOLERANCE |= {dtype("Q8_0"): 8e-3, dtype("Q5_1"): 0.06, dtype("Q4_0"): 0.13, dtype("Q4_K"): 0.08}
GRADIENT_TOLERANCE = 1e-4
# Roundings of results that are small differences of larger numbers: of a gradient, as tanh's far
# out, and of a number, as ln Σ e^x − max x where one x is far above the others.
ROUNDING = 2e-6
EPSILON = float(np.finfo(np.float32).eps)


# Those that a card's passes put into graphs; its kernels compute them (backends/card).
OWN = {} if find_spec("numba_cuda") is None else own_ops()
EVERY = {**OPS, **OWN}
SAMPLES = {name: list(op.samples(np.random.default_rng(0))) for name, op in EVERY.items()}
CASES = [
    pytest.param(OPS[name], sample, id=f"{name}-{i}", marks=[] if i else [pytest.mark.quick])
    for name in OPS
    for i, sample in enumerate(SAMPLES[name])
]


def ops(wanted, of=OPS):
    return [pytest.param(op, id=name) for name, op in of.items() if wanted(op)]


def build(op, sample):
    """Fresh leaves, and the node that applies op to them."""
    src = [as_leaf(a) for a in sample.arrays]
    return src, op(*src, **sample.params)


def float_sources(sample):
    """Which arrays become F32 leaves; tensors stand for themselves, integers become I32."""
    return [i for i, a in enumerate(sample.arrays) if getattr(a, "dtype", None) == np.float64]


def differentiable(op, sample):
    """The float sources that the gradient rule has a gradient for."""
    if isinstance(op.grad, NoGrad):
        return []
    _, out = build(op, sample)
    parts = op.grad(out, leaf(np.ones(out.shape, np.float32)))
    return [i for i in float_sources(sample) if parts[i] is not None]


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def values(t, found):
    """The numbers of a result, BF16 and quantised rows unpacked."""
    if not (t.dtype is BF16 or t.dtype.quantised):
        return found
    return dequantize(found if found.ndim else found[None], t.dtype.name).reshape(t.shape)


def scratch(n_bytes):
    """n_bytes uint8 on a 64-byte boundary, full of something that is not zero."""
    raw = np.full(n_bytes + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


def call(op, node, out, src):
    """Run one kernel on arrays of our choice."""
    saved = tuple(np.empty(s.shape, s.dtype.numpy) for s in node.saved)
    kernel = KERNELS[op]
    in_place = bool(src) and out is src[0]
    site = Site(node, out, src, saved, scratch(kernel.scratch(node, "f32")), in_place, "f32")
    kernel.bind(site)()  # which may hold addresses only: site keeps the arrays
    return out


# -- what is declared ---------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("op", ops(lambda op: True, EVERY))
def test_the_declaration_is_complete(op):
    samples = SAMPLES[op.name]
    assert len(samples) >= 2, "too few samples"
    assert isinstance(op.ggml, IntEnum)
    assert EVERY[op.name] is op
    if isinstance(op.grad, NoGrad):
        assert len(op.grad.reason) > 10, "the reason is a sentence"
    else:
        assert any(differentiable(op, s) for s in samples), "no gradient is ever compared"


# -- what is refused ----------------------------------------------------------------------------


def misfits(sources):
    """(what is wrong, the sources with one of them spoiled); some ops take some of these."""
    for i, s in enumerate(sources):
        spoiled = {
            "another type": (s.shape, F32 if s.dtype is I32 else I32),
            "no axes": ((), F32),
            "one axis": ((s.n_elements,), F32),
            "other axes": ((2, 3, 1, 5), F32),
            "nothing in it": ((0, *s.shape[1:]), F32),
            "one more in a row": ((*s.shape[:-1], (*s.shape, 0)[-1] + 1), F32),
        }
        for wrong, (shape, kind) in spoiled.items():
            yield f"source {i}: {wrong}", [*sources[:i], zeros(shape, kind), *sources[i + 1 :]]


def settings_of(op):
    return {key for sample in SAMPLES[op.name] for key in sample.params}


@needs("numba_cuda")
@pytest.mark.parametrize("op", ops(lambda op: True, OWN) or [None])
def test_a_reference_gives_what_the_spec_says(op):
    """Of ops that a card computes alone: as many results, of the same shapes."""
    for sample in SAMPLES[op.name]:
        src, node = build(op, sample)
        computed = list(op.results(*map(in_float64, src), **sample.params))
        assert [x.shape for x in computed] == [t.shape for t in (node, *node.saved)]
        assert all(np.isfinite(x).all() for x in computed)
        np.testing.assert_array_equal(op.ref(*map(in_float64, src), **sample.params), computed[0])


@pytest.mark.quick
@pytest.mark.parametrize("op", ops(lambda op: True, EVERY))
def test_every_setting_says_what_it_refuses(op):
    assert op.refuses.keys() == settings_of(op)
    for setting, refused in op.refuses.items():
        values = [s.params[setting] for s in SAMPLES[op.name] if setting in s.params]
        if not refused and isinstance(values[0], tuple | str):
            raise AssertionError(f"{setting}: not every shape or word can be right")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("op", "setting", "value"),
    [
        pytest.param(op, setting, value, id=f"{name}-{setting}-{value}")
        for name, op in EVERY.items()
        for setting, values in op.refuses.items()
        for value in values
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_wrong_setting_is_a_shape_error(op, setting, value):
    """In one sentence with the setting's name or value, from every sample that it is wrong for."""
    refused = 0
    for sample in SAMPLES[op.name]:
        if setting not in sample.params:
            continue
        try:
            op(*map(as_leaf, sample.arrays), **{**sample.params, setting: value})
        except ShapeError as error:
            refused += 1
            sentence = str(error)
            assert len(sentence) > 10 and "\n" not in sentence
            assert isinstance(value, tuple) or setting in sentence or str(value) in sentence
    assert refused, "every sample takes it"


TAKE_ANYTHING = {"after", "cont", "dup", "arange"}  # all types and shapes, or no source


@pytest.mark.quick
@pytest.mark.parametrize("op", ops(lambda op: True, EVERY))
def test_what_does_not_fit_is_a_shape_error(op):
    """One sentence when the graph is built: no other error, and none from a kernel later."""
    refused = 0
    for n, sample in enumerate(SAMPLES[op.name]):
        for wrong, sources in misfits([as_leaf(a) for a in sample.arrays]):
            try:
                op(*sources, **sample.params)
            except ShapeError as error:
                refused += 1
                assert len(str(error)) > 10 and "\n" not in str(error)
            except Exception as error:
                raise AssertionError(f"sample {n}, {wrong}: {error!r}") from error
    assert (refused == 0) == (op.name in TAKE_ANYTHING)


# -- forward and backward -----------------------------------------------------------------------


@pytest.mark.parametrize("op, sample", CASES)
def test_the_kernel_agrees_with_the_reference(op, sample):
    src, out = build(op, sample)
    before = [array(s).copy() for s in src]
    wanted = np.asarray(op.ref(*(in_float64(s).copy() for s in src), **sample.params))
    (found,) = run(out)
    assert values(out, found).shape == out.shape == wanted.shape
    assert found.dtype == out.dtype.numpy
    if found.dtype.kind == "i":
        np.testing.assert_array_equal(found, wanted)
    else:
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        allowed = TOLERANCE[out.dtype] * largest
        np.testing.assert_allclose(values(out, found), wanted, rtol=0, atol=allowed)
    changed = {*op.changes, 0} if op.memory is Memory.ALIAS else {*op.changes}
    for i, (s, b) in enumerate(zip(src, before, strict=True)):
        assert i in changed or same_bits(array(s), b), f"the kernel wrote to source {i}"


@pytest.mark.parametrize("op, sample", [c for c in CASES if differentiable(*c.values)])
def test_the_gradient_is_the_slope_of_the_reference(op, sample, gradients):
    slopes = check_gradient(
        lambda *src: op(*src, **sample.params),
        sample.arrays,
        np.random.default_rng(1),
        differentiable(op, sample),
    )
    for s in slopes:
        assert s.error < GRADIENT_TOLERANCE, f"source {s.source}: {s}"
    gradients[op.name] += len(slopes)


# -- F16 and BF16 -------------------------------------------------------------------------------

HALF_OPS = ops(lambda op: op.halves)


def mixtures(op, sample, kind):
    """The sources as F32 leaves, and as leaves of which all, the first, or another one is half."""
    floats = float_sources(sample)
    for chosen in {tuple(floats), *((i,) for i in floats)}:
        wide = [as_leaf(a) for a in sample.arrays]
        (*halves,) = run(*(cpy(wide[i], kind) for i in chosen))
        mixed = list(wide)
        for i, half in zip(chosen, halves, strict=True):
            mixed[i] = leaf(half, dtype=kind)
        yield mixed


@pytest.mark.parametrize("kind", [F16, BF16], ids=str)
@pytest.mark.parametrize("op", HALF_OPS)
def test_halves_are_computed_as_f32(op, kind):
    """Bitwise what copies before and after make of it, in the first source's type."""
    for n, sample in enumerate(SAMPLES[op.name]):
        for mixed in mixtures(op, sample, kind):
            node = op(*mixed, **sample.params)
            wide = [leaf(in_float64(s).astype(np.float32)) for s in mixed]
            assert node.dtype is mixed[0].dtype
            found, wanted = run(node, cpy(op(*wide, **sample.params), node.dtype))
            assert same_bits(found, wanted), f"sample {n}"
            exact = np.asarray(op.ref(*map(in_float64, mixed), **sample.params))
            allowed = TOLERANCE[node.dtype] * np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
            np.testing.assert_allclose(values(node, found), exact, rtol=0, atol=allowed)


@pytest.mark.parametrize("op", [p for p in HALF_OPS if not isinstance(p.values[0].grad, NoGrad)])
def test_gradients_pass_through_halves(op):
    """The slope is of what was not rounded, so it differs by F16's rounding of the sources."""
    for sample in SAMPLES[op.name]:
        slopes = check_gradient(
            partial(of_halves, op, sample.params),
            sample.arrays,
            np.random.default_rng(1),
            differentiable(op, sample),
        )
        for s in slopes:
            assert s.error < 20 * TOLERANCE[F16], f"source {s.source}: {s}"


def of_halves(op, params, *src):
    return op(*(cpy(s, F16) for s in src), **params)


# -- memory -------------------------------------------------------------------------------------


def every_other(a):
    """The same values in every other element along the last axis."""
    wide = np.full((*a.shape[:-1], 2 * a.shape[-1]), np.float32(7))
    wide[..., ::2] = a
    return wide[..., ::2]


def turned(a):
    """The same values with the axes in reverse order in memory."""
    return np.array(a, np.float32, order="F")


@pytest.mark.parametrize("layout", [every_other, turned])
@pytest.mark.parametrize("op", ops(lambda op: True))
def test_gaps_in_a_source_change_nothing(op, layout):
    compared = 0
    for n, sample in enumerate(SAMPLES[op.name]):
        loose = [i for i in float_sources(sample) if sample.arrays[i].ndim]
        if op.memory is Memory.ALIAS:  # what is written to must be without gaps
            loose = [i for i in loose if i > 0]
        loose = [i for i in loose if i not in op.changes]  # of a copy, changes would be lost
        _, plain = build(op, sample)
        src = [
            leaf(layout(np.float32(a))) if i in loose else as_leaf(a)
            for i, a in enumerate(sample.arrays)
        ]
        (wanted,) = run(plain)
        try:
            loosened = op(*src, **sample.params)
        except ShapeError as error:  # the builder makes a copy
            assert "gaps" in str(error)
            continue
        compared += 1
        (found,) = run(loosened)
        if op.strided and found.dtype == np.float32:  # may add in another order
            allowed = TOLERANCE[F32] * np.abs(wanted).max(initial=0.0)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed)
        else:
            assert same_bits(found, wanted), f"sample {n}"
    assert compared, "every sample is refused"


OVERWRITING = (Memory.INPLACE, Memory.INPLACE_FIRST)


@pytest.mark.parametrize("op", ops(lambda op: op.memory in OVERWRITING))
def test_writing_over_a_source_changes_no_bit(op):
    compared = sum(overwrite(op, sample) for sample in SAMPLES[op.name])
    assert compared, "no source can be written over, so the op is not in place"


def overwrite(op, sample):
    """Write the result over each source that it fits and may lie on; how many those are."""
    src, node = build(op, sample)
    (wanted,) = run(node)
    allowed = src[:1] if op.memory is Memory.INPLACE_FIRST else src
    fitting = [i for i, s in enumerate(allowed) if (s.shape, s.dtype) == (node.shape, node.dtype)]
    for i in fitting:
        arrays = tuple(array(s).copy() for s in src)
        assert same_bits(call(op, node, arrays[i], arrays), wanted), f"over source {i}"
    return len(fitting)


@pytest.mark.parametrize("op", ops(lambda op: op.memory is Memory.INPLACE))
def test_writing_over_a_source_that_is_used_twice_changes_no_bit(op):
    for n, sample in enumerate(SAMPLES[op.name]):
        src = [as_leaf(a) for a in sample.arrays]
        first = src[0]
        src = [first if (s.shape, s.dtype) == (first.shape, first.dtype) else s for s in src]
        node = op(*src, **sample.params)
        if src.count(first) > 1 and (node.shape, node.dtype) == (first.shape, first.dtype):
            (wanted,) = run(node)
            over = array(first).copy()
            arrays = tuple(over if s is first else array(s).copy() for s in src)
            assert same_bits(call(op, node, over, arrays), wanted), f"sample {n}"


# -- what Hypothesis draws ------------------------------------------------------------------------

DERIVED = fed_by_results(OPS)
FEW = settings(max_examples=5, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("op", ops(lambda op: op.memory is not Memory.VIEW))
@FEW
@given(data=st.data())
def test_drawn_sources(op, gradients, data):
    """Values, sizes and layouts: the kernel, over its sources too, and the gradient."""
    arrays, params = draw_sample(data, op, DERIVED)
    node = op(*draw_layout(data, op, arrays), **params)
    exact = [in_float64(as_leaf(a)).copy() for a in arrays]
    wanted = np.asarray(op.ref(*(a.copy() for a in exact), **params))
    (found,) = run(node)
    assert values(node, found).shape == node.shape == wanted.shape
    if found.dtype.kind == "i":
        np.testing.assert_array_equal(found, wanted)
    else:
        largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
        allowed = TOLERANCE[node.dtype] * largest + EPSILON
        allowed = allowed + 20 * conditioned(op, exact, params, wanted)
        np.testing.assert_allclose(values(node, found), wanted, rtol=0, atol=allowed)
    sample = Sample(arrays, params)
    if op.memory in OVERWRITING:
        overwrite(op, sample)
    wrt = differentiable(op, sample)
    if wrt:
        slopes = check_gradient(
            lambda *src: op(*src, **params), arrays, np.random.default_rng(1), wrt
        )
        for s in slopes:
            rounding = abs(s.gradient - s.reference) < ROUNDING
            assert s.error < GRADIENT_TOLERANCE or rounding, f"source {s.source}: {s}"
        gradients[op.name] += len(slopes)


# -- threads, and no compiler -------------------------------------------------------------------


def enlarged(op, sample):
    """The sample repeated along its first axis until threads share it, if results are rows too."""
    shapes = {getattr(a, "shape", None) for a in sample.arrays}
    (shape, *others) = shapes or {()}
    if any(isinstance(a, Tensor) for a in sample.arrays):
        return sample
    if others or not shape or sample.params.keys() & {"shape", "strides", "size", "n_rows"}:
        return sample
    times = -(-(1 << 16) // prod(shape))
    arrays = tuple(np.concatenate([a] * times) for a in sample.arrays)
    large = dataclasses.replace(sample, arrays=arrays)
    try:
        is_rowwise = build(op, large)[1].n_elements <= arrays[0].size
    except ShapeError:
        return sample
    return large if is_rowwise else sample


@pytest.mark.skipif(not JIT or threads.get() < 2, reason="there is only one thread")
@pytest.mark.parametrize("op", ops(lambda op: op.memory is not Memory.VIEW))
def test_the_number_of_threads_changes_no_bit(op):
    most = threads.get()
    for n, sample in enumerate(SAMPLES[op.name]):
        large = enlarged(op, sample)
        results = []
        try:
            for n_threads in (1, 2):
                threads.set(n_threads)
                results += run(build(op, large)[1])
        finally:
            threads.set(most)
        assert same_bits(*results), f"sample {n}"


@pytest.mark.skipif(not JIT, reason="this is the run without the JIT")
def test_without_the_jit():
    """The same kernels as plain Python: what the compiler might hide, and what coverage can see."""
    ops = "add or mul- or repeat_back or swiglu or silu or view_back or narrow or cumsum"
    chosen = f"({ops}) and (kernel or halves or gaps or writing)"
    done = python("-m", "pytest", "-q", __file__, "-k", chosen, NUMBA_DISABLE_JIT="1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


# -- at the end ---------------------------------------------------------------------------------


def test_every_gradient_was_compared(request, gradients):
    """Of each op whose gradients this session set out to compare, at least one was."""
    chosen = {
        item.callspec.params["op"].name
        for item in request.session.items
        if item.originalname == test_the_gradient_is_the_slope_of_the_reference.__name__
    }
    assert chosen <= gradients.keys(), f"no gradient of {sorted(chosen - gradients.keys())}"
