"""The output layer and its loss with the gradient, against the microkernel's limit.

usage: loss.py MODEL.gguf [--tokens 512,2048] [--compute auto|int8|bf16|f32] [--rounds 5]

Every position is trained. FLOP are those of two products with the output matrix, the limit is
gemm.py's. The least time of all rounds counts, with one thread (NUMBA_NUM_THREADS=1) the thread's
own. Prints a JSON line for each number of tokens.
"""

import argparse
import json
from time import perf_counter, thread_time

import numpy as np
from gemm import limit, limit_flop

import pyggml
from pyggml import threads
from pyggml.graph import Graph
from pyggml.graph.tensor import leaf
from pyggml.model import COMPUTE_TYPES, Model
from pyggml.ops import linear_cross_entropy
from pyggml.runtime import Devices, bind, schedule

from machine import about


def measure(model: Model, n: int, rounds: int) -> dict[str, object]:
    """The time of n positions, and its share of the limit."""
    w, rng = model.parts.weights[f"{model.parts.output_name}.weight"], np.random.default_rng(0)
    n_vocab, k = w.shape
    h = leaf(rng.standard_normal((n, k), np.float32))
    targets = leaf(rng.integers(0, n_vocab, n).astype(np.int32))
    loss = linear_cross_entropy(h, w, targets, leaf(np.full(n, 1 / n, np.float32)))
    program = bind(schedule(Graph.of(loss, loss.saved[1]), Devices((model.backend,))))
    compute, taken = model.backend.compute, [float("inf")] * 2
    clock = thread_time if threads.most() == 1 else perf_counter
    for turn in range(rounds + 1):
        for i, call in enumerate((program, limit(compute))):
            began = clock()
            call()
            taken[i] = min(taken[i], clock() - began) if turn else taken[i]  # the first compiles
    rate, most = 4 * n * n_vocab * k / taken[0], limit_flop(compute) / taken[1]
    return {
        "benchmark": "loss", "tokens": n, "compute": compute, "weights": w.dtype.name,
        "ms": round(1e3 * taken[0], 1), "gflops": round(rate / 1e9), "share": round(rate / most, 3),
        "threads": threads.most(), **about("pyggml", "numba"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--compute", choices=COMPUTE_TYPES, default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = pyggml.load(options.model, compute=options.compute)
    for n in options.tokens.split(","):
        print(json.dumps(measure(model, int(n), options.rounds)))


if __name__ == "__main__":
    main()
