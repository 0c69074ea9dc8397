"""Gated delta net (arXiv:2412.06464); with one gate per channel, Kimi delta attention.

gated_delta_net       S' = S_{t-1}·diag(e^g_t),  S_t = S' + β_t (v_t − S' k_t) k_tᵀ,
                      y_t = S_t q_t / √D
gated_delta_net_back  dv; its `saved` are the gradients of state, q, k, g, β

A row of tokens holds one sequence after another; a token at position 0 begins one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import exp32
from pyggml.kernels.kernel import Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.recurrent import recurrence
from pyggml.ops.recurrent.recurrence import (
    A,
    B,
    K,
    R,
    V,
    W,
    expect_n_states,
    expect_positions,
    head_backward,
    head_forward,
    n_tasks,
    sample_positions,
    states_of,
    states_spec,
    with_dy,
)


def gated_delta_net(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    positions: Tensor,
    n_states: int = 1,
) -> Tensor:
    """The gated delta rule -> (T, H, D), F32 (ggml's GATED_DELTA_NET).

    state is (H, D, D), indexed [value, key]; q and k (T, HK, D), v (T, H, D), beta (T, H); g, the
    logarithm of the decay, (T, H) or (T, H, D). Head h uses key head h mod HK. positions (T,) I32:
    0 begins a sequence with a zero state. The result's `saved[0]` is the last state. With n_states
    above 1, ggml's K, it is (n_states, H, D, D): the states after the last token, the one before
    it, and so on; those from before the first token are the initial state. Raises ShapeError if
    shapes or types do not fit.
    """
    return GATED_DELTA_NET(state, q, k, v, g, beta, positions, n_states=n_states)


# -- gated_delta_net ----------------------------------------------------------------------------


@kernel
def _fill(f, h, q, k, v, g, beta):
    """Write the factors f of head h. g is (T, H, 1) or (T, H, D)."""
    n, key_head = v.shape[2], h % k.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(n))
    for t in range(v.shape[0]):
        kt, qt, vt, gt = k[t, key_head], q[t, key_head], v[t, h], g[t, h]
        w, fa, fb, fk, fr, fv = f[W, t], f[A, t], f[B, t], f[K, t], f[R, t], f[V, t]
        strength = beta[t, h]
        if gt.size == 1:
            decay = exp32(gt[0])
            for j in range(n):
                w[j] = decay
        else:
            for j in range(n):
                w[j] = exp32(gt[j])
        for j in range(n):
            fa[j] = -strength * w[j] * kt[j]
            fb[j], fk[j] = kt[j], kt[j]
            fr[j] = qt[j] * scale
            fv[j] = strength * vt[j]


@parallel
def _gated_delta_net(y, states, work, state, q, k, v, g, beta, positions):
    tasks, n_heads = work.shape[0], v.shape[1]
    for task in prange(tasks):
        f = work[task]
        for h in range(task * n_heads // tasks, (task + 1) * n_heads // tasks):
            _fill(f, h, q, k, v, g, beta)
            head_forward(y, h, states, f, state[h], positions, True, False)


def _spec(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    positions: Tensor,
    *,
    n_states: int = 1,
) -> Spec:
    name = "gated_delta_net"
    expect_n_states(name, n_states)
    expect_axes(name, "v", v, 3)
    expect_axes(name, "k", k, 3)
    n_tokens, h, d = v.shape
    if not k.shape[1] or h % k.shape[1]:
        raise ShapeError(f"{name}: v {v.shape}, k {k.shape}, wanted key heads that divide heads")
    expect(name, "v", v, (n_tokens, h, d))
    expect(name, "state", state, (h, d, d))
    expect(name, "k", k, (n_tokens, k.shape[1], d))
    expect(name, "q", q, k.shape)
    expect(name, "g", g, (n_tokens, h, d) if len(g.shape) == 3 else (n_tokens, h))
    expect(name, "beta", beta, (n_tokens, h))
    expect_positions(name, positions, n_tokens)
    return Spec(v.shape)


def _run(site: Site) -> Call:
    state, q, k, v, g, beta, positions = site.src
    (work,) = recurrence.scratch(site, n_tasks(v.shape[1]), v.shape[0], state, False)
    g = g if g.ndim == 3 else g[..., None]
    return Call(
        _gated_delta_net, site.out, states_of(site, state), work, state, q, k, v, g, beta, positions
    )


def _factors(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray
) -> dict[str, Any]:
    """The recurrence's factors of every head in float64, all but v."""
    of_key = np.arange(v.shape[1]) % k.shape[1]
    keys, decay = k[:, of_key], np.broadcast_to(np.exp(g if g.ndim == 3 else g[..., None]), v.shape)
    a = -beta[:, :, None] * decay * keys
    return {"w": decay, "k": keys, "r": q[:, of_key] / np.sqrt(v.shape[2]), "a": a, "b": keys}


def _ref(
    state: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    positions: np.ndarray,
    n_states: int,
) -> np.ndarray:
    """As in the paper, not through the recurrence's factors."""
    s, y = state.astype(np.float64), np.empty(v.shape)
    of_key = np.arange(v.shape[1]) % k.shape[1]
    decay = np.exp(g if g.ndim == 3 else g[..., None])
    for t, position in enumerate(positions):
        s = s * decay[t, :, None] * (position != 0)
        kt = k[t, of_key]
        error = beta[t, :, None] * (v[t] - np.einsum("hij,hj->hi", s, kt))
        s = s + error[:, :, None] * kt[:, None]
        y[t] = np.einsum("hij,hj->hi", s, q[t, of_key]) / np.sqrt(v.shape[2])
    return y


def _grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The recurrence run backwards: dS_{t-1} from dS_t + dy_t·q_tᵀ / √D"""
    dv = GATED_DELTA_NET_BACK(*node.src, dy)
    dstate, dq, dk, dg, dbeta = dv.saved
    return dstate, dq, dk, dv, dg, dbeta, None


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for t, h, h_k, d, by_channel in [
        (1, 1, 1, 1, False),
        (9, 4, 2, 5, False),
        (7, 3, 1, 6, True),
        (27, 34, 17, 8, False),
    ]:
        state, v = rng.standard_normal((h, d, d)), rng.standard_normal((t, h, d))
        q, k = rng.standard_normal((2, t, h_k, d))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        g = -rng.uniform(0.01, 1, (t, h, d) if by_channel else (t, h))
        beta = rng.uniform(0, 1, (t, h))
        params = {"n_states": 3 if t in (1, 7) else 1}
        yield Sample((state, q, k, v, g, beta, sample_positions(rng, t)), params)


GATED_DELTA_NET = op(
    name="gated_delta_net",
    ggml=GGMLOp.GATED_DELTA_NET,
    spec=_spec,
    ref=_ref,
    grad=_grad,
    samples=_samples,
    refuses={"n_states": (0, -1)},
    saved=lambda state, *_, n_states: states_spec(state, n_states),
    costly=True,
)
cpu_kernel(
    GATED_DELTA_NET,
    _run,
    scratch=lambda node, _: recurrence.scratch_bytes(
        n_tasks(node.shape[1]), node.shape[0], node.src[0], False
    ),
)

# -- gated_delta_net_back -----------------------------------------------------------------------


@kernel
def _empty(f, fg, h, dq, dk, dv, dg, dbeta, k, v, beta):
    """Add the factors' gradients fg to those of the sources; heads of one key share dq and dk."""
    n, key_head = v.shape[2], h % k.shape[1]
    scale = np.float32(1) / np.sqrt(np.float32(n))
    for t in range(v.shape[0]):
        kt, vt, w, strength = k[t, key_head], v[t, h], f[W, t], beta[t, h]
        gw, ga, gb, gk, gr, gv = fg[W, t], fg[A, t], fg[B, t], fg[K, t], fg[R, t], fg[V, t]
        dkt, dqt, dvt, dgt = dk[t, key_head], dq[t, key_head], dv[t, h], dg[t, h]
        total, of_beta = np.float32(0), np.float32(0)
        for j in range(n):
            dkt[j] += gk[j] + gb[j] - strength * w[j] * ga[j]
            dqt[j] += scale * gr[j]
            dvt[j] = strength * gv[j]
            of_beta += gv[j] * vt[j] - ga[j] * w[j] * kt[j]
        dbeta[t, h] = of_beta
        if dgt.size == 1:
            for j in range(n):
                total += w[j] * (gw[j] - strength * kt[j] * ga[j])
            dgt[0] = total
        else:
            for j in range(n):
                dgt[j] = w[j] * (gw[j] - strength * kt[j] * ga[j])


@parallel
def _gated_delta_net_back(
    dv, dstate, dq, dk, dg, dbeta, f, fg, states, n_kept, state, q, k, v, g, beta, positions, dy
):
    """A task takes all heads of some key heads, so that no two tasks write the same gradient."""
    tasks, n_heads, n_keys = f.shape[0], v.shape[1], k.shape[1]
    for task in prange(tasks):
        for key in range(task * n_keys // tasks, (task + 1) * n_keys // tasks):
            dq[:, key, :], dk[:, key, :] = 0, 0
            for h in range(key, n_heads, n_keys):
                _fill(f[task], h, q, k, v, g, beta)
                head_backward(
                    fg[task], dstate[h], f[task], dy, h, state[h], positions, states[task], n_kept,
                    True, False,
                )  # fmt: skip
                _empty(f[task], fg[task], h, dq, dk, dv, dg, dbeta, k, v, beta)


def _back_run(site: Site) -> Call:
    state, q, k, v, g, beta, positions, dy = site.src
    dstate, dq, dk, dg, dbeta = site.saved
    work = recurrence.scratch(site, n_tasks(k.shape[1]), v.shape[0], state, True)
    g, dg = (x if x.ndim == 3 else x[..., None] for x in (g, dg))
    return Call(
        _gated_delta_net_back,
        *(site.out, dstate, dq, dk, dg, dbeta, *work),
        *(state, q, k, v, g, beta, positions, dy),
    )


def _back_spec(state: Tensor, *sources: Tensor) -> Spec:
    expect("gated_delta_net_back", "dy", sources[-1], sources[2].shape)
    return _spec(state, *sources[:-1])


def _back_ref(
    state: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    positions: np.ndarray,
    dy: np.ndarray,
) -> np.ndarray:
    dv = recurrence.reference_dv(dy, positions, **_factors(q, k, v, g, beta))
    return beta[:, :, None] * dv


GATED_DELTA_NET_BACK = op(
    name="gated_delta_net_back",
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=with_dy(_samples, 3),
    saved=lambda state, q, k, v, g, beta, *_: tuple(Spec(t.shape) for t in (state, q, k, g, beta)),
    costly=True,
)
cpu_kernel(
    GATED_DELTA_NET_BACK,
    _back_run,
    scratch=lambda node, _: recurrence.scratch_bytes(
        n_tasks(node.src[2].shape[1]), node.shape[0], node.src[0], True
    ),
)
