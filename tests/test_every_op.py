"""What holds for every op, checked from its declaration: nothing here names one."""

import dataclasses
import os
import subprocess
import sys
from enum import IntEnum
from math import prod
from pathlib import Path

import numpy as np
import pytest

from pyggml._jit import JIT, set_threads, threads
from pyggml.backends.cpu import array
from pyggml.backward.check import as_leaf, check_gradient, evaluate, in_float64
from pyggml.dtypes import BF16, F16, F32
from pyggml.errors import NoGradientError
from pyggml.ops import OPS
from pyggml.runtime import run
from pyggml.tensor import Memory, NoGrad, Site, Tensor, leaf

# Largest error allowed, relative to the largest value of the reference.
TOLERANCE = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}
GRADIENT_TOLERANCE = 1e-4

SAMPLES = {
    name: list(op.samples(np.random.default_rng(0))) for name, op in OPS.items()
}
ALL = [pytest.param(op, id=name) for name, op in OPS.items()]
CASES = [
    pytest.param(OPS[name], sample, id=f"{name}-{i}")
    for name, samples in SAMPLES.items()
    for i, sample in enumerate(samples)
]
RUNNABLE = [c for c in CASES if c.values[0].memory is not Memory.VIEW]
INPLACE = [c for c in CASES if c.values[0].memory is Memory.INPLACE]
DIFFERENTIABLE = [c for c in CASES if not isinstance(c.values[0].grad, NoGrad)]


def build(op, sample):
    """Fresh leaves, and the node that applies op to them."""
    src = [as_leaf(a) for a in sample.arrays]
    return src, op(*src, **sample.params)


def is_float(t):
    return t.op is None and t.dtype is F32


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def values(t, found):
    """The numbers of a result, BF16 unpacked."""
    if t.dtype is BF16:
        return (found.astype(np.uint32) << 16).view(np.float32)
    return found


def scratch(n_bytes):
    """n_bytes uint8 on a 64-byte boundary, of no particular contents."""
    raw = np.full(n_bytes + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes]


def call(op, node, out, src):
    """Run one kernel on arrays of our choice."""
    saved = tuple(np.empty(s.shape, s.dtype.numpy) for s in node.saved)
    kernel, arguments = op.run(Site(node, out, src, saved, scratch(op.needs.work(node))))
    kernel(*arguments)
    return out


@pytest.mark.parametrize("op", ALL)
def test_the_declaration_is_complete(op):
    assert len(SAMPLES[op.name]) >= 2, "too few samples"
    assert isinstance(op.ggml, IntEnum)
    assert OPS[op.name] is op
    if isinstance(op.grad, NoGrad):
        assert len(op.grad.reason) > 10, "a reason is a sentence"
    else:
        assert any(differentiable(op, s) for s in SAMPLES[op.name]), "no gradient is ever compared"


@pytest.mark.parametrize("op, sample", CASES)
def test_the_kernel_agrees_with_the_reference(op, sample):
    src, out = build(op, sample)
    before = [array(s).copy() for s in src]
    wanted = np.asarray(op.ref(*(in_float64(s).copy() for s in src), **sample.params))
    (found,) = run(out)
    assert found.shape == out.shape == wanted.shape
    assert found.dtype == out.dtype.numpy
    if found.dtype.kind == "i":
        np.testing.assert_array_equal(found, wanted)
    else:
        finite = wanted[np.isfinite(wanted)]
        largest = np.abs(finite).max(initial=0.0)
        np.testing.assert_allclose(
            values(out, found), wanted, rtol=0, atol=TOLERANCE[out.dtype] * largest
        )
    if op.memory is not Memory.ALIAS:
        for s, b in zip(src, before, strict=True):
            assert same_bits(array(s), b), "the kernel wrote to a source"


def differentiable(op, sample):
    """The sources that the gradient rule has a gradient for."""
    src, out = build(op, sample)
    parts = op.grad(out, leaf(np.ones(out.shape, np.float32)))
    floats = [i for i, a in enumerate(sample.arrays) if getattr(a, "dtype", None) == np.float64]
    return [i for i in floats if parts[i] is not None]


@pytest.mark.parametrize("op, sample", DIFFERENTIABLE)
def test_the_gradient_is_the_slope_of_the_reference(op, sample, gradients):
    wrt = differentiable(op, sample)
    if not wrt:
        pytest.skip("no float source")
    slopes = check_gradient(
        lambda *src: op(*src, **sample.params), sample.arrays, np.random.default_rng(1), wrt
    )
    for s in slopes:
        assert s.error < GRADIENT_TOLERANCE, f"source {s.source}: {s}"
    gradients[op.name] += len(slopes)


def with_gaps(a):
    """The same values in every other element along the last axis."""
    wide = np.full((*a.shape[:-1], 2 * a.shape[-1]), np.float32(7))
    wide[..., ::2] = a
    return wide[..., ::2]


def turned(a):
    """The same values with the axes in reverse order in memory."""
    return np.array(a, np.float32, order="F")


@pytest.mark.parametrize("layout", [with_gaps, turned])
@pytest.mark.parametrize("op, sample", CASES)
def test_sources_with_gaps_change_no_bit(op, sample, layout):
    first = 1 if op.memory is Memory.ALIAS else 0  # what is written to must be without gaps
    plain, out = build(op, sample)
    gapped = [
        leaf(layout(s.data)) if i >= first and is_float(s) and s.shape else as_leaf(a)
        for i, (a, s) in enumerate(zip(sample.arrays, plain, strict=True))
    ]
    if all(g.is_contiguous for g in gapped):
        pytest.skip("no float source with room for gaps")
    (wanted,) = run(out)
    (found,) = run(op(*gapped, **sample.params))
    assert same_bits(found, wanted)


@pytest.mark.parametrize("op, sample", INPLACE)
def test_writing_over_a_source_changes_no_bit(op, sample):
    src, node = build(op, sample)
    (wanted,) = run(node)
    fits = [i for i, s in enumerate(src) if (s.shape, s.dtype) == (node.shape, node.dtype)]
    for i in fits:
        arrays = tuple(array(s).copy() for s in src)
        assert same_bits(call(op, node, arrays[i], arrays), wanted), f"over source {i}"


@pytest.mark.parametrize("op, sample", INPLACE)
def test_writing_over_a_source_that_is_used_twice(op, sample):
    src, _ = build(op, sample)
    alike = [s for s in src if (s.shape, s.dtype) == (src[0].shape, F32)]
    if len(alike) < 2:
        pytest.skip("there is one source of this shape")
    same = [src[0] if s in alike else s for s in src]
    node = op(*same, **sample.params)
    (wanted,) = run(node)
    shared = array(src[0]).copy()
    arrays = tuple(shared if s is src[0] else array(s).copy() for s in same)
    if (node.shape, node.dtype) == (src[0].shape, F32):
        assert same_bits(call(op, node, shared, arrays), wanted)


def enlarged(op, sample):
    """The sample repeated along its first axis until a thread has something to do, if it fits."""
    shapes = {getattr(a, "shape", None) for a in sample.arrays}
    (shape, *others) = shapes
    if others or not shape or sample.params.keys() & {"shape", "strides", "size"}:
        return sample
    times = -(-(1 << 16) // prod(shape))
    arrays = tuple(np.concatenate([a] * times) for a in sample.arrays)
    return dataclasses.replace(sample, arrays=arrays)


@pytest.mark.skipif(not JIT, reason="the interpreter has no parallel kernels")
@pytest.mark.parametrize("op, sample", RUNNABLE)
def test_the_number_of_threads_changes_no_bit(op, sample):
    most = threads()
    if most < 2:
        pytest.skip("there is one thread")
    large = enlarged(op, sample)
    results = []
    try:
        for n in (1, 2):
            set_threads(n)
            _, out = build(op, large)
            results += run(out)
    finally:
        set_threads(most)
    assert same_bits(*results)


def test_a_wrong_gradient_is_noticed():
    """The checker itself: an op whose rule forgets a factor."""
    honest = OPS["sqr"]
    wrong = dataclasses.replace(honest, grad=lambda node, dy: (dy,))
    x = np.random.default_rng(0).standard_normal((3, 8))
    for op, lowest, highest in ((honest, 0, 1e-6), (wrong, 1e-2, 2)):
        (slope,) = check_gradient(op, [x], np.random.default_rng(1))
        assert lowest <= slope.error <= highest


def test_the_checker_wants_something_to_differentiate_by():
    with pytest.raises(NoGradientError, match="no float array"):
        check_gradient(OPS["count_equal"], [np.zeros(3, np.int32)] * 2, np.random.default_rng(0))


def test_a_graph_is_evaluated_in_float64():
    x = leaf(np.array([[1.0, 2.0]], np.float32))
    y = OPS["add"](OPS["scale"](x, s=1.0, b=1e-12), x)
    assert evaluate(y).dtype == np.float64
    assert evaluate(y)[0, 0] == 2.0 + 1e-12
    assert evaluate(y, {x: np.array([[3.0, 0.0]])})[0, 0] == 6.0 + 1e-12
    assert isinstance(y, Tensor)


@pytest.mark.skipif(not JIT, reason="this is the run without the JIT")
def test_without_the_jit():
    """The same kernels as plain Python: what the compiler might hide, and what coverage can see."""
    chosen = "add- or mul- or repeat_back or swiglu or silu or view_back or narrow or cumsum"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__)), "-k", chosen],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
