"""The microkernels against this machine's limit, and the products of every type against them.

usage: gemm.py [--tokens 512] [--rows 3072] [--depth 1024] [--rounds 7] [--types Q8_0,Q4_K,…]

The limit is the microkernel's own rate on a tile that stays in the first cache, on all threads at
once. A product also unpacks, packs, and goes through memory: its share of the limit is what is lost
there. Medians over the rounds; every round takes all of them in turn. Prints JSON lines, then a
table.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.call import Call
from pyggml.graph.dtypes import dtype
from pyggml.jit import kernel, parallel, prange
from pyggml.kernels import gemm
from pyggml.kernels.gemm.activations import BLOCK_WORDS
from pyggml.kernels.gemm.int8_tile import byte_product
from pyggml.kernels.gemm.panels import float_product, pair_product
from pyggml.kernels.gemm.tile import BYTE_TILE, FLOAT_TILE, PAIR_TILE, Tile
from pyggml.kernels.kernel import Compute
from pyggml.quants import quantize

from machine import about

REPEATS = 4000
WORDS: dict[Compute, int] = {"f32": 128, "bf16": 128, "int8": 64}  # depth of the limit's tile
TILES: dict[Compute, Tile] = {"f32": FLOAT_TILE, "bf16": PAIR_TILE, "int8": BYTE_TILE}


@kernel
def _repeat(a, b, c, k, tile, n):
    a, b, c, ld = a.ctypes.data, b.ctypes.data, c.ctypes.data, tile.panel
    for _ in range(n):
        if tile.per_word == 4:
            byte_product(a, a, b, b, c, ld, k // BLOCK_WORDS, 0, 1)
        elif tile.per_word == 2:
            pair_product(a, b, ld, c, ld, k, 1)
        else:
            float_product(a, b, ld, c, ld, k, 1)


@parallel
def _on_every_thread(a, b, c, k, tile, n):
    for i in prange(len(a)):
        _repeat(a[i], b[i], c[i], k, tile, n)


def _zeros(n: int, m: int) -> np.ndarray:
    """(n, m) as the kernels' own scratch lies, at the beginning of a cache line."""
    memory = CPU().alloc(4 * n * m).view(np.float32)
    memory[:] = 0
    return memory.reshape(n, m)


def limit(compute: Compute) -> Call:
    """The microkernel alone, REPEATS times on every thread; bytes with their scales."""
    n, k, tile = threads.most(), WORDS[compute], TILES[compute]
    a, b, c = (_zeros(n, m) for m in (k * tile.mr, k * tile.panel, tile.mr * tile.panel))
    return Call(_on_every_thread, a, b, c, k, tile.shape, REPEATS)


def limit_flop(compute: Compute) -> int:
    tile = TILES[compute]
    per_call = 2 * tile.mr * tile.panel * WORDS[compute] * tile.per_word
    return per_call * REPEATS * threads.most()


def product(
    which: gemm.Form, kind: str, compute: Compute, shape: tuple[int, int, int], keep: list[Any]
) -> Call:
    """mul_mat or out_prod of a random weight; its arrays go to `keep`, as calls hold addresses."""
    n_tokens, n_rows, depth = shape
    rng = np.random.default_rng(0)
    w = gemm.Weight(quantize(rng.standard_normal((n_rows, depth)), kind), dtype(kind), compute)
    x = rng.standard_normal((n_tokens, depth), np.float32)
    y = rng.standard_normal((n_tokens, n_rows), np.float32)
    n, k = (n_rows, depth) if which == "mul_mat" else (depth, n_rows)
    p = gemm.Problem(which, n_tokens, n, k, w.dtype, compute)
    scratch = CPU().alloc(gemm.scratch_bytes(p))
    keep += [w, x, y, scratch]
    if which == "mul_mat":
        return gemm.mul_mat(y, x, w, scratch, False)
    return gemm.out_prod(x, y, w, scratch, False)


def seconds(call: Call) -> float:
    began = perf_counter()
    call()
    return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=3072)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--types", default="F16,Q8_0,Q4_0,Q5_0,Q4_K,Q5_K,Q6_K")
    options = parser.parse_args()
    shape = (options.tokens, options.rows, options.depth)
    computes: list[Compute] = list(dict.fromkeys(("f32", gemm.FLOATS, gemm.FASTEST)))

    keep: list[Any] = []
    calls: dict[tuple[Compute, str, str], Call] = {}
    for compute in computes:
        calls[compute, "limit", ""] = limit(compute)
        for kind in options.types.split(","):
            for which in ("mul_mat", "out_prod"):
                calls[compute, which, kind] = product(which, kind, compute, shape, keep)
    times_of: dict[tuple[Compute, str, str], list[float]] = defaultdict(list)
    for one in calls.values():
        seconds(one)  # compiles
    for _ in range(options.rounds):
        for key, one in calls.items():
            times_of[key].append(seconds(one))

    flop = 2 * shape[0] * shape[1] * shape[2]
    print(f"{'':<6}{'':<10}{'':<8}{'GFLOP/s':>9}{'share':>8}")
    for (compute, which, kind), times in times_of.items():
        most = limit_flop(compute) / median(times_of[compute, "limit", ""])
        rate = (limit_flop(compute) if which == "limit" else flop) / median(times)
        result: dict[str, Any] = {
            "benchmark": "gemm", "compute": compute, "op": which, "type": kind, "shape": shape,
            "gflops": round(rate / 1e9, 1), "share": round(rate / most, 3), "isa": gemm.CHOSEN.name,
        }  # fmt: skip
        print(json.dumps(result | about("pyggml", "numba", "numpy")))
        print(f"{compute:<6}{which:<10}{kind:<8}{rate / 1e9:>9.1f}{rate / most:>8.2f}")


if __name__ == "__main__":
    main()
