"""The short causal convolution of Mamba, LFM2 and gated delta nets: see ops/recurrent/ssm_conv.py.

Row m of what a token may see is state m for m < n_back, else token m − n_back.
"""

from typing import Any

from pyggml.backends.cuda.code.formulas import ZERO
from pyggml.backends.cuda.code.jit import device, kernel
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.kernel import CudaSite
from pyggml.backends.cuda.runtime.launches import in_turn, per_element
from pyggml.backends.cuda.runtime.table import declare
from pyggml.graph.call import Call


@device
def _input(state, x, m, c, n_back, n_channels):
    if m < n_back:
        return state[m * n_channels + c]
    return x[(m - n_back) * n_channels + c]


@kernel
def _forward(y, state, x, w, positions, n_back, n_channels):
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        t, c = i // n_channels, i % n_channels
        total = ZERO
        for back in range(min(n_back, positions[t]) + 1):
            tap = w[c * (n_back + 1) + n_back - back]
            total += tap * _input(state, x, n_back + t - back, c, n_back, n_channels)
        y[i] = total


@kernel
def _last(last, state, x, n_back, n_channels):
    n_tokens = x.size // n_channels
    for i in range(cuda.grid(1), last.size, cuda.gridsize(1)):
        m = n_tokens + i // n_channels
        last[i] = _input(state, x, m, i % n_channels, n_back, n_channels)


def _bind(site: CudaSite) -> Call:
    state, x, w, positions = site.src
    n_back, n_channels = site.node.src[0].shape
    sizes = (n_back, n_channels)
    return in_turn(
        per_element(_forward, x.size, site.stream, site.out, state, x, w, positions, *sizes),
        per_element(_last, state.size, site.stream, site.saved[0], state, x, *sizes),
    )


@kernel
def _back_x(dx, dstate, w, positions, dy, n_back, n_channels):
    """Each row m has reached the tokens m − n_back … m of its own sequence."""
    n_tokens = dx.size // n_channels
    for i in range(cuda.grid(1), (n_back + n_tokens) * n_channels, cuda.gridsize(1)):
        m, c = i // n_channels, i % n_channels
        total = ZERO
        for back in range(n_back + 1):
            t = m - n_back + back
            if 0 <= t < n_tokens and back <= positions[t]:
                total += w[c * (n_back + 1) + n_back - back] * dy[t * n_channels + c]
        if m < n_back:
            dstate[i] = total
        else:
            dx[i - n_back * n_channels] = total


@kernel
def _back_w(dw, state, x, positions, dy, n_back, n_channels):
    n_tokens = x.size // n_channels
    for i in range(cuda.grid(1), dw.size, cuda.gridsize(1)):
        c, back = i // (n_back + 1), n_back - i % (n_back + 1)
        total = ZERO
        for t in range(n_tokens):
            if back <= positions[t]:
                seen = _input(state, x, n_back + t - back, c, n_back, n_channels)
                total += dy[t * n_channels + c] * seen
        dw[i] = total


def _bind_back(site: CudaSite) -> Call:
    state, x, w, positions, dy = site.src
    dstate, dw = site.saved
    n_back, n_channels = site.node.src[0].shape
    sizes: tuple[Any, ...] = (dy, n_back, n_channels)
    n = x.size + state.size
    return in_turn(
        per_element(_back_x, n, site.stream, site.out, dstate, w, positions, *sizes),
        per_element(_back_w, w.size, site.stream, dw, state, x, positions, *sizes),
    )


declare("ssm_conv", _bind)
declare("ssm_conv_back", _bind_back)
