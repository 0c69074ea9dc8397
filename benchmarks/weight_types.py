"""Products of few rows with every weight type on an NVIDIA card: how right and how fast they are.

usage: weight_types.py [--types IQ3_S,Q2_K] [--processes 14] [--size 16384x4096]

First each type's products with 1, 3 and 5 rows at several widths are held to NumPy's: one JSON line
a type, with the greatest error by the greatest number of a product, and the path of each. Types are
compiled in processes of their own, side by side. Then one row is timed: microseconds and GB/s of
weights by the path that serves it and by `dots of few`, which takes every type, one weight at a
time; matrices in turn, together larger than a card's cache.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from device import Card

from pyggml.backends.cuda.gemm import PATHS, CudaOperands, CudaProblem, Factor, path_of
from pyggml.backends.cuda.runtime.captures import Capture
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.backends.cuda.runtime.launches import in_turn
from pyggml.graph.dtypes import DTYPES
from pyggml.quants import QUANTS, dequantize

NAMES = [name for name, quant in QUANTS.items() if quant.dtype.quantised]
ROWS, WIDTHS = (1, 3, 5), (160, 256, 1280, 4096)
ALLOWED = 1e-2  # of bfloat16, which products of five rows are rounded to
N_CHECKED = 70  # rows of W: no whole number of tiles
CACHE = 128 << 20  # bytes; an H100 has 50 MiB
DOTS_OF_FEW = next(path for path in PATHS if path.name == "dots of few")


def random_rows(name: str, n: int, k: int) -> np.ndarray:
    """Random bytes, whose scales are numbers: no half has its top bit of the exponent."""
    raw = np.random.default_rng(3).integers(0, 256, n * DTYPES[name].row_bytes(k), np.uint8)
    return raw & np.uint8(0xBF)


def problem_of(name: str, m: int, n: int, k: int) -> CudaProblem:
    return CudaProblem(m, n, k, Factor(k, 1), Factor(k, 1, dtype=DTYPES[name]), compute="bf16")


def call_of(card: Card, path: Any, p: CudaProblem, x: Any, w: Any, y: Any) -> Any:
    scratch = cuda.device_array(max(path.scratch(p), 1), np.uint8)
    w = w.view(p.b.dtype.numpy)
    return path.bind(p, CudaOperands(y, x, w, scratch, False, card.stream))


def check(card: Card, name: str) -> None:
    errors, paths = {}, {}
    for k in (k for k in WIDTHS if k % DTYPES[name].block == 0):
        raw = random_rows(name, N_CHECKED, k)
        plain = dequantize(raw, name).reshape(N_CHECKED, k).astype(float)
        for m in ROWS:
            x = np.random.default_rng(m).standard_normal((m, k), np.float32)
            p, y = problem_of(name, m, N_CHECKED, k), cuda.device_array(m * N_CHECKED, np.float32)
            path = path_of(p)
            factors = cuda.to_device(x.reshape(-1)), cuda.to_device(raw)
            in_turn(call_of(card, path, p, *factors, y))()
            card.stream.synchronize()
            wanted = x @ plain.T
            error = abs(y.copy_to_host().reshape(wanted.shape) - wanted).max() / abs(wanted).max()
            errors[f"{m} x {k}"], paths[m] = float(error), path.name
    # The kernel that is timed beside it is compiled here too.
    p = problem_of(name, 1, N_CHECKED, k)
    in_turn(call_of(card, DOTS_OF_FEW, p, *factors, y))()
    card.stream.synchronize()
    is_right = all(error < ALLOWED for error in errors.values())
    card.say("weight type", type=name, is_right=is_right, errors=errors, paths=paths)


def time(card: Card, name: str, n: int, k: int) -> None:
    n_bytes = n * DTYPES[name].row_bytes(k)
    some = random_rows(name, 64, k)
    matrices = [cuda.to_device(np.tile(some, n // 64)) for _ in range(-(-CACHE // n_bytes))]
    p, y = problem_of(name, 1, n, k), cuda.device_array(n, np.float32)
    x = cuda.to_device(np.random.default_rng(0).standard_normal(k, np.float32))
    fields = {}
    for what, path in (("now", path_of(p)), ("dots_of_few", DOTS_OF_FEW)):
        calls = [call_of(card, path, p, x, w, y) for w in matrices]
        taken = card.seconds(Capture(calls, card.stream), 5) / len(calls)
        fields |= {f"{what}_us": taken * 1e6, f"{what}_gb_per_second": n_bytes / taken / 1e9}
    card.say("one row", type=name, path=path_of(p).name, n=n, k=k, **fields)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(NAMES))
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--size", default="16384x4096")
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    names, (n, k) = options.types.split(","), map(int, options.size.split("x"))
    if options.check_only:
        card = Card(0)
        for name in names:
            check(card, name)
        return

    def check_on_card(name: str) -> str:
        command = [sys.executable, __file__, "--check-only", "--types", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        error = {"benchmark": "device weight type", "type": name, "error": done.stderr[-800:]}
        return done.stdout.strip() or json.dumps(error)

    with ThreadPoolExecutor(options.processes) as pool:
        for line in pool.map(check_on_card, names):
            print(line, flush=True)
    card = Card(0)
    for name in names:
        time(card, name, n, k)


if __name__ == "__main__":
    main()
