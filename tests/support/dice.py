"""Steps on halves by a device, which are rounded with the dice of the host."""

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.dtypes import BF16, F16
from pyggml.graph.tensor import leaf
from pyggml.jit.tasks import SHARE
from pyggml.ops import OPS, opt_step_half
from pyggml.ops.arithmetic.dropout import draw_words
from pyggml.runtime import Devices, results

N = SHARE + 41  # in a second share; odd


def expect_the_host_s(device):
    """AssertionError unless steps that float32 computes exactly are rounded to the same bits."""
    for kind in (BF16, F16):
        host, other = (_after_a_step(kind, d) for d in (Devices(), Devices([device])))
        np.testing.assert_array_equal(other, host, err_msg=kind.name)


def _after_a_step(kind, devices):
    """Numbers of all sizes, also F16's subnormal ones, after one step of SGD, as bits."""
    rng = np.random.default_rng(1)
    wide = (rng.integers(-127, 128, N) * 2.0 ** rng.integers(-26, 4, N)).astype(np.float32)
    p = wide.astype(np.float16) if kind is F16 else (wide.view(np.uint32) >> 16).astype(np.uint16)
    g = (rng.integers(-127, 128, N) * np.abs(wide) / 2048).astype(np.float32)
    settings, draw = np.array([2.0**-6, 0], np.float32), draw_words((5 << 32) + 7, 9)
    sources = leaf(p, dtype=kind), leaf(g), leaf(settings), leaf(draw)
    node = opt_step_half(OPS["opt_step_sgd"], *sources, stream=3)
    return np.asarray(*results(Graph.of(node), devices)).view(np.uint16)
