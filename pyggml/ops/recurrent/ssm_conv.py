"""The short causal convolution of Mamba, LFM2 and gated delta nets.

ssm_conv       y[t,c] = Σ_i w[c,i]·x[t − K + 1 + i, c], over the tokens of t's own sequence
ssm_conv_back  dx; its `saved` are the gradients of the initial state and w

A row of tokens holds one sequence after another; a token at position 0 begins one.
"""

from collections.abc import Iterator

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes, expect_type
from pyggml.ops.recurrent.recurrence import expect_positions, sample_positions, with_dy


def ssm_conv(state: Tensor, x: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    """Causal convolution of each channel: x (T, C), w (C, K) -> (T, C), F32 (ggml's SSM_CONV).

    state (K − 1, C) holds the inputs before the first token, the latest last. positions (T,) I32
    tell how many earlier tokens belong to a token's own sequence; it sees no others. The result's
    `saved[0]` is the state after the last token. ggml's op takes state and x joined and transposed,
    and has an axis of sequences. Raises ShapeError if shapes or types do not fit.
    """
    return SSM_CONV(state, x, w, positions)


# -- ssm_conv -----------------------------------------------------------------------------------


@kernel
def _turn(to, x):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            to[j, i] = x[i, j]


@kernel
def _ssm_conv(y, last, taps, state, x, w, positions):
    n_back = state.shape[0]
    _turn(taps, w)
    for t in range(x.shape[0]):
        out = y[t]
        for c in range(out.size):
            out[c] = 0
        for back in range(min(n_back, positions[t]) + 1):
            tap = taps[n_back - back]
            row = x[t - back] if t >= back else state[n_back + t - back]
            for c in range(out.size):
                out[c] += tap[c] * row[c]
    for i in range(n_back):
        t = x.shape[0] - n_back + i
        row = x[t] if t >= 0 else state[n_back + t]
        for c in range(row.size):
            last[i, c] = row[c]


@kernel
def _ssm_conv_back(dx, dstate, dw, taps, dtaps, state, x, w, positions, dy):
    n_back = state.shape[0]
    _turn(taps, w)
    dx[:], dstate[:], dtaps[:] = 0, 0, 0
    for t in range(x.shape[0]):
        d = dy[t]
        for back in range(min(n_back, positions[t]) + 1):
            tap, dtap = taps[n_back - back], dtaps[n_back - back]
            row = x[t - back] if t >= back else state[n_back + t - back]
            drow = dx[t - back] if t >= back else dstate[n_back + t - back]
            for c in range(d.size):
                dtap[c] += d[c] * row[c]
                drow[c] += d[c] * tap[c]
    _turn(dw, dtaps)


def _taps(site: Site) -> np.ndarray:
    """The scratch, (…, K, C): transposed weights, in the back op also their gradients."""
    c, k = site.node.src[2].shape
    return site.scratch.view(np.float32).reshape(-1, k, c)


def _conv_run(site: Site) -> Call:
    return Call(_ssm_conv, site.out, *site.saved, _taps(site)[0], *site.src)


def _conv_spec(state: Tensor, x: Tensor, w: Tensor, positions: Tensor) -> Spec:
    expect_axes("ssm_conv", "x", x, 2)
    expect_axes("ssm_conv", "w", w, 2)
    expect_type("ssm_conv", "x", x)
    t, c = x.shape
    expect("ssm_conv", "w", w, (c, w.shape[1]))
    expect("ssm_conv", "state", state, (w.shape[1] - 1, c))
    expect_positions("ssm_conv", positions, t)
    return Spec(x.shape)


def _conv_ref(state: np.ndarray, x: np.ndarray, w: np.ndarray, positions: np.ndarray) -> np.ndarray:
    n_back, y = len(state), np.zeros(x.shape)
    inputs = np.concatenate([state, x])
    for t, position in enumerate(positions):
        for back in range(min(n_back, position) + 1):
            y[t] += w[:, n_back - back] * inputs[n_back + t - back]
    return y


def _conv_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx_t = Σ_j w_j · dy_{t+j}, dw_j = Σ_t x_{t-j} · dy_t"""
    dx = SSM_CONV_BACK(*node.src, dy)
    dstate, dw = dx.saved
    return dstate, dx, dw, None


def _conv_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, c, k in [(1, 1, 1), (1, 3, 4), (9, 5, 4), (17, 40, 3), (2, 2, 5)]:
        arrays = (rng.standard_normal(s) for s in ((k - 1, c), (t, c), (c, k)))
        yield Sample((*arrays, sample_positions(rng, t)))


SSM_CONV = op(
    name="ssm_conv",
    ggml=GGMLOp.SSM_CONV,
    spec=_conv_spec,
    ref=_conv_ref,
    grad=_conv_grad,
    samples=_conv_samples,
    saved=lambda state, x, w, positions: (Spec(state.shape),),
    costly=True,
)
cpu_kernel(SSM_CONV, _conv_run, scratch=lambda node, _: node.src[2].n_bytes)


def _conv_back_run(site: Site) -> Call:
    taps, dtaps = _taps(site)
    return Call(_ssm_conv_back, site.out, *site.saved, taps, dtaps, *site.src)


def _conv_back_spec(state: Tensor, x: Tensor, w: Tensor, positions: Tensor, dy: Tensor) -> Spec:
    expect("ssm_conv_back", "dy", dy, x.shape)
    return _conv_spec(state, x, w, positions)


def _conv_back_ref(
    state: np.ndarray, x: np.ndarray, w: np.ndarray, positions: np.ndarray, dy: np.ndarray
) -> np.ndarray:
    dx, n_back = np.zeros(x.shape), len(state)
    for t, position in enumerate(positions):
        for back in range(min(n_back, position, t) + 1):
            dx[t - back] += w[:, n_back - back] * dy[t]
    return dx


SSM_CONV_BACK = op(
    name="ssm_conv_back",
    spec=_conv_back_spec,
    ref=_conv_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=with_dy(_conv_samples, 1),
    saved=lambda state, x, w, *_: (Spec(state.shape), Spec(w.shape)),
    costly=True,
)
cpu_kernel(SSM_CONV_BACK, _conv_back_run, scratch=lambda node, _: 2 * node.src[2].n_bytes)
