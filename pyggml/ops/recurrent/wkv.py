"""Linear attention with a decay for each channel: RWKV 6 and 7, and gated linear attention.

rwkv_wkv6          y_t = (S_{t-1} + (u·k_t) v_t) r_t,  S_t = S_{t-1} diag(w_t) + v_t k_tᵀ
                   (arXiv:2404.05892)
rwkv_wkv7          S_t = S_{t-1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ, y_t = S_t r_t (arXiv:2503.14456)
gated_linear_attn  S_t = S_{t-1} diag(w_t) + v_t k_tᵀ,  y_t = S_t r_t   (arXiv:2312.06635)
wkv_back           dv of any of these; its `saved` are the gradients of the other sources

All vectors have D elements. A token at position 0 begins a sequence.
"""

from collections.abc import Callable, Iterator

import numpy as np

from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp
from pyggml.graph.op import NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.kernels.kernel import Compute, Site, cpu_kernel
from pyggml.ops.expect import expect, expect_axes
from pyggml.ops.recurrent import recurrence
from pyggml.ops.recurrent.recurrence import (
    A,
    B,
    K,
    R,
    V,
    W,
    expect_positions,
    head_backward,
    head_forward,
    n_tasks,
    sample_positions,
    states_of,
)


def rwkv_wkv6(
    state: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, positions: Tensor
) -> Tensor:
    """RWKV 6's time mixing -> (T, H, D), F32 (ggml's RWKV_WKV6).

    k, v, r and the decay w (itself, not its logarithm) are (T, H, D); u (H, D) weighs a token's own
    key. state (H, D, D) is indexed [value, key]; ggml's is the transpose. positions (T,) I32: 0
    begins a sequence with a zero state. The result's `saved[0]` is the last state.
    """
    return RWKV_WKV6(state, k, v, r, u, w, positions)


def rwkv_wkv7(
    state: Tensor,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    positions: Tensor,
) -> Tensor:
    """RWKV 7's time mixing -> (T, H, D), F32 (ggml's RWKV_WKV7).

    r, w, k, v, a, b are (T, H, D); w is the decay, not its logarithm. state (H, D, D) is indexed
    [value, key]. positions and `saved[0]` are as those of `rwkv_wkv6`.
    """
    return RWKV_WKV7(state, r, w, k, v, a, b, positions)


def gated_linear_attn(
    state: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """scale · gated linear attention -> (T, H, D), F32 (ggml's GATED_LINEAR_ATTN).

    k, v, q and the decay g (itself, not its logarithm) are (T, H, D). state (H, D, D) is indexed
    [value, key]; ggml's is the transpose. positions and `saved[0]` are as those of `rwkv_wkv6`.
    """
    return GATED_LINEAR_ATTN(state, k, v, q, g, positions, scale=float(scale))


# -- kernels ------------------------------------------------------------------------------------


@kernel
def _fill(f, h, w, k, r, v, a, b, scale):
    for t in range(f.shape[1]):
        fw, fk, fr, fv, fa, fb = f[W, t], f[K, t], f[R, t], f[V, t], f[A, t], f[B, t]
        for j in range(f.shape[2]):
            fw[j], fk[j], fv[j] = w[t, h, j], k[t, h, j], v[t, h, j]
            fa[j], fb[j] = a[t, h, j], b[t, h, j]
            fr[j] = scale * r[t, h, j]


@kernel
def _own_key(y, h, f, u):
    """y += (Σ r·u·k) v: RWKV 6's term for the token itself."""
    for t in range(f.shape[1]):
        r, k, v, weight = f[R, t], f[K, t], f[V, t], np.float32(0)
        for j in range(f.shape[2]):
            weight += r[j] * u[h, j] * k[j]
        for j in range(f.shape[2]):
            y[t, h, j] += weight * v[j]


@parallel
def _wkv(y, states, work, state, w, k, r, v, a, b, u, positions, scale, coupled, early):
    tasks, n_heads = work.shape[0], y.shape[1]
    for task in prange(tasks):
        f = work[task]
        for h in range(task * n_heads // tasks, (task + 1) * n_heads // tasks):
            _fill(f, h, w, k, r, v, a, b, scale)
            head_forward(y, h, states, f, state[h], positions, coupled, early)
            if early:
                _own_key(y, h, f, u)


@kernel
def _own_key_back(g, du, h, f, u, dy):
    du[h, :] = 0
    for t in range(f.shape[1]):
        r, k, v, d = f[R, t], f[K, t], f[V, t], dy[t, h]
        gr, gk, gv = g[R, t], g[K, t], g[V, t]
        weight, dweight = np.float32(0), np.float32(0)
        for j in range(f.shape[2]):
            weight += r[j] * u[h, j] * k[j]
            dweight += d[j] * v[j]
        for j in range(f.shape[2]):
            gv[j] += weight * d[j]
            gr[j] += dweight * u[h, j] * k[j]
            gk[j] += dweight * u[h, j] * r[j]
            du[h, j] += dweight * r[j] * k[j]


@kernel
def _empty(dw, dk, dr, dv, da, db, h, g, scale, coupled):
    for t in range(g.shape[1]):
        gw, gk, gr, gv, ga, gb = g[W, t], g[K, t], g[R, t], g[V, t], g[A, t], g[B, t]
        for j in range(g.shape[2]):
            dw[t, h, j], dk[t, h, j], dv[t, h, j] = gw[j], gk[j], gv[j]
            dr[t, h, j] = scale * gr[j]
        if coupled:
            for j in range(g.shape[2]):
                da[t, h, j], db[t, h, j] = ga[j], gb[j]


@parallel
def _wkv_back(
    dv, dstate, dw, dk, dr, da, db, du, f, g, states, n_kept, state, w, k, r, v, a, b, u,
    positions, dy, scale, coupled, early,
):  # fmt: skip
    tasks, n_heads = f.shape[0], dy.shape[1]
    for task in prange(tasks):
        for h in range(task * n_heads // tasks, (task + 1) * n_heads // tasks):
            _fill(f[task], h, w, k, r, v, a, b, scale)
            head_backward(
                g[task], dstate[h], f[task], dy, h, state[h], positions, states[task], n_kept,
                coupled, early,
            )  # fmt: skip
            if early:
                _own_key_back(g[task], du, h, f[task], u, dy)
            _empty(dw, dk, dr, dv, da, db, h, g[task], scale, coupled)


def _wkv_spec(name: str, state: Tensor, positions: Tensor, v: Tensor, *sources: Tensor) -> Spec:
    expect_axes(name, "v", v, 3)
    n_tokens, h, d = v.shape
    for t in (v, *sources):
        expect(name, t.name or "a source", t, v.shape)
    expect(name, "state", state, (h, d, d))
    expect_positions(name, positions, n_tokens)
    return Spec(v.shape)


def _call(site: Site, *factors: np.ndarray, scale: float = 1.0, coupled: bool, early: bool) -> Call:
    """The forward kernel over w, k, r, v, a, b, u, positions; lacking factors are unread arrays."""
    n_tokens, n_heads, _ = site.out.shape
    (work,) = recurrence.scratch(site, n_tasks(n_heads), n_tokens, site.src[0], False)
    return Call(
        _wkv, site.out, states_of(site, site.src[0]), work, site.src[0], *factors,
        np.float32(scale), coupled, early,
    )  # fmt: skip


def _scratch(node: Tensor, compute: Compute) -> int:
    back, (n_tokens, h, _) = node.op is WKV_BACK, node.shape
    return recurrence.scratch_bytes(n_tasks(h), n_tokens, node.src[0], back)


def _last_state(state: Tensor, *_: Tensor, **__: object) -> tuple[Spec, ...]:
    return (Spec(state.shape),)


def _draws(
    n: int, with_u: bool = False, **params: float
) -> Callable[[np.random.Generator], Iterator[Sample]]:
    """Samples of a state, n arrays (T, H, D) that may be decays, with_u u (H, D), positions."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for t, h, d in [(1, 1, 1), (9, 3, 4), (26, 17, 6)]:
            arrays = [rng.uniform(0.1, 0.9, (t, h, d)) * rng.choice([-1, 1]) for _ in range(n)]
            if with_u:
                arrays.insert(-1, rng.standard_normal((h, d)))
            state = rng.standard_normal((h, d, d))
            yield Sample((state, *arrays, sample_positions(rng, t)), params)

    return samples


# -- rwkv_wkv6 ----------------------------------------------------------------------------------


def _wkv6_spec(
    state: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor, positions: Tensor
) -> Spec:
    expect("rwkv_wkv6", "u", u, v.shape[1:])
    return _wkv_spec("rwkv_wkv6", state, positions, v, k, r, w)


def _wkv6_run(site: Site) -> Call:
    _, k, v, r, u, w, positions = site.src
    return _call(site, w, k, r, v, w, w, u, positions, coupled=False, early=True)


def _wkv6_ref(state: np.ndarray, *sources: np.ndarray) -> np.ndarray:
    k, v, r, u, w, positions = sources
    y, _ = recurrence.reference(state, positions, w, k, r, v, early=True)
    return y + np.sum(r * u * k, axis=-1, keepdims=True) * v


def _wkv6_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The recurrence run backwards: dS_{t-1} = dS_t·diag(w_t) + dy_t·r_tᵀ"""
    state, k, v, r, u, w, positions = node.src
    dv = WKV_BACK(state, w, k, r, v, positions, dy, u, scale=1.0)
    dstate, dw, dk, dr, du = dv.saved
    return dstate, dk, dv, dr, du, dw, None


RWKV_WKV6 = op(
    name="rwkv_wkv6",
    ggml=GGMLOp.RWKV_WKV6,
    spec=_wkv6_spec,
    ref=_wkv6_ref,
    grad=_wkv6_grad,
    samples=_draws(4, with_u=True),
    saved=_last_state,
    costly=True,
)
cpu_kernel(RWKV_WKV6, _wkv6_run, scratch=_scratch)

# -- rwkv_wkv7 ----------------------------------------------------------------------------------


def _wkv7_spec(state: Tensor, *sources: Tensor) -> Spec:
    r, w, k, v, a, b, positions = sources
    return _wkv_spec("rwkv_wkv7", state, positions, v, r, w, k, a, b)


def _wkv7_run(site: Site) -> Call:
    state, r, w, k, v, a, b, positions = site.src
    return _call(site, w, k, r, v, a, b, state[0], positions, coupled=True, early=False)


def _wkv7_ref(state: np.ndarray, *sources: np.ndarray) -> np.ndarray:
    r, w, k, v, a, b, positions = sources
    return recurrence.reference(state, positions, w, k, r, v, a, b)[0]


def _wkv7_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The recurrence run backwards: dS_{t-1} = dS_t·(diag(w_t) + a_t·b_tᵀ)ᵀ"""
    state, r, w, k, v, a, b, positions = node.src
    dv = WKV_BACK(state, w, k, r, v, positions, dy, a, b, scale=1.0)
    dstate, dw, dk, dr, da, db = dv.saved
    return dstate, dr, dw, dk, dv, da, db, None


RWKV_WKV7 = op(
    name="rwkv_wkv7",
    ggml=GGMLOp.RWKV_WKV7,
    spec=_wkv7_spec,
    ref=_wkv7_ref,
    grad=_wkv7_grad,
    samples=_draws(6),
    saved=_last_state,
    costly=True,
)
cpu_kernel(RWKV_WKV7, _wkv7_run, scratch=_scratch)

# -- gated_linear_attn --------------------------------------------------------------------------


def _gla_spec(
    state: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, positions: Tensor, scale: float
) -> Spec:
    return _wkv_spec("gated_linear_attn", state, positions, v, k, q, g)


def _gla_run(site: Site) -> Call:
    state, k, v, q, g, positions = site.src
    scale = site.node.params["scale"]
    return _call(
        site, g, k, q, v, g, g, state[0], positions, scale=scale, coupled=False, early=False
    )


def _gla_ref(
    state: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    q: np.ndarray,
    g: np.ndarray,
    positions: np.ndarray,
    scale: float,
) -> np.ndarray:
    return recurrence.reference(state, positions, g, k, scale * q, v)[0]


def _gla_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The recurrence run backwards: dS_{t-1} = dS_t·diag(w_t)"""
    state, k, v, q, g, positions = node.src
    dv = WKV_BACK(state, g, k, q, v, positions, dy, **node.params)
    dstate, dg, dk, dq = dv.saved
    return dstate, dk, dv, dq, dg, None


GATED_LINEAR_ATTN = op(
    name="gated_linear_attn",
    ggml=GGMLOp.GATED_LINEAR_ATTN,
    spec=_gla_spec,
    ref=_gla_ref,
    grad=_gla_grad,
    samples=_draws(4, scale=0.25),
    refuses={"scale": ()},
    saved=_last_state,
    costly=True,
)
cpu_kernel(GATED_LINEAR_ATTN, _gla_run, scratch=_scratch)

# -- wkv_back -----------------------------------------------------------------------------------
# The last sources are u (RWKV 6), a and b (RWKV 7), or none (gated linear attention).


def _back_spec(state: Tensor, *sources: Tensor, scale: float) -> Spec:
    w, k, r, v, positions, dy, *own = sources
    alike = own if len(own) == 2 else ()
    if len(own) == 1:
        expect("wkv_back", "u", own[0], v.shape[1:])
    return _wkv_spec("wkv_back", state, positions, v, w, k, r, dy, *alike)


def _back_saved(state: Tensor, *sources: Tensor, scale: float) -> tuple[Spec, ...]:
    w, k, r, _, _, _, *own = sources
    return tuple(Spec(t.shape) for t in (state, w, k, r, *own))


def _back_run(site: Site) -> Call:
    state, w, k, r, v, positions, dy, *own = site.src
    dstate, dw, dk, dr, *d_own = site.saved
    coupled, early = len(own) == 2, len(own) == 1
    a, b = own if coupled else (w, w)
    da, db = d_own if coupled else (dw, dw)
    u, du = (own[0], d_own[0]) if early else (state[0], dstate[0])
    work = recurrence.scratch(site, n_tasks(v.shape[1]), v.shape[0], state, True)
    return Call(
        _wkv_back,
        *(site.out, dstate, dw, dk, dr, da, db, du, *work),
        *(state, w, k, r, v, a, b, u, positions, dy),
        *(*site.scalars, coupled, early),
    )


def _back_ref(state: np.ndarray, *sources: np.ndarray, scale: float) -> np.ndarray:
    w, k, r, _, positions, dy, *own = sources
    a, b = own if len(own) == 2 else (None, None)
    early = len(own) == 1
    dv = recurrence.reference_dv(dy, positions, w, k, scale * r, a, b, early)
    return dv + scale * np.sum(r * own[0] * k, axis=-1, keepdims=True) * dy if early else dv


def _back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for n_own in (0, 1, 2):
        for s in _draws(5 + 2 * (n_own == 2), scale=0.5)(rng):
            state, w, k, r, v, dy, *own, positions = s.arrays
            own = [np.asarray(dy)[0]] if n_own == 1 else own
            yield Sample((state, w, k, r, v, positions, dy, *own), s.params)


WKV_BACK = op(
    name="wkv_back",
    spec=_back_spec,
    ref=_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_back_samples,
    refuses={"scale": ()},
    saved=_back_saved,
    costly=True,
)
cpu_kernel(WKV_BACK, _back_run, scratch=_scratch)
