"""A tensor of the file: its numbers in a histogram, and its update by a run's adapter.

A histogram is of a sample, blocks evenly spread over the tensor, so that none takes long.
"""

from pathlib import Path
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.cli.commands.view.queries import brief
from pyggml.cli.web.errors import ApiError
from pyggml.errors import GGUFError, PyggmlError
from pyggml.graph.dtypes import DType
from pyggml.quants import dequantize

_SAMPLED = 1 << 18  # weights
_BARS = 60
_MOST_BYTES = 1 << 28  # of A or B
_ALPHA = "adapter.lora.alpha"


def describe(file: gguf.GGUFFile, name: str) -> dict[str, Any]:
    """Shape, type, bytes and numbers of a tensor. Raises ApiError if there is none."""
    info = file.tensors.get(name)
    if info is None:
        raise ApiError(404, f"the file has no tensor {brief(name)}", "name")
    n = int(np.prod(info.shape, dtype=object))
    about: dict[str, Any] = {
        "name": name,
        "type": info.dtype.name,
        "shape": list(info.shape),
        "n": n,
        "bytes": info.n_bytes,
        "bits": 8 * info.n_bytes / max(n, 1),
    }
    try:
        return about | {"numbers": numbers(sample(file.data(name), info.dtype))}
    except PyggmlError as error:  # a type that nothing unpacks
        return about | {"fault": error.message(str)}


def sample(data: np.ndarray, dtype: DType) -> np.ndarray:
    """Some weights of a tensor, as float32 (n,): all of a small one, else blocks evenly spread."""
    blocks = data.reshape(-1, dtype.block_bytes) if data.dtype == np.uint8 else data.reshape(-1, 1)
    most = max(_SAMPLED // dtype.block, 1)
    if len(blocks) > most:
        blocks = blocks[np.linspace(0, len(blocks) - 1, most).astype(np.int64)]
    return dequantize(blocks, dtype.name).reshape(-1)


def numbers(values: np.ndarray) -> dict[str, Any]:
    """What a sample (n,) float32 is like: moments, extremes, and counts between them."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return {"sampled": values.size, "finite": 0}
    low, high = float(finite.min()), float(finite.max())
    counts, edges = np.histogram(finite, _BARS, (low, high if high > low else low + 1))
    return {
        "sampled": values.size,
        "finite": finite.size,
        "mean": float(finite.mean()),
        "std": float(finite.std()),
        "min": low,
        "max": high,
        "zeros": float(np.mean(finite == 0)),
        "counts": counts.tolist(),
        "edges": [float(edges[0]), float(edges[-1])],
    }


def update(adapter: Path, file: gguf.GGUFFile, name: str) -> dict[str, Any] | None:
    """A and B of a tensor of the file in an adapter, and the length of their product, if it is a
    matrix; None without an update. Raises GGUFError for an adapter that cannot be read."""
    pair = _pair(adapter, name)
    if pair is None:
        return None
    a, b, alpha = pair
    about: dict[str, Any] = {
        x: {"shape": list(t.shape), "norm": _norm(t), "numbers": numbers(t.reshape(-1))}
        for x, t in (("a", a), ("b", b))
    }
    if a.ndim == b.ndim == 2 and a.shape[0] == b.shape[1] and isinstance(alpha, float):
        info = file.tensors[name]
        weights = sample(file.data(name), info.dtype).astype(np.float64)
        n = int(np.prod(info.shape, dtype=object))
        about["alpha"] = alpha
        about["change"] = alpha / len(a) * _norm_of_product(b, a)
        about["weight"] = float(np.sqrt(np.mean(weights**2) * n))
    return about


def _pair(adapter: Path, name: str) -> tuple[np.ndarray, np.ndarray, Any] | None:
    """A, B and alpha."""
    with gguf.open(adapter) as file:
        if not {f"{name}.lora_a", f"{name}.lora_b"} <= file.tensors.keys():
            return None
        a, b = (_whole(file, f"{name}.lora_{x}") for x in "ab")
        return a, b, file.get(_ALPHA)


def _whole(file: gguf.GGUFFile, name: str) -> np.ndarray:
    info = file.tensors[name]
    if info.n_bytes > _MOST_BYTES:
        raise GGUFError(f"{file.path}: {name} has {info.n_bytes:,} bytes, which is no update")
    return dequantize(file.data(name), info.dtype.name)


def _norm(a: np.ndarray) -> float:
    return float(np.linalg.norm(a.reshape(-1).astype(np.float64)))


def _norm_of_product(b: np.ndarray, a: np.ndarray) -> float:
    """‖B·A‖ = √tr(BᵀB · AAᵀ), without the product."""
    b, a = b.astype(np.float64), a.astype(np.float64)
    return float(np.sqrt(max(np.sum((b.T @ b) * (a @ a.T)), 0.0)))
