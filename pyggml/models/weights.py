"""A file's tensors as leaves of a graph, checked against the shapes that the config asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.dtypes import BF16, F16, F32
from pyggml.errors import ModelError
from pyggml.gguf import GGUFFile
from pyggml.quants import QUANTS, dequantize
from pyggml.tensor import Shape, Tensor, leaf

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a file must hold, or may if it is optional.

    linear: a matrix that is used through Net.linear alone, so that adapters can update it.
    unpacked: copied as F32 like a vector, as it is small and no matrix product uses it.
    """

    shape: Shape
    optional: bool = False
    linear: bool = False
    unpacked: bool = False


# Full name in the file, such as "blk.0.attn_q.weight" -> what it must be.
Tensors = Mapping[str, TensorSpec]


def matrix(name: str, n_out: int, n_in: int, bias: bool | None = None) -> Tensors:
    """A matrix for Net.linear, and the bias that it has, has not or (None) may have."""
    found = {f"{name}.weight": TensorSpec((n_out, n_in), linear=True)}
    if bias is not False:
        found[f"{name}.bias"] = TensorSpec((n_out,), optional=bias is None)
    return found


def merged(tensors: Iterable[Tensors]) -> Tensors:
    """All of them; what several parts share is named once."""
    found: dict[str, TensorSpec] = {}
    for some in tensors:
        found |= some
    return found


def read_weights(
    file: GGUFFile, tensors: Tensors, is_unread: Callable[[str], bool] = lambda name: False
) -> Weights:
    """Leaves for the tensors a decoder needs; matrices stay mapped, vectors are copied as F32.

    `is_unread` says of other tensors whether the file may hold them all the same.

    Raises ModelError with every missing tensor, wrong shape and type that cannot be unpacked, and
    every tensor that the decoder would not use, as its logits could not be the file's.
    """
    unused = (n for n in file.tensors if n not in tensors and not is_unread(n))
    faults = [f"{n} is not used by this architecture" for n in unused]
    weights = {}
    for name, spec in tensors.items():
        info = file.tensors.get(name)
        if info is None:
            if not spec.optional:
                faults.append(f"{name} is missing")
        elif info.shape != spec.shape:
            faults.append(f"{name} has shape {info.shape}, wanted {spec.shape}")
        elif info.dtype.name not in QUANTS:
            faults.append(f"{name} has type {info.dtype}, known are {', '.join(QUANTS)}")
        else:
            weights[name] = _leaf(file, name, spec.unpacked)
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" * (len(faults) > 20))
        raise ModelError(f"{file.path}: {shown}")
    return weights


def _leaf(file: GGUFFile, name: str, unpacked: bool) -> Tensor:
    info, data = file.tensors[name], file.data(name)
    if len(info.shape) > 1 and not unpacked:
        return leaf(data, name, info.dtype)
    if unpacked or info.dtype in (F32, F16, BF16):
        return leaf(np.array(dequantize(data, info.dtype.name), np.float32), name)
    raise ModelError(f"{file.path}: the vector {name} has type {info.dtype}, wanted a float type")
