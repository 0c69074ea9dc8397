"""How near a run is to what a machine can do: its limits, measured once, and a token's time there.

multiply   operations a second of a product of many tokens with a packed matrix: two for each
           weight and token
read       bytes a second that all threads of the host read from memory; on a device, that a
           product of one token reads of a matrix that no cache holds

A token takes at least the time of the base's matrices, each once; of experts, of those that it has:
in training 4 operations a weight, forward and backward, in generation its bytes. Attention, caches,
adapters and what is computed again do not count, so no run reaches its limit.

Limits are those of the device that computes first, and are kept beside the kernels: the CPU's by
its threads, a card's by its name. Other kernels are measured anew.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import isfinite, prod
from pathlib import Path
from time import perf_counter

import numpy as np

from pyggml import ops, threads
from pyggml.backends import Backend
from pyggml.errors import PyggmlError
from pyggml.files import replacing
from pyggml.files.json_text import read_object
from pyggml.graph import Graph
from pyggml.graph.dtypes import F32, DType, dtype
from pyggml.graph.tensor import Tensor, leaf
from pyggml.jit import CACHE
from pyggml.model import Model
from pyggml.runtime import Devices, bind, schedule

FILE = "limits.json"
_PACKED = "Q8_0"  # stands for all types with blocks
_TOKENS, _SIDE = 512, 1024  # of the host's product
_BYTES = 1 << 28  # of the host's read: more than caches hold
_SIDES = [1 << n for n in range(8, 14)]  # of a device's products, until one takes long enough:
_LONG = 0.005  # seconds
_REPEATS = 4  # of a product before a device is waited for
_SECONDS, _MOST_BYTES = 0.3, 1 << 16  # of a measurement; of the file
_LIMITS: dict[str, float] = {}  # that this process has asked for


def training_seconds(model: Model, anew: bool = False) -> float | None:
    """The least seconds of one token of training; None where no limit can be measured. anew: by a
    limit that is measured again."""
    uses = [*matrix_uses(model)]
    largest = max((w for w, _ in uses), key=lambda w: w.n_bytes).dtype
    rate = multiply_limit(model.devices, largest, anew)
    return None if rate is None else 4 * sum(part * w.n_elements for w, part in uses) / rate


def generation_seconds(model: Model, anew: bool = False) -> float | None:
    """The same of one token of generation."""
    rate = read_limit(model.devices, anew)
    return None if rate is None else sum(part * w.n_bytes for w, part in matrix_uses(model)) / rate


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


def matrix_uses(model: Model) -> Iterator[tuple[Tensor, float]]:
    """The matrices that a token is multiplied with, and how much of each: of experts a part."""
    output = f"{model.parts.output_name}.weight"
    used = model.file.get(f"{model.config.architecture}.expert_used_count")
    for name, spec in model.parts.decoder.tensors().items():
        if name in model.parts.weights and (spec.linear or name == output):
            n_expert = prod(spec.shape[:-2])
            part = used / n_expert if n_expert > 1 and isinstance(used, int) else 1.0
            yield model.parts.weights[name], min(part, 1.0)


# -- limits ---------------------------------------------------------------------------------------


def multiply_limit(devices: Devices, weight: DType, anew: bool = False) -> float | None:
    """Operations a second with such weights on the first device; None if it has no room or fails.
    anew: measured again, and the better one kept."""
    kind = dtype(_PACKED) if weight.quantised else weight
    return _limit(devices, f"multiply {kind}", lambda: _measure_products(devices, kind), anew)


def read_limit(devices: Devices, anew: bool = False) -> float | None:
    """Bytes a second, in the same way."""
    return _limit(devices, "read", lambda: _measure_reads(devices), anew)


def _limit(devices: Devices, what: str, measure: Callable[[], float], anew: bool) -> float | None:
    name = f"{what}, {_first(devices).about}"
    if name in _LIMITS and not anew:
        return _LIMITS[name]
    kept = _read() | _LIMITS
    if name not in kept or anew:
        with suppress(PyggmlError):  # a card that is full, say
            kept[name] = max(measure(), kept.get(name, 0.0))
        with suppress(PyggmlError):  # a full disk, say: the next process measures again
            if CACHE is not None:
                with replacing(Path(CACHE) / FILE, durable=False) as file:
                    file.write(json.dumps(kept, indent=1).encode())
    if name not in kept:
        return None
    _LIMITS[name] = kept[name]
    return kept[name]


def _first(devices: Devices) -> Backend:
    return devices.backends[0]


def _read() -> dict[str, float]:
    """What the file has; of one that is none of ours, nothing."""
    table = read_object(Path(CACHE) / FILE, _MOST_BYTES) if CACHE else {}
    return {k: v for k, v in table.items() if isinstance(v, float) and isfinite(v) and v > 0}


def _measure_products(devices: Devices, kind: DType) -> float:
    if _first(devices).is_host:
        return 2 * _TOKENS * _SIDE**2 / _product_seconds(devices, kind, _TOKENS, _SIDE)
    return max(2 * side * side**2 / s for side, s in _growing(devices, kind, None))


def _measure_reads(devices: Devices) -> float:
    if not _first(devices).is_host:
        *_, (side, seconds) = _growing(devices, F32, 1)  # smaller ones lie in its cache
        return F32.block_bytes * side**2 / seconds
    parts = np.array_split(np.ones(_BYTES // 8, np.int64), threads.get())
    with ThreadPoolExecutor(len(parts)) as pool:
        return _BYTES / _best_seconds(lambda: sum(pool.map(np.max, parts)))


def _growing(devices: Devices, kind: DType, n_tokens: int | None) -> Iterator[tuple[int, float]]:
    """(side of the matrix, seconds) of products, each larger; by default as many tokens as rows."""
    for side in _SIDES if n_tokens else _SIDES[:-1]:  # the largest would take a GB of its memory
        seconds = _product_seconds(devices, kind, n_tokens or side, side)
        yield side, seconds
        if seconds > _LONG:
            return


def _product_seconds(devices: Devices, kind: DType, n_tokens: int, side: int) -> float:
    """Of one product of a matrix (side, side) with n_tokens rows; of several runs the fastest."""
    raw = np.full((side, kind.row_bytes(side)), 0, np.uint8).view(kind.numpy)  # every page is there
    w, x = leaf(raw, "w", kind), leaf(np.ones((n_tokens, side), np.float32), "x")
    y = ops.mul_mat(w, x)
    one = ops.view(y, (1,), (F32.block_bytes,))  # of the result: that a device is done is seen
    devices.hold(w, x)
    try:
        program = bind(schedule(Graph.of(one), devices))

        def run() -> None:
            for _ in range(_REPEATS):
                program()
            program.read(one)

        run()  # compiles, if it is the first
        run()  # records, on a card
        return _best_seconds(run) / _REPEATS
    finally:
        devices.drop(w, x)


def _best_seconds(run: Callable[[], object]) -> float:
    """Of several runs, that of the fastest: others may use the machine. One at least."""
    end, best = perf_counter() + _SECONDS, float("inf")
    while True:
        began = perf_counter()
        run()
        ended = perf_counter()
        best = min(best, ended - began)
        if ended >= end:
            return best
