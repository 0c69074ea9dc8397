"""A script: attention of few queries (attention/decode.py), each thread a thread of Python.

It prints, for each, what it is and its error.
"""

import numpy as np
from by_thread import LANES, run_block, run_cluster, show

from pyggml.backends.cuda.attention import decode, keys
from pyggml.backends.cuda.attention.one_token import Token
from pyggml.backends.cuda.attention.scores import ScoreFactors, ScoreSizes
from pyggml.ops import OPS

decode._WARPS, keys.HAS_PTX = 2, True
JOINED = {True: "in clusters", False: "by tickets"}
SIZE, N_KEYS, N_KEY_HEADS, N_PARTS, SCALE, EPS = 128, 37, 2, 2, 0.3, 1e-3
rng = np.random.default_rng(1)


def numbers(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def attend(q, k, v, span, sharing, token=0, size=SIZE, in_clusters=True):
    """What all blocks give: heads of a query (n_heads, size)."""
    n_heads, together = sharing * N_KEY_HEADS, 3 if sharing == 3 else 2
    blocks, of_cluster = sharing // together, N_PARTS if in_clusters else 0
    batch = 4 if together == 3 else 8  # two warps of two blocks go round twice
    shape = decode._Shape(
        size, "F16", together, blocks, False, False, True, token != 0, of_cluster, batch,
        token != 0,
    )  # fmt: skip
    sums = np.full(n_heads * N_PARTS * (size + 2), np.nan, np.float32)
    out, lse = np.full(n_heads * size, np.nan, np.float32), np.zeros(n_heads, np.float32)
    tickets = np.zeros(n_heads // together, np.uint32)
    sizes = ScoreSizes(1, N_KEYS, n_heads, N_KEY_HEADS, 0, False, 0)
    factors = ScoreFactors(np.float32(SCALE), *map(np.float32, (0, 1, 1)))
    raw = (x.reshape(-1).view(np.uint8) for x in (k, v))
    arguments = out, lse, sums, tickets, q.reshape(-1), *raw, span, q, q, sizes, factors, token
    grid = N_PARTS, n_heads // together, 1
    kernel, n_threads = decode._attend(shape), decode._WARPS * LANES
    for y in range(grid[1]):
        if in_clusters:
            run_cluster(kernel, arguments, y, grid, n_threads)
            continue
        for x in reversed(range(grid[0])):  # the first block fills the token's row, here last
            run_block(kernel, arguments, (x, y, 0), grid, n_threads)
    return out.reshape(n_heads, size)


def attended(q, k, v, first, last):
    """softmax(scale · q·k) v of keys and values (n_keys, n_key_heads, size)."""
    k, v = (np.repeat(x[first:last].astype(float), len(q) // k.shape[1], 1) for x in (k, v))
    z = np.exp(SCALE * np.einsum("hd,shd->hs", q, k))
    return np.einsum("hs,shd->hd", z / z.sum(1, keepdims=True), v)


def caches(size=SIZE):
    return (numbers(N_KEYS, N_KEY_HEADS, size).astype(np.float16) for _ in "kv")


def plain(sharing, size, in_clusters):
    q, (k, v) = numbers(sharing * N_KEY_HEADS, size), caches(size)
    span = np.array([2, 36], np.int32)
    found = attend(q, k, v, span, sharing, size=size, in_clusters=in_clusters)
    show(f"{sharing} heads of {size} {JOINED[in_clusters]}", found, attended(q, k, v, 2, 36))


def with_heads_made_here(sharing, row, last, in_clusters=True):
    q, fresh_k, fresh_v = (numbers(n, SIZE) for n in (sharing * N_KEY_HEADS, *2 * (N_KEY_HEADS,)))
    weights, (k, v) = (numbers(SIZE), numbers(SIZE)), caches()
    k[row], v[row] = np.nan, np.nan  # nobody reads what is there
    angles = rng.uniform(0, 6, (1, 1, 64))
    table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    made_q, made_k = (
        OPS["rope_apply"].ref(
            OPS["rms_norm_mul"].ref(x[None], w, eps=EPS), table, neox=True, offset=0
        )[0]
        for x, w in zip((q, fresh_k), weights, strict=True)
    )
    eps, ids = np.float32(EPS), np.array([row], np.int32)
    flat = (x.reshape(-1) for x in (q, fresh_k, fresh_v))
    puts = k.reshape(-1), v.reshape(-1)
    token = Token(*flat, weights, (eps, eps), table.reshape(-1), ids, *puts, N_KEYS, (ids, 0))
    span = np.array([2, last], np.int32)
    found = attend(q, k, v, span, sharing, token, in_clusters=in_clusters)
    what = f"{sharing} heads made here, row {row} of {last}, {JOINED[in_clusters]}"
    show(f"key cached, {what}", k[row].astype(float), made_k)
    show(f"value cached, {what}", v[row].astype(float), fresh_v)
    if row >= last:
        k[row] = v[row] = 0
    show(what, found, attended(made_q, k, v, 2, last))


plain(2, 64, False)
plain(2, 64, True)
plain(3, 36, True)
plain(2, 80, True)
plain(3, 256, True)
with_heads_made_here(2, 35, 36, False)
with_heads_made_here(2, 35, 36)
with_heads_made_here(4, 7, 36)
with_heads_made_here(2, 20, 9)
