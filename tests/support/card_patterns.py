"""Graphs of the nodes that one kernel of a card computes, by the ops of the pattern.

Each function gives the graph, and the leaves that it changes.
"""

import numpy as np

from pyggml.graph import Graph
from pyggml.graph.dtypes import DTYPES, F16, I32
from pyggml.graph.tensor import leaf, zeros
from pyggml.ops import (
    OPS,
    add,
    add_inplace,
    advance,
    clamp,
    div,
    flash_attn_ext,
    get_rows,
    likeliest,
    mul,
    mul_mat,
    mul_mat_id,
    out_prod,
    repeat_back,
    reshape,
    rms_norm_mul,
    scale,
    set_rows,
    soft_max,
    swiglu,
    top_k,
)
from pyggml.ops.attention.rope import rope_apply, rope_apply_back, rope_table
from pyggml.ops.norm.norm_mul import rms_norm_mul_back
from pyggml.quants import quantize


def own_ops():
    """The ops that a card's passes put into graphs, by name."""
    from pyggml.backends.cuda import rewrites
    from pyggml.backends.cuda.runtime.kernel import OWN_OPS

    assert rewrites.REWRITES, "they are declared"
    return OWN_OPS


RNG = np.random.default_rng(11)


def numbers(*shape):
    return leaf(RNG.standard_normal(shape).astype(np.float32))


def summed():
    total = zeros((5, 7))
    return Graph.of(add_inplace(total, out_prod(numbers(3, 7), numbers(3, 5)))), [total]


def scaled():
    return Graph.of(add(scale(mul_mat(numbers(4, 6), numbers(5, 6)), 2.5), numbers(5, 4))), []


def residual_and_norm():
    x = add(numbers(6, 40), numbers(6, 40))
    return Graph.of(rms_norm_mul(x, numbers(40), eps=1e-3), scale(x, 2.0)), []


def norm_gradient_and_residual():
    back = rms_norm_mul_back(numbers(6, 40), numbers(40), numbers(6, 40), eps=1e-3)
    return Graph.of(add(numbers(6, 40), back)), []


def rotated(head=128, neox="neox"):
    """The norm of heads, turned, and the gradient of both."""
    x, w, dy = numbers(5, 3, head), numbers(head), numbers(5, 3, head)
    table = rope_table(leaf(np.array([0, 1, 5, 2, 9], np.int32)), n_dims=head, mode=neox)
    turned = rope_apply(rms_norm_mul(x, w, eps=1e-3), table, neox)
    return Graph.of(turned, rms_norm_mul_back(x, w, rope_apply_back(dy, table, neox), eps=1e-3)), []


def gates_gradients():
    gate, up, dy = (numbers(7, 12) for _ in range(3))
    return Graph.of(OPS["swiglu_back_gate"](gate, up, dy), swiglu(gate, dy)), []


def packed(n, k):
    """Rows of Q4_K."""
    raw = quantize(RNG.standard_normal((n, k), np.float32), "Q4_K")
    return leaf(raw, dtype=DTYPES["Q4_K"])


def three():
    x = rms_norm_mul(numbers(2, 256), numbers(256))
    products = (mul_mat(packed(n, 256), x) for n in (40, 24, 24))
    return Graph.of(*(scale(y, 2.0) for y in products)), []


def of_logits():
    return Graph.of(mul_mat(packed(40, 256), rms_norm_mul(numbers(1, 256), numbers(256)))), []


def gated():
    x = rms_norm_mul(numbers(1, 512), numbers(512))
    return Graph.of(swiglu(mul_mat(packed(24, 512), x), mul_mat(packed(24, 512), x))), []


def residual():
    return Graph.of(add(numbers(1, 24), mul_mat(packed(24, 256), numbers(1, 256)))), []


def chosen():
    """The likeliest token, and the inputs of its pass."""
    leaves = [zeros(shape, I32) for shape in ((1,), (1,), (1,), (1, 2))]
    choice = likeliest(numbers(1, 1234))
    return Graph.of(choice, advance(leaves[0], choice, *leaves[1:])), leaves


def put_into_caches(n_rows, ids, *rows):
    """A new cache for each of some rows, and the nodes that put them into these."""
    caches = [zeros((n_rows, x.shape[1]), F16) for x in rows]
    return caches, [set_rows(cache, x, ids) for cache, x in zip(caches, rows, strict=True)]


def heads():
    """Of two tokens: three heads of queries, one of keys."""
    table = rope_table(leaf(np.array([3, 7], np.int32)), n_dims=8)
    ids = leaf(np.array([4, 1], np.int32))
    normed = (rms_norm_mul(numbers(2, n, 8), numbers(8)) for n in (3, 1))
    q, k = (rope_apply(x, table, "neox") for x in normed)
    rows = (reshape(x, (2, 8)) for x in (k, numbers(2, 1, 8)))
    caches, puts = put_into_caches(6, ids, *rows)
    return Graph.of(q, *puts), caches


def attended():
    """The heads of one token, four of queries and two of keys, and attention over the cache."""
    table = rope_table(leaf(np.array([3], np.int32)), n_dims=128)
    ids = leaf(np.array([4], np.int32))
    normed = (rms_norm_mul(numbers(1, n, 128), numbers(128)) for n in (4, 2))
    q, k = (rope_apply(x, table, "neox") for x in normed)
    rows = (reshape(x, (1, 256)) for x in (k, numbers(1, 2, 128)))
    caches, puts = put_into_caches(6, ids, *rows)
    span = leaf(np.array([[1, 5]], np.int32))
    o = flash_attn_ext(q, *(reshape(put, (6, 2, 128)) for put in puts), span, 0.3)
    return Graph.of(o, *puts), caches


def experts(weighted=True):
    """Gate, up and their unit of three of five experts, for two tokens."""
    ids = leaf(np.array([[4, 0, 2], [2, 3, 1]], np.int32))
    w = [leaf(packed(5 * 40, 512).data.reshape(5, 40, -1), dtype=DTYPES["Q4_K"]) for _ in range(2)]
    x = numbers(2, 1, 512)
    inner = swiglu(*(mul_mat_id(one, x, ids) for one in w))
    return Graph.of(mul(inner, numbers(2, 3, 1)) if weighted else scale(inner, 2.0)), []


def sum_of_experts():
    y = repeat_back(numbers(3, 4, 24), (3, 1, 24))
    return Graph.of(add(numbers(3, 24), reshape(y, (3, 24)))), []


def router():
    """Of two tokens; of the second, all experts but one are equally good."""
    scores = RNG.standard_normal((2, 40)).astype(np.float32)
    scores[1] = 0.5
    scores[1, 7] = 0.75
    return Graph.of(*choice(leaf(scores))), []


def choice(scores):
    """Six experts for each row of scores, and their weights."""
    probabilities = soft_max(scores)
    best = top_k(probabilities, 6)
    weights = get_rows(reshape(probabilities, (*scores.shape, 1)), best)
    total = clamp(repeat_back(weights, (scores.shape[0], 1, 1)), 1e-4, float("inf"))
    return best, div(weights, total)


def normed_router():
    """Of two tokens, of more numbers than a warp holds, and more experts than there are warps."""
    normed = rms_norm_mul(numbers(2, 2200), leaf(np.full(2200, 0.02, np.float32)), eps=1e-3)
    scores = mul_mat(numbers(200, 2200), normed)
    return Graph.of(*choice(scores), scale(normed, 2.0)), []


PATTERNS = {
    "out_prod_add": summed,
    "mul_mat+scale": scaled,
    "add+rms_norm_mul": residual_and_norm,
    "rms_norm_mul_back+add": norm_gradient_and_residual,
    "rms_norm_mul+rope_apply": rotated,
    "rope_apply_back+rms_norm_mul_back": rotated,
    "swiglu_back_gate+swiglu": gates_gradients,
    "rms_norm_mul+mul_mat+mul_mat+mul_mat": three,
    "rms_norm_mul+mul_mat+mul_mat+swiglu": gated,
    "rms_norm_mul+mul_mat": of_logits,
    "mul_mat+add": residual,
    "likeliest+advance": chosen,
    "mul_mat_id+mul_mat_id+swiglu+mul": experts,
    "mul_mat_id+mul_mat_id+swiglu": lambda: experts(weighted=False),
    "repeat_back+add": sum_of_experts,
    "soft_max+top_k+get_rows+repeat_back+clamp+div": router,
    "rms_norm_mul+mul_mat+soft_max+top_k+get_rows+repeat_back+clamp+div": normed_router,
    "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows": heads,
    "rms_norm_mul+rope_apply+rms_norm_mul+rope_apply+set_rows+set_rows+flash_attn_ext": attended,
}
