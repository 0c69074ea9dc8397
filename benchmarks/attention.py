"""Attention, forward and backward, against the microkernels' limits.

usage: attention.py [--tokens 512,2048] [--heads 16] [--key-heads 8] [--head-size 128]
                    [--compute int8,f32] [--rounds 9]

One causal sequence, as a layer of a training step has it, which rounds to bfloat16 where the CPU
multiplies pairs of them. FLOP are those of the keys that are seen:
two products forward, five backward. The limit is the float microkernel's rate of the compute type
(gemm.py), taken in turn with both passes; the least time of all rounds counts, the processor's own
time with one thread (NUMBA_NUM_THREADS=1), when other programs run. Prints a JSON line for each.
"""

import argparse
import json
from time import perf_counter, thread_time

import numpy as np
from gemm import limit, limit_flop

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.graph.call import Call
from pyggml.graph.dtypes import F32
from pyggml.kernels.attention import (
    AttentionProblem,
    Backward,
    Forward,
    backward_path,
    forward_path,
)
from pyggml.kernels.gemm import FLOATS
from pyggml.kernels.kernel import Compute

from machine import about


def _numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    memory = CPU().alloc(4 * int(np.prod(shape))).view(np.float32).reshape(shape)
    memory[...] = rng.standard_normal(shape)
    return memory


def calls(n: int, options: argparse.Namespace, compute: Compute) -> tuple[Call, Call]:
    """Both passes of n queries."""
    rng, heads, keys, d = (
        np.random.default_rng(0),
        options.heads,
        options.key_heads,
        options.head_size,
    )
    sizes = n, heads, n, keys, d, d
    problem = AttentionProblem(*sizes, F32, F32, has_extras=False, compute=compute, may_round=True)
    positions = np.arange(n, dtype=np.int32)
    nothing = np.float32(0)
    of_queries, of_keys = (n, heads, d), (n, keys, d)
    arrays = {
        "q": _numbers(rng, *of_queries), "k": _numbers(rng, *of_keys), "v": _numbers(rng, *of_keys),
        "span": np.stack([np.zeros_like(positions), positions + 1], axis=1),
        "scale": np.float32(d**-0.5), "cap": nothing, "mask": np.zeros((1, 1, 0), np.float32),
        "sinks": np.full(heads, -np.inf, np.float32), "slopes": np.zeros(heads, np.float32),
        "o": _numbers(rng, *of_queries), "lse": _numbers(rng, heads, n),
    }  # fmt: skip
    back = Backward(
        **arrays, do=_numbers(rng, *of_queries), dq=_numbers(rng, *of_queries),
        dk=_numbers(rng, *of_keys), dv=_numbers(rng, *of_keys), dsinks=np.zeros(0, np.float32),
    )  # fmt: skip
    forward, backward = forward_path(problem), backward_path(problem)
    memory = (CPU().alloc(path.n_bytes(problem)) for path in (forward, backward))
    return (
        forward.call(problem, Forward(**arrays), next(memory)),
        backward.call(problem, back, next(memory)),
    )


def measure(n: int, options: argparse.Namespace, compute: Compute) -> dict[str, object]:
    """Rates of both passes and their shares of the limit."""
    kind = "f32" if compute == "f32" else FLOATS
    everything = *calls(n, options, compute), limit(kind)
    clock = thread_time if threads.most() == 1 else perf_counter
    taken = [float("inf")] * 3
    for turn in range(options.rounds + 1):
        for i, call in enumerate(everything):
            began = clock()
            call()
            taken[i] = min(taken[i], clock() - began) if turn else taken[i]  # the first compiles
    product = options.heads * n * (n + 1) * options.head_size  # FLOP
    rates = [2 * product / taken[0], 5 * product / taken[1], limit_flop(kind) / taken[2]]
    result: dict[str, object] = {"benchmark": "attention", "tokens": n, "compute": compute}
    for name, seconds, rate in zip(("forward", "backward"), taken, rates, strict=False):
        result |= {f"{name}_ms": round(1e3 * seconds, 2), f"{name}_gflops": round(rate / 1e9, 1)}
        result[f"{name}_share"] = round(rate / rates[2], 3)
    return result | {"limit_gflops": round(rates[2] / 1e9, 1), "threads": threads.most()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--compute", default="int8,f32")
    for name, value in (("heads", 16), ("key-heads", 8), ("head-size", 128), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    for compute in options.compute.split(","):
        for n in options.tokens.split(","):
            print(json.dumps(measure(int(n), options, compute) | about("pyggml", "numba")))


if __name__ == "__main__":
    main()
