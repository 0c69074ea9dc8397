"""Blocks of random bytes, for devices that read them as the host does."""

import numpy as np

from pyggml import ops
from pyggml.graph.dtypes import dtype
from pyggml.graph.tensor import leaf
from pyggml.quants.scales import scale_places


def scaled_blocks(name):
    """Nodes: blocks whose scales change, the slopes along these, and those of some of the rows."""
    rng, kind = np.random.default_rng(0), dtype(name)
    raw = rng.integers(0, 256, (3, kind.row_bytes(2 * kind.block)), np.uint8)
    w = leaf((raw & 0xBF).view(kind.numpy), "w", kind)  # no scale is infinite or NaN
    u = leaf(0.1 * rng.standard_normal((3, 2, len(scale_places(name))), np.float32))
    dw = leaf(rng.standard_normal((3, 2 * kind.block), np.float32))
    ids = leaf(np.array([2, 0, 2], np.int32))
    return ops.rescale(w, u), ops.rescale_back(w, dw), ops.rescale_back_rows(w, dw, ids)
