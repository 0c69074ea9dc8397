"""Linear attention of RWKV 6 and 7 and gated linear attention: see pyggml/ops/recurrent/wkv.py."""

from typing import Any

import numpy as np

from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.ops.recurrent.recurrence import Factors, bind_forward
from pyggml.backends.cuda.ops.recurrent.recurrence_back import Gradient
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call
from pyggml.graph.tensor import Tensor

# The sources as the factors read them: w, k, r, v, a, b, and in a's place RWKV 6's u (H, D).
# The sizes are (H, D, scale).


@device
def _plain(src, sizes, t, h, j):
    at = (t * sizes[0] + h) * sizes[1] + j
    return src[0][at], src[1][at], sizes[2] * src[2][at], ZERO, ZERO


@device
def _with_u(src, sizes, t, h, j):
    w, k, r, _, _ = _plain(src, sizes, t, h, j)
    return w, k, r, src[4][h * sizes[1] + j], ZERO


@device
def _with_a_b(src, sizes, t, h, j):
    w, k, r, _, _ = _plain(src, sizes, t, h, j)
    at = (t * sizes[0] + h) * sizes[1] + j
    return w, k, r, src[4][at], src[5][at]


@device
def _value(src, sizes, t, h, i):
    return src[3][(t * sizes[0] + h) * sizes[1] + i]


# By the number of sources after w, k, r, v: none, u, or a and b.
_FACTORS = (
    Factors(_plain, _value),
    Factors(_with_u, _value, early=True),
    Factors(_with_a_b, _value, coupled=True),
)


def _forward(site: CudaSite, *sources: Any, scale: float = 1.0) -> Call:
    """sources: w, k, r, v and what the op has beside them."""
    n_heads, d, _ = site.node.src[0].shape
    sizes = (n_heads, d, np.float32(scale))
    return bind_forward(site, _FACTORS[len(sources) - 4], sources, sizes)


def _wkv6(site: CudaSite) -> Call:
    _, k, v, r, u, w, _ = site.src
    return _forward(site, w, k, r, v, u)


def _wkv7(site: CudaSite) -> Call:
    _, r, w, k, v, a, b, _ = site.src
    return _forward(site, w, k, r, v, a, b)


def _gla(site: CudaSite) -> Call:
    _, k, v, q, g, _ = site.src
    return _forward(site, g, k, q, v, scale=site.node.params["scale"])


# -- the gradient -------------------------------------------------------------------------------


@kernel
def _scale(out, x, scale):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = scale * x[i]


@kernel
def _sum_tokens(out, x):
    """out_i = Σ over tokens of x (T, the size of out)."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        total = ZERO
        for at in range(i, x.size, out.size):
            total += x[at]
        out[i] = total


def _gradient(node: Tensor) -> Gradient:
    return Gradient(_FACTORS[len(node.src) - 7], node.src[0], node.shape[0])


def _bind_back(site: CudaSite) -> Call:
    """Sources: state, w, k, r, v, positions, dy, then u or a and b; saved: all but v's."""
    gradient, (scale,) = _gradient(site.node), site.scalars
    _, w, k, r, v, positions, dy, *own = site.src
    n_heads, d, _ = site.node.src[0].shape
    calls = [gradient.bind(site, positions, dy, (w, k, r, v, *own), (n_heads, d, scale))]
    scales = (ONE, ONE, scale, ONE, ONE)
    for out, of_factor, by in zip(site.saved[1:], gradient.of_factors(site), scales, strict=False):
        if out.size == of_factor.size:
            calls.append(per_element(_scale, out.size, site.stream, out, of_factor, by))
        else:
            calls.append(per_element(_sum_tokens, out.size, site.stream, out, of_factor))
    return in_turn(*calls)


declare("rwkv_wkv6", _wkv6)
declare("rwkv_wkv7", _wkv7)
declare("gated_linear_attn", _gla)
declare("wkv_back", _bind_back, scratch=lambda node, _: _gradient(node).n_bytes)
