"""A script: the kernel of packed weights on tensor cores (gemm/packed_tiles.py), each thread a
thread of Python. It prints, for each product, what it is and its error.
"""

import numpy as np
from by_thread import (
    bytes_of,
    copy_16,
    multiply_tile,
    rounded,
    run_cluster,
    show,
    two_bf16,
    widened,
    words_at,
)

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.quants import dequantize, quantize


def weights_of_bytes(word, scale, least, excess):
    x = np.frombuffer(bytes_of(word), np.int8).astype(np.float64) + excess
    w = (x * scale + least).astype(np.float32)
    return two_bf16(w[0], w[1]), two_bf16(w[2], w[3])


def copy_8(memory, to, source, at):
    assert at % 8 == 0 and to % 8 == 0, f"8 bytes are copied from {at} to {to}"
    memory[to : to + 8] = source[at : at + 8]


def group_multiplier(is_exact, sixteens):
    def multiply(memory, at, apart, words, factors, sums):
        sums = list(sums)
        for n, word in enumerate(words):
            excess = 0 if is_exact else byte_ptx.EXCESS
            two = weights_of_bytes(word, factors[n // 4], factors[2 + n // 4], excess)
            for j in range(sixteens):
                own = slice(8 * j + 4 * (n & 1), 8 * j + 4 * (n & 1) + 4)
                a = words_at(4)(memory, at + 16 * n + j * apart)
                sums[own] = multiply_tile(sums[own], a, *two)
        return tuple(sums)

    return multiply


byte_ptx.copy_8, byte_ptx.group_multiplier = copy_8, group_multiplier
byte_ptx.copy_16 = lambda memory, to, source, at: copy_16(memory, to, source, at, 16)
ptx.plain = lambda *_, **__: lambda: None

# Below the instructions that stand for a card's, which these take as they are imported.
from pyggml.backends.cuda.gemm import few_rows  # noqa: E402
from pyggml.backends.cuda.gemm import packed_tiles as tiles  # noqa: E402
from pyggml.graph.dtypes import DTYPES  # noqa: E402

few_rows.least_shared = tiles.least_shared = lambda: 0
tiles._SHAPES = ((2, 2),)
rng = np.random.default_rng(1)


def numbers(*shape):
    return rng.standard_normal(shape).astype(np.float32)


def matrix(kind, n, k):
    packed = quantize(numbers(n, k), kind)
    return packed.reshape(-1), widened(rounded(dequantize(packed, kind))).reshape(n, k)


def part_of(kind, n, k, rows, **more):
    packed, plain = matrix(kind, n, k)
    out = np.full(rows * n, np.nan, np.float32)
    return few_rows.FewRowsProduct(out, packed, DTYPES[kind], n, **more), plain


def launch(parts, a, rows, k, norm=None, blocks=1, shared=200 << 10, in_clusters=False):
    tiles.BLOCKS, tiles.most_shared = blocks, lambda: shared
    tiles.has_clusters = lambda: in_clusters
    call = tiles.products(parts, a.reshape(-1), rows, k, None, norm)
    kernel, (grid, n_threads, _, n_bytes), arguments, _ = call.arguments
    for first in range(0, grid, 1 + in_clusters):
        xs = range(first, first + 1 + in_clusters)
        run_cluster(kernel, arguments, 0, (grid, 1, 1), n_threads, xs, n_bytes)


def added(kind, n, k, rows, **how):
    a, before = numbers(rows, k), numbers(rows, n)
    part, plain = part_of(kind, n, k, rows, added=before.reshape(-1))
    launch([part], a, rows, k, **how)
    exact = widened(rounded(a)) @ plain.T + before
    show(f"{kind} {n} x {k}, {rows} rows", part.out.reshape(rows, n), exact)


def normed(a, weights):
    """The norm of A's rows, and what is multiplied: the rate of a row comes last."""
    rate = 1 / np.sqrt((a.astype(float) ** 2).mean(1, keepdims=True) + 1e-3)
    return a * rate * weights, rate * widened(rounded(a * weights))


def after_a_norm(kinds, k, rows, **how):
    a, weights, out = 3 * numbers(rows, k), numbers(k), np.full(rows * k, np.nan, np.float32)
    (first, w), (second, v) = (
        part_of(kind, n, k, rows) for kind, n in zip(kinds, (8, 5), strict=True)
    )
    launch(
        [first, second], a, rows, k, few_rows.FusedNorm(weights, np.float32(1e-3), out, True), **how
    )
    norm, x = normed(a, weights)
    show(f"first of {kinds}", first.out.reshape(rows, -1), x @ w.T)
    show(f"second of {kinds}", second.out.reshape(rows, -1), x @ v.T)
    show(f"norm before {kinds}", out.reshape(rows, k), norm)


def gated(kind, k, n, rows, **how):
    a, weights, (up, plain_up) = numbers(rows, k), numbers(k), matrix(kind, n, k)
    part, plain = part_of(kind, n, k, rows, up=up)
    launch([part], a, rows, k, few_rows.FusedNorm(weights, np.float32(1e-3), a, False), **how)
    _, x = normed(a, weights)
    gate = x @ plain.T
    exact = gate / (1 + np.exp(-gate)) * (x @ plain_up.T)
    show(f"gated {kind}", part.out.reshape(rows, n), exact)


after_a_norm(("Q4_K", "Q6_K"), 1024, 3, blocks=2)
added("Q8_0", 9, 3072, 9, in_clusters=True, shared=76 << 10)  # two steps of A, then one
gated("Q8_0", 2048, 5, 3, in_clusters=True)
