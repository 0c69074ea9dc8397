"""Recurrent ops: states that are handed on, sequences that do not see each other, bad shapes."""

import numpy as np
import pytest

from pyggml.errors import ShapeError
from pyggml.graph.tensor import leaf
from pyggml.ops import gated_delta_net, gated_linear_attn, rwkv_wkv6, rwkv_wkv7, ssm_conv, ssm_scan
from pyggml.runtime import run

T, H, D = 12, 3, 4


def make(name, rng):
    """build(state, slice of tokens, positions) -> node, and the shape of a state."""

    def per_token(*shape):
        return rng.uniform(0.1, 0.9, (T, *shape)).astype(np.float32)

    def cut(arrays, part):
        return [leaf(np.ascontiguousarray(a[part])) for a in arrays]

    vectors = [per_token(H, D) for _ in range(6)]
    if name == "ssm_conv":
        x, w = per_token(D), rng.standard_normal((D, 4)).astype(np.float32)
        return (lambda s, part, p: ssm_conv(s, *cut([x], part), leaf(w), p)), (3, D)
    if name == "ssm_scan":
        x, dt, b, c = per_token(H, D), per_token(H), per_token(1, 5), per_token(1, 5)
        a = leaf(-rng.uniform(0.1, 2, (H, 5)).astype(np.float32))

        def scan(s, part, p, n_states=1):
            x1, dt1, b1, c1 = cut([x, dt, b, c], part)
            return ssm_scan(s, x1, dt1, a, b1, c1, p, n_states)

        return scan, (H, D, 5)
    if name == "gated_delta_net":
        g, beta = -per_token(H), per_token(H)

        def delta(s, part, p, n_states=1):
            return gated_delta_net(s, *cut([*vectors[:3], g, beta], part), p, n_states)

        return delta, (H, D, D)
    if name == "rwkv_wkv6":
        u = leaf(rng.standard_normal((H, D)).astype(np.float32))

        def wkv6(s, part, p):
            k, v, r, w = cut(vectors[:4], part)
            return rwkv_wkv6(s, k, v, r, u, w, p)

        return wkv6, (H, D, D)
    if name == "rwkv_wkv7":
        return (lambda s, part, p: rwkv_wkv7(s, *cut(vectors, part), p)), (H, D, D)

    def gla(s, part, p):
        return gated_linear_attn(s, *cut(vectors[:4], part), p, 0.5)

    return gla, (H, D, D)


NAMES = ["ssm_conv", "ssm_scan", "gated_delta_net", "rwkv_wkv6", "rwkv_wkv7", "gated_linear_attn"]


def positions(*ranges):
    return leaf(np.concatenate([np.arange(*r) for r in ranges]).astype(np.int32))


def numbers(node):
    """The result, and the state that it leaves."""
    y, last = run(node, node.saved[0])
    return y, last


@pytest.fixture(params=NAMES)
def recurrent(request, rng):
    build, shape = make(request.param, rng)
    return build, rng.standard_normal(shape).astype(np.float32)


def test_a_state_carries_a_sequence_on(recurrent):
    build, state = recurrent
    whole, last = numbers(build(leaf(state), slice(T), positions((0, T))))
    pieces = []
    for first, end in [(0, 1), (1, 3), (3, 9), (9, T)]:
        y, state = numbers(build(leaf(state), slice(first, end), positions((first, end))))
        pieces.append(y)
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("n_states", [2, 5, T + 3])
@pytest.mark.parametrize("name", ["ssm_scan", "gated_delta_net"])
def test_earlier_states_are_those_of_fewer_tokens(name, n_states, rng):
    """Bitwise, also of a sequence that begins between them; before all tokens, the first state."""
    build, shape = make(name, rng)
    state, at = rng.standard_normal(shape).astype(np.float32), positions((3, 11), (0, T - 8))
    y, states = numbers(build(leaf(state), slice(T), at, n_states))
    np.testing.assert_array_equal(y, run(build(leaf(state), slice(T), at))[0])
    assert states.shape == (n_states, *shape)
    for back in range(n_states):
        n = T - back
        if n <= 0:
            np.testing.assert_array_equal(states[back], state)
            continue
        _, wanted = numbers(build(leaf(state), slice(n), leaf(at.data[:n])))
        np.testing.assert_array_equal(states[back], wanted)


def test_sequences_in_one_row_do_not_see_each_other(recurrent):
    build, state = recurrent
    together, last = numbers(build(leaf(state), slice(T), positions((2, 6), (0, 1), (0, 7))))
    for first, end, start in [(0, 4, 2), (4, 5, 0), (5, T, 0)]:
        at = positions((start, start + end - first))
        alone, left = numbers(build(leaf(state), slice(first, end), at))
        np.testing.assert_array_equal(together[first:end], alone)
    if state.shape != (3, D):  # a window of inputs also holds what is no longer seen
        np.testing.assert_array_equal(last, left)


def test_a_beginning_sequence_forgets_the_state(recurrent):
    build, state = recurrent
    found = [run(build(leaf(s), slice(T), positions((0, T))))[0] for s in (state, 9 * state)]
    np.testing.assert_array_equal(*found)
    went_on = [run(build(leaf(s), slice(T), positions((5, 5 + T))))[0] for s in (state, 9 * state)]
    assert np.abs(went_on[0] - went_on[1]).max() > 1e-2


def test_positions_for_other_tokens_are_refused(recurrent):
    build, state = recurrent
    with pytest.raises(ShapeError, match=r"positions is .*, wanted I32\[12\]"):
        build(leaf(state), slice(T), positions((0, T + 1)))


def test_a_state_of_another_shape_is_refused(recurrent):
    build, state = recurrent
    with pytest.raises(ShapeError, match="state is"):
        build(leaf(state[1:].copy()), slice(T), positions((0, T)))


def test_heads_share_keys_evenly_or_not_at_all():
    def zeros(*shape):
        return leaf(np.zeros(shape, np.float32))

    with pytest.raises(ShapeError, match="wanted key heads that divide heads"):
        gated_delta_net(
            zeros(3, 4, 4), zeros(2, 2, 4), zeros(2, 2, 4), zeros(2, 3, 4), zeros(2, 3),
            zeros(2, 3), positions((0, 2)),
        )  # fmt: skip
    with pytest.raises(ShapeError, match="wanted groups that divide the heads"):
        ssm_scan(
            zeros(3, 1, 4), zeros(2, 3, 1), zeros(2, 3), zeros(3, 4), zeros(2, 2, 4),
            zeros(2, 2, 4), positions((0, 2)),
        )  # fmt: skip
