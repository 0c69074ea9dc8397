"""The selective scan of Mamba (arXiv:2312.00752) and Mamba 2 (arXiv:2405.21060).

ssm_scan       S_t = S_{t-1}·exp(Δ_t A) + (Δ_t x_t) B_tᵀ,  y_t = S_t C_t,  Δ = softplus(dt)
ssm_scan_back  dx; its `saved` are the gradients of state, dt, A, B, C

A row of tokens holds one sequence after another; a token at position 0 begins one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas.expression import softplus
from pyggml.formulas.formula import formula, gradient_formula
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.scratch import Array, Layout
from pyggml.jit.simd import exp32, softplus32
from pyggml.kernels.formulas import inline_formula
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes, expect_type
from pyggml.ops.recurrent import recurrence
from pyggml.ops.recurrent.recurrence import (
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

_softplus_back = inline_formula(gradient_formula("softplus_back", formula(softplus), "x"))


def ssm_scan(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    positions: Tensor,
    n_states: int = 1,
) -> Tensor:
    """The selective scan -> (T, H, P), F32 (ggml's SSM_SCAN).

    state is (H, P, N), x (T, H, P), dt (T, H) before its softplus, b and c (T, G, N); head h uses
    group h // (H / G). a is (H, N), or (H, 1) with one decay per head as in Mamba 2. Mamba 1 has H
    channels with P = 1. positions (T,) I32: 0 begins a sequence with a zero state. The result's
    `saved[0]` is the last state. With n_states above 1, ggml's K, it is (n_states, H, P, N): the
    states after the last token, the one before it, and so on; those from before the first token
    are the initial state. Raises ShapeError if shapes or types do not fit.
    """
    return SSM_SCAN(state, x, dt, a, b, c, positions, n_states=n_states)


# -- ssm_scan -----------------------------------------------------------------------------------


@kernel
def _fill_scan(f, h, x, dt, a, b, c):
    group = h // (x.shape[1] // b.shape[1])
    n = b.shape[2]
    for t in range(x.shape[0]):
        delta = softplus32(dt[t, h])
        w, k, r, v = f[W, t], f[K, t], f[R, t], f[V, t]
        bt, ct, xt = b[t, group], c[t, group], x[t, h]
        if a.shape[1] == 1:
            decay = exp32(delta * a[h, 0])
            for j in range(n):
                w[j] = decay
        else:
            for j in range(n):
                w[j] = exp32(delta * a[h, j])
        for j in range(n):
            k[j], r[j] = bt[j], ct[j]
        for i in range(xt.size):
            v[i] = delta * xt[i]


@parallel
def _ssm_scan(y, states, work, state, x, dt, a, b, c, positions):
    tasks, n_heads = work.shape[0], x.shape[1]
    for task in prange(tasks):
        f = work[task]
        for h in range(task * n_heads // tasks, (task + 1) * n_heads // tasks):
            _fill_scan(f, h, x, dt, a, b, c)
            head_forward(y, h, states, f, state[h], positions, False, False)


def _scan_spec(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    positions: Tensor,
    *,
    n_states: int = 1,
) -> Spec:
    expect_n_states("ssm_scan", n_states)
    for what, t, axes in (("state", state, 3), ("x", x, 3), ("a", a, 2), ("b", b, 3)):
        expect_axes("ssm_scan", what, t, axes)
    expect_type("ssm_scan", "x", x)
    n_tokens, h, p = x.shape
    n, groups = state.shape[2], b.shape[1]
    if not h or not groups or h % groups or a.shape[1] not in (1, n):
        raise ShapeError(
            f"ssm_scan: x {x.shape}, a {a.shape}, b {b.shape}, state {state.shape}; wanted groups "
            "that divide the heads, and a with one decay for a head or for each of its states"
        )
    expect("ssm_scan", "state", state, (h, p, n))
    expect("ssm_scan", "dt", dt, (n_tokens, h))
    expect("ssm_scan", "a", a, (h, a.shape[1]))
    expect("ssm_scan", "b", b, (n_tokens, groups, n))
    expect("ssm_scan", "c", c, b.shape)
    expect_positions("ssm_scan", positions, n_tokens)
    return Spec(x.shape)


def _scan_run(site: Site) -> Call:
    state, x = site.src[:2]
    (work,) = recurrence.scratch(site, n_tasks(x.shape[1]), x.shape[0], state, False)
    return Call(_ssm_scan, site.out, states_of(site, state), work, *site.src)


def _factors(
    x: np.ndarray, dt: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> dict[str, Any]:
    """The recurrence's factors of every head in float64, all but v."""
    delta, repeats = np.logaddexp(0, dt)[:, :, None], x.shape[1] // b.shape[1]
    decay = np.broadcast_to(np.exp(delta * a), (*dt.shape, b.shape[2]))
    return {"w": decay, "k": np.repeat(b, repeats, 1), "r": np.repeat(c, repeats, 1)}


def _scan_ref(
    state: np.ndarray,
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    positions: np.ndarray,
    n_states: int,
) -> np.ndarray:
    v = np.logaddexp(0, dt)[:, :, None] * x
    return recurrence.reference(state, positions, v=v, **_factors(x, dt, a, b, c))[0]


def _scan_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The recurrence run backwards: dS_{t-1} = dS_t · exp(Δ_t A), dS_t begins with dy_t·C_tᵀ"""
    dx = SSM_SCAN_BACK(*node.src, dy)
    dstate, ddt, da, db, dc = dx.saved
    return dstate, dx, ddt, da, db, dc, None


def _scan_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """States and decays: (H, 1, N) and (H, N) as in Mamba 1, (H, P, N) and (H, 1) as in Mamba 2."""
    for t, h, p, n, groups, n_a in [
        (1, 1, 1, 1, 1, 1),
        (9, 6, 1, 4, 1, 4),
        (7, 4, 3, 5, 2, 1),
        (26, 34, 2, 16, 17, 1),
    ]:
        shapes = ((h, p, n), (t, h, p), (t, h))
        state, x, dt = (rng.standard_normal(s) for s in shapes)
        a = -rng.uniform(0.1, 2, (h, n_a))
        b, c = rng.standard_normal((2, t, groups, n))
        dt[0, 0] = 25.0  # above _LINEAR
        params = {"n_states": 3 if t in (1, 7) else 1}
        yield Sample((state, x, dt, a, b, c, sample_positions(rng, t)), params)


SSM_SCAN = op(
    name="ssm_scan",
    ggml=GGMLOp.SSM_SCAN,
    spec=_scan_spec,
    ref=_scan_ref,
    grad=_scan_grad,
    samples=_scan_samples,
    refuses={"n_states": (0, -1)},
    saved=lambda state, *_, n_states: states_spec(state, n_states),
    costly=True,
)
cpu_kernel(
    SSM_SCAN,
    _scan_run,
    scratch=lambda node, _: recurrence.scratch_bytes(
        n_tasks(node.shape[1]), node.shape[0], node.src[0], False
    ),
)

# -- ssm_scan_back ------------------------------------------------------------------------------


@kernel
def _empty_scan(f, g, h, dx, ddt, da, db, dc, x, dt, a):
    """Add the factors' gradients g to those of the sources; heads of one group share db and dc."""
    group = h // (x.shape[1] // db.shape[1])
    n = db.shape[2]
    for j in range(a.shape[1]):
        da[h, j] = 0
    for t in range(x.shape[0]):
        delta, ddelta = softplus32(dt[t, h]), np.float32(0)
        w, gw, gk, gr, gv = f[W, t], g[W, t], g[K, t], g[R, t], g[V, t]
        dbt, dct, xt, out = db[t, group], dc[t, group], x[t, h], dx[t, h]
        for j in range(n):
            dbt[j] += gk[j]
            dct[j] += gr[j]
        for i in range(xt.size):
            out[i] = delta * gv[i]
            ddelta += xt[i] * gv[i]
        for j in range(n):
            ja = min(j, a.shape[1] - 1)
            da[h, ja] += gw[j] * w[j] * delta
            ddelta += gw[j] * w[j] * a[h, ja]
        ddt[t, h] = _softplus_back(dt[t, h], ddelta)


@kernel
def _sum_tasks(out, sums):
    out[:] = 0
    for task in range(sums.shape[0]):
        for i in range(out.size):
            out[i] += sums[task, i]


@parallel
def _ssm_scan_back(
    dx, dstate, ddt, da, db_sums, dc_sums, f, g, states, n_kept, state, x, dt, a, b, c,
    positions, dy,
):  # fmt: skip
    tasks, n_heads = f.shape[0], x.shape[1]
    for task in prange(tasks):
        db_sums[task, :], dc_sums[task, :] = 0, 0
        for h in range(task * n_heads // tasks, (task + 1) * n_heads // tasks):
            _fill_scan(f[task], h, x, dt, a, b, c)
            head_backward(
                g[task], dstate[h], f[task], dy, h, state[h], positions, states[task], n_kept,
                False, False,
            )  # fmt: skip
            _empty_scan(f[task], g[task], h, dx, ddt, da, db_sums[task], dc_sums[task], x, dt, a)


def _scan_back(scan: Call, db: np.ndarray, dc: np.ndarray, sums: np.ndarray) -> None:
    """`sums` (2, tasks, T, G, N): each task adds up db and dc of its own heads."""
    scan()
    for out, of_tasks in zip((db, dc), sums, strict=True):
        _sum_tasks(out.reshape(-1), of_tasks.reshape(len(of_tasks), -1))


def _scan_back_layout(node: Tensor) -> Layout:
    """The recurrence's scratch, and what each task adds up for db and dc."""
    tasks, state, b = n_tasks(node.shape[1]), node.src[0], node.src[4]
    own = recurrence.layout(tasks, node.shape[0], state.shape, True)
    return own.followed_by(sums=Array((2, tasks, *b.shape)))


def _scan_back_scratch(node: Tensor, compute: Compute) -> int:
    return _scan_back_layout(node).n_bytes


def _scan_back_run(site: Site) -> Call:
    state, x = site.src[:2]
    dstate, ddt, da, db, dc = site.saved
    own = recurrence.scratch(site, n_tasks(x.shape[1]), x.shape[0], state, True)
    sums = _scan_back_layout(site.node).cut(site.scratch)["sums"]
    scan = Call(_ssm_scan_back, site.out, dstate, ddt, da, *sums, *own, *site.src)
    return Call(_scan_back, scan, db, dc, sums)


def _scan_back_spec(state: Tensor, x: Tensor, *sources: Tensor) -> Spec:
    expect("ssm_scan_back", "dy", sources[-1], x.shape)
    return _scan_spec(state, x, *sources[:-1])


def _scan_back_ref(
    state: np.ndarray,
    x: np.ndarray,
    dt: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    positions: np.ndarray,
    dy: np.ndarray,
) -> np.ndarray:
    dv = recurrence.reference_dv(dy, positions, **_factors(x, dt, a, b, c))
    return np.logaddexp(0, dt)[:, :, None] * dv


SSM_SCAN_BACK = op(
    name="ssm_scan_back",
    spec=_scan_back_spec,
    ref=_scan_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=with_dy(_scan_samples, 1),
    saved=lambda state, x, dt, a, b, *_: tuple(Spec(t.shape) for t in (state, dt, a, b, b)),
    costly=True,
)
cpu_kernel(SSM_SCAN_BACK, _scan_back_run, scratch=_scan_back_scratch)
