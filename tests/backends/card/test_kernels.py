"""Every kernel of the card against the op's float64 reference, on the op's own samples."""

import numpy as np
import pytest

from pyggml.backends import CPU, read
from pyggml.backends.cuda.table import kernels
from pyggml.graph import Graph
from pyggml.ops import OPS
from pyggml.quants import dequantize
from pyggml.schedule import Devices, results
from pyggml.tensors import Tensor, leaf


def as_leaf(a):
    if isinstance(a, Tensor):
        return a
    a = np.asarray(a)
    return leaf(a.astype(np.float32) if a.dtype.kind == "f" else a)


def exact(t):
    """The leaf's numbers, in float64 if they are no integers."""
    stored = read(t)
    if t.dtype.quantised:
        stored = dequantize(stored, t.dtype.name)
    return stored.astype(np.float64) if stored.dtype.kind == "f" else stored


@pytest.mark.parametrize("name", sorted(kernels()))
def test_the_kernel_agrees_with_the_reference(name, card):
    op, computed = OPS[name], 0
    for sample in op.samples(np.random.default_rng(5)):
        sources = [as_leaf(a) for a in sample.arrays]
        wanted = op.ref(*(exact(s) for s in sources), **sample.params)
        node = op(*sources, **sample.params)
        if card.unsupported(node):
            continue
        (found,) = results(Graph.of(node), Devices([card, CPU()]))
        scale = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)))
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=4e-6 * scale)
        computed += 1
    assert computed


def test_kernels_are_of_ops_that_there_are():
    assert set(kernels()) <= set(OPS)
