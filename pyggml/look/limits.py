"""How near a run is to what a machine can do: its limits, measured once, and a token's time there.

multiply   operations a second of products of many tokens with a packed matrix that caches hold: two
           for each weight and token
read       bytes a second that all threads read from memory

A token takes at least the time of the base's matrices, each once; of experts, of those that it has:
in training 4 operations a weight, forward and backward, in generation its bytes. Attention, caches,
adapters and what is computed again do not count, so no run reaches its limit.

Limits are kept beside the kernels, by CPU and threads; other kernels are measured anew.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import isfinite, prod
from pathlib import Path
from time import perf_counter

import numpy as np

from pyggml import threads
from pyggml.backends.cpu import CPU
from pyggml.errors import PyggmlError
from pyggml.files import read_bytes, replacing
from pyggml.graph.dtypes import DType, dtype
from pyggml.graph.tensor import Tensor
from pyggml.jit import CACHE
from pyggml.jit.isa import cpu_name
from pyggml.kernels import gemm
from pyggml.kernels.kernel import Compute
from pyggml.model import Model

FILE = "limits.json"
_PACKED = "Q8_0"  # stands for all types with blocks
_ROWS, _SIDE = 512, 1024  # of x, and of the matrix
_BYTES = 1 << 28  # more than caches hold
_SECONDS, _MOST_BYTES = 0.3, 1 << 16  # of a measurement; of the file
_LIMITS: dict[str, float] = {}  # that this process has asked for


def training_seconds(model: Model, anew: bool = False) -> float | None:
    """The least seconds of one token of training on the host; None for a model on a device. anew:
    by a limit that is measured again."""
    if model.devices.have_copies:
        return None
    uses = [*_uses(model)]
    largest = max((w for w, _ in uses), key=lambda w: w.n_bytes).dtype
    rate = multiply_limit(largest, model.backend.compute, anew)
    return 4 * sum(part * w.n_elements for w, part in uses) / rate


def generation_seconds(model: Model, anew: bool = False) -> float | None:
    """The same of one token of generation."""
    if model.devices.have_copies:
        return None
    return sum(part * w.n_bytes for w, part in _uses(model)) / read_limit(anew)


def share_of_limit(
    least: Callable[[bool], float | None], n_tokens: int, seconds: float
) -> float | None:
    """n_tokens' least seconds of these seconds; None where the least is unknown.

    A share above 1 shows that the limit was measured while others used the machine: it is measured
    again, by least(True).
    """
    for anew in (False, True):
        each = least(anew)
        if each is None or n_tokens * each <= seconds:
            break
    return None if each is None else min(n_tokens * each / seconds, 1.0)


def _uses(model: Model) -> Iterator[tuple[Tensor, float]]:
    """The matrices that a token is multiplied with, and how much of each: of experts a part."""
    output = f"{model.parts.output_name}.weight"
    used = model.file.get(f"{model.config.architecture}.expert_used_count")
    for name, spec in model.parts.decoder.tensors().items():
        if name in model.parts.weights and (spec.linear or name == output):
            n_expert = prod(spec.shape[:-2])
            part = used / n_expert if n_expert > 1 and isinstance(used, int) else 1.0
            yield model.parts.weights[name], min(part, 1.0)


# -- limits ---------------------------------------------------------------------------------------


def multiply_limit(weight: DType, compute: Compute, anew: bool = False) -> float:
    """Operations a second with such weights. anew: measured again, and the better one kept."""
    kind = dtype(_PACKED) if weight.quantised else weight
    return _limit(f"multiply {kind} {compute}", lambda: _measure_products(kind, compute), anew)


def read_limit(anew: bool = False) -> float:
    """Bytes a second."""
    return _limit("read", _measure_reads, anew)


def _limit(what: str, measure: Callable[[], float], anew: bool) -> float:
    name = f"{what}, {cpu_name()} of {os.cpu_count()}, threads {threads.get()}"
    if name in _LIMITS and not anew:
        return _LIMITS[name]
    kept = _read() | _LIMITS
    if name not in kept or anew:
        kept[name] = max(measure(), kept.get(name, 0.0))
        with suppress(PyggmlError):  # a full disk, say: the next process measures again
            if CACHE is not None:
                with replacing(Path(CACHE) / FILE, durable=False) as file:
                    file.write(json.dumps(kept, indent=1).encode())
    _LIMITS[name] = kept[name]
    return kept[name]


def _read() -> dict[str, float]:
    """What the file has; of one that is none of ours, nothing."""
    try:
        table = json.loads(read_bytes(Path(CACHE) / FILE, _MOST_BYTES)) if CACHE else {}
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = table.items() if isinstance(table, dict) else ()
    return {k: v for k, v in pairs if isinstance(v, float) and isfinite(v) and v > 0}


def _measure_products(kind: DType, compute: Compute) -> float:
    p = gemm.Problem("mul_mat", _ROWS, _SIDE, _SIDE, kind, compute)
    raw = np.zeros((_SIDE, kind.row_bytes(_SIDE)), np.uint8).view(kind.numpy)
    x = np.random.default_rng(0).standard_normal((_ROWS, _SIDE), np.float32)
    y, scratch = np.empty((_ROWS, _SIDE), np.float32), CPU().alloc(gemm.scratch_bytes(p))
    run = gemm.mul_mat(y, x, gemm.Weight(raw, kind, compute), scratch, accumulate=False)
    run()  # compiles, if it is the first
    return 2 * _ROWS * _SIDE * _SIDE / _best_seconds(run)


def _measure_reads() -> float:
    parts = np.array_split(np.ones(_BYTES // 8, np.int64), threads.get())
    with ThreadPoolExecutor(len(parts)) as pool:
        return _BYTES / _best_seconds(lambda: sum(pool.map(np.max, parts)))


def _best_seconds(run: Callable[[], object]) -> float:
    """Of several runs, that of the fastest: others may use the machine."""
    end, best = perf_counter() + _SECONDS, float("inf")
    while perf_counter() < end:
        began = perf_counter()
        run()
        best = min(best, perf_counter() - began)
    return best
