"""One recurrence for SSM_SCAN, GATED_DELTA_NET, RWKV_WKV6, RWKV_WKV7 and GATED_LINEAR_ATTN.

Each head has a state S (dv, dk). From token to token

    S_t = S_{t-1}·diag(w_t) + (S_{t-1} a_t) b_tᵀ + v_t k_tᵀ
    y_t = S_t r_t        or, if the op reads `early`, S_{t-1} r_t

Only `coupled` ops have a and b. A token at position 0 begins a sequence: the state before it is
zero. A first token at another position continues from the initial state.

An op writes the factors of one head to f (6, T, max(dk, dv)), in the order W, A, B, K, R, V. Each
has dk elements, V has dv. In the backward pass the op turns their gradients g, laid out alike, into
those of its sources. That pass needs the state before each token: every √T-th state is kept, and
those between are computed again.
"""

from collections.abc import Callable, Iterator
from math import isqrt

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.dtypes import I32
from pyggml.graph.op import Sample, Spec
from pyggml.graph.tensor import Shape, Tensor
from pyggml.jit import kernel
from pyggml.jit.scratch import Array, Layout
from pyggml.jit.simd import dot
from pyggml.kernels.kernel import Site
from pyggml.ops.expect import expect

N_ROLES = 6
W, A, B, K, R, V = range(N_ROLES)
MOST_TASKS = 16  # at most so many tasks share the heads; each has scratch of its own


# -- kernels ------------------------------------------------------------------------------------


@kernel
def copy_state(to, state):
    for i in range(state.shape[0]):
        for j in range(state.shape[1]):
            to[i, j] = state[i, j]


@kernel
def _zero(state):
    for i in range(state.shape[0]):
        for j in range(state.shape[1]):
            state[i, j] = 0


@kernel
def _step(s, w, a, b, k, v, coupled):
    """S_{t-1} -> S_t in place."""
    n = s.shape[1]
    for i in range(s.shape[0]):
        row = s[i]
        if coupled:
            along = dot(row, a)
            for j in range(n):
                row[j] = row[j] * w[j] + along * b[j] + v[i] * k[j]
        else:
            for j in range(n):
                row[j] = row[j] * w[j] + v[i] * k[j]


@kernel
def head_forward(y, h, states, f, initial, positions, coupled, early):
    """y[:, h], of y (T, H, dv), from the factors of head h.

    states (n, H, dv, dk) become those after the last token, the one before it, and so on; before
    the first token, that is the initial state.
    """
    s, n_tokens = states[0, h], positions.size
    copy_state(s, initial)
    for back in range(n_tokens, states.shape[0]):
        copy_state(states[back, h], s)
    for t in range(n_tokens):
        if positions[t] == 0:
            _zero(s)
        r, out = f[R, t], y[t, h]
        if early:
            for i in range(s.shape[0]):
                out[i] = dot(s[i], r)
        _step(s, f[W, t], f[A, t], f[B, t], f[K, t], f[V, t], coupled)
        if not early:
            for i in range(s.shape[0]):
                out[i] = dot(s[i], r)
        if 0 < n_tokens - 1 - t < states.shape[0]:
            copy_state(states[n_tokens - 1 - t, h], s)


@kernel
def _coupled_back(row, g, t, before, a, b):
    """Add to the gradients of a and b at t. Returns (S a)_i and (dS b)_i for one row i."""
    n = before.size
    along, d_along = dot(before, a), dot(row, b)
    ga, gb = g[A, t], g[B, t]
    for j in range(n):
        ga[j] += d_along * before[j]
        gb[j] += along * row[j]
    return along, d_along


@kernel
def _step_back(ds, g, f, t, s, dy, coupled, early):
    """dS_t -> dS_{t-1} in place; s is S_{t-1}. The gradients of the factors at t are added to."""
    n = s.shape[1]
    w, a, b, k, r = f[W, t], f[A, t], f[B, t], f[K, t], f[R, t]
    gw, gk, gr, gv = g[W, t], g[K, t], g[R, t], g[V, t]
    for i in range(s.shape[0]):
        row, before = ds[i], s[i]
        v, d = f[V, t, i], dy[i]
        if not early:
            for j in range(n):
                row[j] += d * r[j]
                gr[j] += d * (before[j] * w[j] + v * k[j])
        gv[i] = dot(row, k)
        along, d_along = np.float32(0), np.float32(0)
        if coupled:
            along, d_along = _coupled_back(row, g, t, before, a, b)
            if not early:
                for j in range(n):
                    gr[j] += d * along * b[j]
        for j in range(n):
            gk[j] += v * row[j]
            gw[j] += before[j] * row[j]
            row[j] = row[j] * w[j]
        if coupled:
            for j in range(n):
                row[j] += d_along * a[j]
        if early:
            for j in range(n):
                gr[j] += d * before[j]
                row[j] += d * r[j]


@kernel
def _keep_states(kept, s, f, initial, positions, coupled, length):
    """kept[c] = the state before token c·length, not yet zeroed if a sequence begins there."""
    copy_state(s, initial)
    for t in range(positions.size):
        if t % length == 0:
            copy_state(kept[t // length], s)
        if positions[t] == 0:
            _zero(s)
        _step(s, f[W, t], f[A, t], f[B, t], f[K, t], f[V, t], coupled)


@kernel
def head_backward(g, ds, f, dy, h, initial, positions, states, n_kept, coupled, early):
    """Compute g, the gradients of head h's factors, and ds (dv, dk), that of the initial state.

    states (n_kept + length, dv, dk) is scratch; n_kept · length >= T.
    """
    n_tokens, length = positions.size, states.shape[0] - n_kept
    g[:] = 0
    _keep_states(states, states[n_kept], f, initial, positions, coupled, length)
    _zero(ds)
    for c in range(n_kept - 1, -1, -1):
        first, last = c * length, min((c + 1) * length, n_tokens)
        copy_state(states[n_kept], states[c])
        for t in range(first, last):
            s = states[n_kept + t - first]
            if positions[t] == 0:
                _zero(s)
            if t + 1 < last:
                after = states[n_kept + t + 1 - first]
                copy_state(after, s)
                _step(after, f[W, t], f[A, t], f[B, t], f[K, t], f[V, t], coupled)
        for t in range(last - 1, first - 1, -1):
            _step_back(ds, g, f, t, states[n_kept + t - first], dy[t, h], coupled, early)
            if positions[t] == 0:
                _zero(ds)


# -- scratch ------------------------------------------------------------------------------------


def n_tasks(n: int) -> int:
    """How many tasks share n heads, or n groups of heads."""
    return min(n, MOST_TASKS)


def _marks(n_tokens: int) -> tuple[int, int]:
    """(how many states are kept, how many tokens lie between two of them)."""
    length = isqrt(max(n_tokens - 1, 0)) + 1
    return -(-n_tokens // length), length


def layout(tasks: int, n_tokens: int, state: Shape, back: bool) -> Layout:
    """The scratch of tasks over heads with this state: factors; with `back` their gradients, and
    states."""
    dv, dk = state[1:]
    factors = Array((tasks, N_ROLES, n_tokens, max(dk, dv)))
    if not back:
        return Layout(factors=factors)
    states = Array((tasks, sum(_marks(n_tokens)), dv, dk))
    return Layout(factors=factors, gradients=factors, states=states)


def scratch_bytes(tasks: int, n_tokens: int, state: Tensor, back: bool) -> int:
    return layout(tasks, n_tokens, state.shape, back).n_bytes


def scratch(site: Site, tasks: int, n_tokens: int, state: np.ndarray, back: bool) -> list:
    """The arrays of `layout` in their order; with `back`, then n_kept."""
    arrays = layout(tasks, n_tokens, state.shape, back).cut(site.scratch).values()
    return [*arrays, _marks(n_tokens)[0]] if back else [*arrays]


def expect_n_states(name: str, n_states: int) -> None:
    """ShapeError unless one state or more is to be kept."""
    if n_states < 1:
        raise ShapeError(f"{name}: n_states is {n_states}, wanted 1 or more")


def states_spec(state: Tensor, n_states: int) -> tuple[Spec, ...]:
    """What an op saves: the last state, or several with an axis before it."""
    return (Spec(state.shape if n_states == 1 else (n_states, *state.shape)),)


def states_of(site: Site, state: np.ndarray) -> np.ndarray:
    """The saved states, (n_states, *the shape of one)."""
    (states,) = site.saved
    return states if states.ndim > state.ndim else states[None]


def expect_positions(name: str, positions: Tensor, n_tokens: int) -> None:
    expect(name, "positions", positions, (n_tokens,), I32)


# -- reference ----------------------------------------------------------------------------------


def reference(
    state: np.ndarray,
    positions: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    r: np.ndarray,
    v: np.ndarray,
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    early: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """y (T, H, dv) and the last state (H, dv, dk); w, k, r, a, b (T, H, dk), v (T, H, dv)."""
    s, y = state.astype(np.float64), np.empty(v.shape)
    for t, position in enumerate(positions):
        if position == 0:
            s = np.zeros_like(s)
        before = s
        s = before * w[t, :, None] + v[t, :, :, None] * k[t, :, None]
        if a is not None and b is not None:
            s += np.einsum("hij,hj,hk->hik", before, a[t], b[t])
        y[t] = np.einsum("hij,hj->hi", before if early else s, r[t])
    return y, s


def reference_dv(
    dy: np.ndarray,
    positions: np.ndarray,
    w: np.ndarray,
    k: np.ndarray,
    r: np.ndarray,
    a: np.ndarray | None = None,
    b: np.ndarray | None = None,
    early: bool = False,
) -> np.ndarray:
    """d(loss)/dv (T, H, dv) for dy = d(loss)/dy; it does not depend on the state."""
    ds, dv = np.zeros((*dy.shape[1:], k.shape[2])), np.empty(dy.shape)
    for t in reversed(range(len(positions))):
        here = dy[t, :, :, None] * r[t, :, None]
        ds = ds if early else ds + here
        dv[t] = np.einsum("hij,hj->hi", ds, k[t])
        through = (
            np.einsum("hij,hj,hk->hik", ds, b[t], a[t]) if a is not None and b is not None else 0
        )
        ds = ds * w[t, :, None] + through + (here if early else 0)
        ds = ds * (positions[t] != 0)
    return dv


def sample_positions(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """Positions that continue one sequence and, in a row of 5 tokens or more, begin two others."""
    starts = np.array([n_tokens // 3, n_tokens // 3 + 1]) if n_tokens > 4 else np.array([], int)
    t = np.arange(n_tokens)
    since = np.array([max([s for s in starts if s <= i], default=-3) for i in t])
    return (t - since).astype(np.int32)


Samples = Callable[[np.random.Generator], Iterator[Sample]]


def with_dy(samples: Samples, which: int) -> Samples:
    """An op's samples, each followed by a dy in the shape of source `which`."""

    def back_samples(rng: np.random.Generator) -> Iterator[Sample]:
        for s in samples(rng):
            dy = rng.standard_normal(np.shape(s.arrays[which]))
            params = {k: v for k, v in s.params.items() if k != "n_states"}
            yield Sample((*s.arrays, dy), params)

    return back_samples
