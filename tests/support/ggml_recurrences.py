"""How ggml builds the recurrences of the registry; see ggml_twins for what a builder is.

ggml has an axis of sequences where pyggml has positions, of which 0 begins one.
"""

from itertools import pairwise
from math import prod

import numpy as np
from ggml_cpu import Long, longs, numbers


def starts_of(positions):
    """Where each sequence begins, and where the last one ends."""
    positions = numbers(positions).reshape(-1)
    return [0, *(t for t, p in enumerate(positions) if p == 0 and t), len(positions)]


def has_states(n_states, positions):
    """Whether ggml writes so many states: no more than the last sequence has tokens."""
    *_, first, end = starts_of(positions)
    return n_states == 1 or end - first >= n_states


def along(g, call, state, tokens, positions):
    """(y, the last state) of call(state, *tokens of one sequence), one sequence after the other.

    Of several states of a sequence the next one begins with the first.
    """
    ys, shape = [], g.node.src[0].shape
    for start, end in pairwise(starts_of(positions)):
        if ys and prod(g.node.saved[0].shape) > prod(shape):
            state = g.part(state, 0, shape)
        if numbers(positions).flat[start] == 0:
            state = g.scale(state, 0.0) if prod(state.contents.ne) else state
        pieces = []
        for x, of in tokens:
            pieces.append(g.part(x, start * prod(of), (end - start, *of)))
        y, state = call(state, *pieces)
        ys.append(y)
    joined = ys[0]
    for y in ys[1:]:
        joined = g.concat(joined, y, 2)
    return joined, state


def halves(g, both, y, state):
    """A recurrence's result: y, and behind it the state, of these shapes."""
    return g.part(both, 0, y), g.part(both, prod(y), state)


def n_times(n, shape):
    """The shape of n of them."""
    return shape if n == 1 else (n, *shape)


def rwkv(g, call, state, src, positions, *, turn=False, multiple=1):
    """turn: ggml's state is the transpose of [value, key]. multiple: of what it wants a head."""
    n_heads, n, _ = shape = g.node.src[0].shape
    more = -n % multiple
    wide = (n_heads, n + more, n + more)
    src = [g.pad_ext(x, 0, more, 0, 0, 0, 0, 0, 0) for x in src] if more else src
    state = g.cont(g.transpose(state)) if turn else state
    state = g.pad_ext(state, 0, more, 0, more, 0, 0, 0, 0) if more else state

    def step(state, *tokens):
        both = call(*tokens, state)
        return halves(g, both, (tokens[0].contents.ne[2], *wide[:2]), (1, prod(wide)))

    tokens = [(x, wide[:2]) for x in src]
    y, last = along(g, step, g.part(state, 0, (1, prod(wide))), tokens, positions)
    last = cut(g, g.part(last, 0, wide), shape)
    return cut(g, y, g.node.shape), g.transpose(last) if turn else last


def cut(g, x, shape):
    """The first of x along each axis."""
    return g.view_4d(x, *longs(shape), *map(Long, (*x.contents.nb[1:], 0)))


def rwkv_wkv6(g, state, k, v, r, u, w, positions):
    def call(k, v, r, w, state):
        return g.rwkv_wkv6(k, v, r, u, w, state)

    return rwkv(g, call, state, (k, v, r, w), positions, turn=True)


def rwkv_wkv7(g, state, *rest):
    """ggml takes 64 numbers at a time, past the end of shorter heads."""
    return rwkv(g, g.rwkv_wkv7, state, rest[:-1], rest[-1], multiple=64)


def gated_linear_attn(g, state, k, v, q, decay, positions, scale):
    def call(*src):
        return g.gated_linear_attn(*src, scale)

    return rwkv(g, call, state, (k, v, q, decay), positions, turn=True)


def gated_delta_net(g, state, q, k, v, decay, beta, positions, n_states):
    if not has_states(n_states, positions):
        return None
    _, *of = (s.shape for s in g.node.src)
    of = [s[1:] for s in of[:-1]]
    of[3:] = [s if len(s) == 2 else (*s, 1) for s in of[3:]]

    def step(state, *tokens):
        n_tokens = tokens[0].contents.ne[2]
        n = min(n_states, n_tokens)
        both = g.gated_delta_net(*tokens, state, Long(n))
        return halves(g, both, (n_tokens, *g.node.shape[1:]), n_times(n, g.node.src[0].shape))

    return along(g, step, state, list(zip((q, k, v, decay, beta), of, strict=True)), positions)


def ssm_scan(g, state, x, dt, a, b, c, positions, n_states):
    if not has_states(n_states, positions):
        return None
    ids = g.leaf(np.zeros(1, np.int32))
    of = [s.shape[1:] for s in (g.node.src[i] for i in (1, 2, 4, 5))]

    def step(state, x, dt, b, c):
        n_tokens = x.contents.ne[2]
        n = min(n_states, n_tokens)
        both = g.ssm_scan(state, x, dt, a, b, c, ids, Long(n))
        return halves(g, both, (n_tokens, *g.node.shape[1:]), n_times(n, g.node.src[0].shape))

    return along(g, step, state, list(zip((x, dt, b, c), of, strict=True)), positions)


def ssm_conv(g, state, x, w, positions):
    """In ggml, what lies before the sequence of the first token is zero."""
    (before, channels), width = g.node.src[0].shape, (1, g.node.shape[1])

    def step(state, x):
        whole = g.concat(state, x, 2) if before else x
        n = whole.contents.ne[2]
        flat = g.part(whole, 0, (n, channels))
        y = g.ssm_conv(g.cont(g.transpose(flat)), w)
        last = g.part(whole, (n - before) * channels, (before, 1, channels)) if before else state
        return g.part(y, 0, (y.contents.ne[1], 1, channels)), last

    state = g.reshape(state, before, 1, channels)
    if before:
        seen = np.arange(before) >= before - numbers(positions).flat[0]
        state = g.mul(state, g.leaf(seen.astype(np.float32)[:, None, None]))
    y, last = along(g, step, state, [(x, width)], positions)
    return (y, last) if before else y
