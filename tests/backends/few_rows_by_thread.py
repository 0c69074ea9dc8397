"""A script: the kernel of products of few rows (gemm/few_rows.py), each thread a thread of Python.

It prints, for each product, what it is and its error.
"""

import numpy as np
from by_thread import run_block, show

from pyggml.backends.cuda.gemm import few_rows
from pyggml.graph.dtypes import DTYPES
from pyggml.quants import dequantize, quantize

# Few blocks of few warps, so that each has several chunks.
few_rows._FEWEST_WARPS = few_rows._MOST_WARPS = 2
few_rows.BLOCKS = 4
few_rows.least_shared = lambda: 76 << 10  # where a warp has room for two chunks


def launch(parts, a, rows, k, norm=None):
    kernel, (grid, n_threads, _, n_bytes), arguments, _ = few_rows.products(
        parts, a, rows, k, None, norm
    ).arguments
    for block in range(grid):
        run_block(kernel, arguments, (block, 0, 0), (grid, 1, 1), n_threads, n_bytes)


rng = np.random.default_rng(1)


def numbers(*shape):
    return rng.standard_normal(shape).astype(np.float32)


# All operations that bytes take: bits and pairs, digits, scales of 8 bits, signs, rows of grids.
WITH_BITS = ("Q1_0", "Q2_0", "TQ1_0", "NVFP4", "IQ1_M", "IQ2_S", "IQ3_XXS", "IQ3_S")


def matrix(kind, n, k):
    packed = quantize(numbers(n, k), kind)
    return packed.reshape(-1), dequantize(packed, kind).reshape(n, k).astype(float)


def part_of(kind, n, k, rows, **more):
    packed, plain = matrix(kind, n, k)
    out = np.full(rows * n, np.nan, np.float32)
    return few_rows.FewRowsProduct(out, packed, DTYPES[kind], n, **more), plain


def added(kind, n, k, rows, scales=1):
    a = numbers(rows, k) * np.float32(scales)
    before = numbers(rows, n) * np.float32(np.max(scales))
    part, plain = part_of(kind, n, k, rows, added=before.reshape(-1))
    launch([part], a.reshape(-1), rows, k)
    show(f"{kind} {n} x {k}, {rows} rows", part.out.reshape(rows, n), a @ plain.T + before)


def large():
    """A number whose reciprocal the card takes for 0."""
    a, (part, plain) = np.zeros(128, np.float32), part_of("Q8_0", 3, 128, 1)
    a[5] = 1.2e38
    launch([part], a, 1, 128)
    show("a large number", part.out, a @ plain.T)


def normed(kinds, k, rows):
    a, weights, out = 3 * numbers(rows, k), numbers(k), np.full(rows * k, np.nan, np.float32)
    wanted = a / np.sqrt((a.astype(float) ** 2).mean(1, keepdims=True) + 1e-3) * weights
    (first, w), (second, v) = (
        part_of(kind, n, k, rows) for kind, n in zip(kinds, (9, 5), strict=True)
    )
    norm = few_rows.FusedNorm(weights, np.float32(1e-3), out, True)
    launch([first, second], a.reshape(-1), rows, k, norm)
    show(f"first of {kinds}", first.out.reshape(rows, -1), wanted @ w.T)
    show(f"second of {kinds}", second.out.reshape(rows, -1), wanted @ v.T)
    show(f"norm before {kinds}", out.reshape(rows, k), wanted)


def gated(what, k=768, n=30):
    a, (up, plain_up) = numbers(k), matrix("Q6_K", n, k)
    part, plain = part_of("Q6_K", n, k, 1, up=up)
    launch([part], a, 1, k)
    gate = plain @ a
    show(what, part.out, gate / (1 + np.exp(-gate)) * (plain_up @ a))


added("Q8_0", 70, 256, 1)
added("Q4_K", 45, 256, 1)
added("Q8_0", 13, 160, 3)
added("Q6_K", 9, 768, 2)
added("Q2_K", 9, 512, 2)
for kind in WITH_BITS:
    added(kind, 9, 256, 1)
added("Q8_0", 9, 128, 1, np.repeat([1, 0, 1e-38, 1e-20], 32))  # a group of zeros, one nearly so
added("Q8_0", 10, 128, 1, 1e-25)
large()
normed(("Q4_K", "Q6_K"), 512, 2)
normed(("Q2_K", "Q4_K"), 256, 1)  # which has minima of halves, and which has not
normed(("Q8_0", "Q8_0"), 160, 1)  # groups of no full warp; both parts run the same code
gated("gated")
few_rows.BLOCKS, few_rows.MOST_WARPS = 1, 6  # a block, whose warps have two chunks each
few_rows._beside_one_alone = lambda: 82 << 10  # of 84,032 bytes
gated("gated, sums over A", n=50)
few_rows.least_shared = lambda: 0
gated("gated, a chunk at a time")
