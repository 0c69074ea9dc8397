"""Draws from an op's declared samples: other values, other sizes, other layouts in memory.

Sizes change together wherever they are the same in a sample, as rows, heads or keys do. They grow
past tiles; they shrink as far as another sample of the op has gone on that axis, and not at all
where integers are among the sources, which may be numbers of rows. What the op then refuses is
drawn in the sizes that it was declared with. Values, and settings that are real numbers, are nearly
those of the sample, so that they stay in the op's domain and away from its kinks.
"""

import numpy as np
from hypothesis import strategies as st

from pyggml.errors import PyggmlError
from pyggml.graph.op import Memory, NoGrad
from pyggml.graph.tensor import Tensor, as_leaf, leaf
from pyggml.runtime import run

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32, 33, 48, 64, 65, 66, 96, 130)
MOST = 6000  # elements of an array


def fed_by_results(ops):
    """Ops whose samples hold what another op computed from the others, such as a softmax's sum."""
    found = set()
    for op in ops.values():
        if isinstance(op.grad, NoGrad):
            continue
        sample = next(op.samples(np.random.default_rng(0)))
        node = op(*(as_leaf(a) for a in sample.arrays), **sample.params)
        results = {node, *node.saved}
        parts = op.grad(node, leaf(np.ones(node.shape, np.float32)))
        users = {t for part in parts if part is not None for t in (part, *part.src) if t.op}
        found |= {t.op.name for t in users if isinstance(t.op.grad, NoGrad) and results & {*t.src}}
    return found


def draw_sample(data, op, exclude):
    """(arrays, params) that the op accepts."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    samples = list(op.samples(rng))
    sample = data.draw(st.sampled_from(samples), "sample")
    fixed = op.name in exclude or any(isinstance(a, Tensor) for a in sample.arrays)
    if fixed:
        return sample.arrays, sample.params
    settings = {
        k: v * rng.uniform(0.8, 1.25) if type(v) is float else v for k, v in sample.params.items()
    }
    if not _accepts(op, sample.arrays, settings):
        settings = sample.params
    sizes = _draw_sizes(data, sample, samples)
    shapes = [tuple(sizes[n] for n in a.shape) for a in sample.arrays]
    if max((np.prod(s) for s in shapes), default=0) <= MOST:
        arrays = tuple(_resized(a, sizes) for a in sample.arrays)
        if _accepts(op, arrays, settings):
            return arrays, settings
    return sample.arrays, settings


def _resized(a, sizes):
    """Cut, or continued by copies; those of floats are changed a little, as equals are a kink."""
    for axis, n in enumerate(a.shape):
        places = np.arange(sizes[n])
        a = np.take(a, places % max(n, 1), axis)
        if a.dtype.kind == "f" and sizes[n] > n:
            factors = 1 + 1.37e-3 * (1 + 0.61 * axis) * (places // n)
            a = a * factors.reshape(-1, *(1,) * (a.ndim - axis - 1))
    return a


def _draw_sizes(data, sample, samples):
    """Size in the sample -> size to take instead."""
    present = sorted({n for a in sample.arrays for n in a.shape if n})
    some = st.sets(st.sampled_from(present), max_size=2) if present else st.just(set())
    changed = data.draw(some, "changed")
    whole_numbers = any(a.dtype.kind != "f" for a in sample.arrays)
    sizes = {n: n for n in (0, *present)}
    for n in sorted(changed):
        least = n if whole_numbers else _least(n, sample, samples)
        sizes[n] = data.draw(st.sampled_from([m for m in SIZES if m >= least] or [n]), f"for {n}")
    return sizes


def _least(n, sample, samples):
    """The smallest size that samples have on every axis where this one has n."""
    least = 1
    for i, a in enumerate(sample.arrays):
        for axis in range(1, a.ndim + 1):
            if a.shape[-axis] == n:
                others = (s.arrays[i].shape for s in samples if len(s.arrays) > i)
                least = max(least, min(o[-axis] for o in others if len(o) >= axis))
    return least


def _accepts(op, arrays, params):
    try:
        node = op(*(as_leaf(a) for a in arrays), **params)
        run(node)  # numbers of rows are looked at when it runs
    except PyggmlError:
        return False
    return np.prod(node.shape) <= 4 * MOST


def draw_layout(data, op, arrays):
    """Leaves of these arrays, float ones with gaps or their axes in another order in memory.

    Beside a quantised weight they have no gaps: builders copy them.
    """
    if any(isinstance(a, Tensor) and a.dtype.quantised for a in arrays):
        return [as_leaf(a) for a in arrays]
    leaves, written = [], {*op.changes, *([0] if op.memory is Memory.ALIAS else [])}
    for i, a in enumerate(arrays):
        is_float = not isinstance(a, Tensor) and a.dtype.kind == "f"
        if not is_float or not a.ndim or i in written:
            leaves.append(as_leaf(a))
            continue
        order = data.draw(st.permutations(range(a.ndim)), f"order of {i}")
        step = data.draw(st.integers(1, 3), f"step of {i}")
        inside = np.repeat(np.float32(a).transpose(order), step, axis=-1)
        leaves.append(leaf(inside[..., ::step].transpose(np.argsort(order))))
    return leaves


def conditioned(op, arrays, params, wanted):
    """How far the reference moves if the last bits of its float sources do."""
    rng = np.random.default_rng(1)
    moved = [
        a * (1 + 2.0**-23 * rng.standard_normal(a.shape)) if a.dtype.kind == "f" else a
        for a in arrays
    ]
    with np.errstate(invalid="ignore"):
        change = np.abs(np.asarray(op.ref(*moved, **params)) - wanted)
    return float(np.nanmax(change, initial=0.0))
