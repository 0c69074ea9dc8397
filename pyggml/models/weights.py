"""A file's tensors as leaves of a graph, checked against the shapes that the config asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from pyggml.dtypes import BF16, F16, F32
from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile
from pyggml.quants import QUANTS, dequantize
from pyggml.tensor import Shape, Tensor, leaf

Weights = Mapping[str, Tensor]


def read_weights(file: GGUFFile, shapes: Mapping[str, Shape], optional: Iterable[str]) -> Weights:
    """Leaves for the tensors named in `shapes`; matrices stay mapped, vectors are copied as F32.

    Names in `optional` may be absent. Raises ModelError with every missing tensor, wrong shape and
    type that cannot be unpacked.
    """
    faults, weights, may_lack = [], {}, set(optional)
    for name, shape in shapes.items():
        info = file.tensors.get(name)
        if info is None:
            if name not in may_lack:
                faults.append(f"{name} is missing")
        elif info.shape != shape:
            faults.append(f"{name} has shape {info.shape}, wanted {shape}")
        elif info.dtype.name not in QUANTS:
            faults.append(f"{name} has type {info.dtype}, known are {', '.join(QUANTS)}")
        else:
            weights[name] = _leaf(file, name)
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" * (len(faults) > 20))
        raise ModelError(f"{file.path}: {shown}")
    return weights


def _leaf(file: GGUFFile, name: str) -> Tensor:
    info, data = file.tensors[name], file.data(name)
    if len(info.shape) > 1:
        return leaf(data, name, info.dtype)
    if info.dtype in (F32, F16, BF16):
        return leaf(np.array(dequantize(data, info.dtype.name), np.float32), name)
    raise ModelError(f"{file.path}: the vector {name} has type {info.dtype}, wanted a float type")
