"""Random graphs: every step takes tensors from a pool and adds new ones."""

import numpy as np
from hypothesis import strategies as st

from pyggml.backward import build_backward
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.ops import (
    add,
    cont,
    flash_attn_ext,
    mul,
    mul_mat,
    mul_mat_add,
    narrow,
    repeat,
    reshape,
    rms_norm,
    scale,
    soft_max,
    sqr,
    sum_,
    sum_rows,
    transpose,
)
from pyggml.ops.arithmetic.broadcast import tiles


def _pick(draw, pool, fits=lambda t: True):
    """One of the last tensors that fit, so that graphs grow deep rather than wide."""
    fitting = [t for t in pool if fits(t)]
    return draw(st.sampled_from(fitting[-6:])) if fitting else None


def _is_square(t):
    return t.shape == (16, 16)


def _halved(draw, pool):
    return scale(_pick(draw, pool), 0.5)


def _added(draw, pool):
    a = _pick(draw, pool)
    return scale(add(a, _pick(draw, pool, lambda t: tiles(t.shape, a.shape))), 0.5)


def _multiplied(draw, pool):
    a = _pick(draw, pool)
    return mul(a, _pick(draw, pool, lambda t: tiles(t.shape, a.shape)))


def _squared(draw, pool):
    return sqr(_pick(draw, pool))


def _reshaped(draw, pool):
    shape = draw(st.sampled_from([(16, 16), (8, 32), (4, 4, 16)]))
    x = _pick(draw, pool, lambda t: t.n_elements == 256)
    return x and reshape(x, shape)


def _transposed(draw, pool):
    x = _pick(draw, pool, lambda t: len(t.shape) > 1)
    return x and transpose(x)


def _copied(draw, pool):
    return cont(_pick(draw, pool))


def _narrowed(draw, pool):
    x = _pick(draw, pool, lambda t: t.shape[0] % 2 == 0)
    return x and narrow(x, 0, draw(st.sampled_from([0, x.shape[0] // 2])), x.shape[0] // 2)


def _summed(draw, pool):
    x = _pick(draw, pool)
    return scale(sum_rows(x), 1 / x.shape[-1])


def _repeated(draw, pool):
    x = _pick(draw, pool, lambda t: tiles(t.shape, (16, 16)))
    return x and repeat(x, (16, 16))


def _normed(draw, pool):
    return rms_norm(_pick(draw, pool), 0.1)


def _softened(draw, pool):
    return soft_max(_pick(draw, pool))


def _product(draw, pool):
    w = _pick(draw, pool, _is_square)
    x = _pick(draw, pool, lambda t: len(t.shape) > 1 and t.shape[-1] == 16)
    return scale(mul_mat(w, x), 1 / 16)


def _product_added(draw, pool):
    y, w, x = (_pick(draw, pool, _is_square) for _ in range(3))
    return scale(mul_mat_add(y, w, x), 1 / 17)


def _attention(draw, pool):
    q, k, v = (_pick(draw, pool, _is_square) for _ in range(3))
    seen = np.stack([np.arange(16) // 2, np.arange(16) + 1], axis=1).astype(np.int32)
    heads = (reshape(t, (16, 2, 8)) for t in (q, k, v))
    return reshape(flash_attn_ext(*heads, leaf(seen, "span"), 0.3), (16, 16))


STEPS = [
    *(_halved, _added, _multiplied, _squared, _reshaped, _transposed, _copied, _narrowed),
    *(_summed, _repeated, _normed, _softened, _product, _product_added, _attention),
]


@st.composite
def results(draw):
    """The nodes of up to 20 steps, and the leaves that they start from."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = [(16, 16), (8, 32), (16,), (16, 16)]
    leaves = [leaf(rng.uniform(-1, 1, s).astype(np.float32)) for s in shapes]
    pool = [*leaves, scale(leaves[0], 0.5)]
    for step in draw(st.lists(st.sampled_from(STEPS), max_size=20)):
        new = step(draw, pool)
        if new is not None:
            pool.append(new)
    return [t for t in pool if t.op is not None], leaves


@st.composite
def graphs(draw):
    """A graph of up to 20 steps with some of its tensors as outputs, or the gradients of one."""
    found, leaves = draw(results())
    if draw(st.booleans()):
        loss = Graph.of(sum_(sqr(found[-1])))
        return build_backward(loss, used(found[-1], leaves))
    return Graph.of(*draw(st.lists(st.sampled_from(found), min_size=1, max_size=4, unique=True)))


def used(result, leaves):
    present = set(Graph.of(result).leaves)
    return [t for t in leaves if t in present]
