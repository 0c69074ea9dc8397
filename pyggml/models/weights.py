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

    linear: a matrix that is used through Net.linear alone, so that adapters can update it, or one
    matrix for each expert, used through Net.by_expert.
    table: rows that are picked through Net.rows alone, which adapters can update too.
    usual: adapters update it if nobody says what they should.
    unpacked: copied as F32 like a vector, as it is small and no matrix product uses it.
    """

    shape: Shape
    optional: bool = False
    linear: bool = False
    table: bool = False
    usual: bool = True
    unpacked: bool = False

    def update(self, rank: int) -> tuple[Shape, Shape] | None:
        """The shapes of A and B in an adapter file, None for what no adapter can update.

        For rows of n numbers, llama.cpp wants A (n_rows, rank) and B (n, rank).
        """
        if not (self.linear or self.table):
            return None
        *experts, n_out, n_in = self.shape
        if self.table:
            return (n_out, rank), (n_in, rank)
        return (*experts, rank, n_in), (*experts, n_out, rank)


# Full name in the file, such as "blk.0.attn_q.weight" -> what it must be.
Tensors = Mapping[str, TensorSpec]


def matrix(
    name: str, n_out: int, n_in: int, bias: bool | None = None, usual: bool = True
) -> Tensors:
    """A matrix for Net.linear, and the bias that it has, has not or (None) may have."""
    found = {f"{name}.weight": TensorSpec((n_out, n_in), linear=True, usual=usual)}
    if bias is not False:
        found[f"{name}.bias"] = TensorSpec((n_out,), optional=bias is None)
    return found


def matrices(name: str, n_expert: int, n_out: int, n_in: int, bias: bool = False) -> Tensors:
    """One matrix for each expert, for Net.by_expert, and their biases if they have any; updates of
    so many are large, so not usual."""
    found = {f"{name}.weight": TensorSpec((n_expert, n_out, n_in), linear=True, usual=False)}
    if bias:
        found[f"{name}.bias"] = TensorSpec((n_expert, n_out), unpacked=True)
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
    Axes of one element in front do not count, as in ggml.

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
        elif _without_ones(info.shape) != _without_ones(spec.shape):
            faults.append(f"{name} has shape {info.shape}, wanted {spec.shape}")
        elif info.dtype.name not in QUANTS:
            faults.append(f"{name} has type {info.dtype}, known are {', '.join(QUANTS)}")
        else:
            weights[name] = _leaf(file, name, spec)
    if faults:
        shown = "; ".join(faults[:20]) + (f"; and {len(faults) - 20} more" * (len(faults) > 20))
        raise ModelError(f"{file.path}: {shown}")
    return weights


def _without_ones(shape: Shape) -> Shape:
    """A shape from its first axis on that has more than one element."""
    return shape[next((i for i, n in enumerate(shape) if n != 1), len(shape)) :]


def _leaf(file: GGUFFile, name: str, spec: TensorSpec) -> Tensor:
    info, data = file.tensors[name], file.data(name)
    if min(len(info.shape), len(spec.shape)) > 1 and not spec.unpacked:
        return leaf(data.reshape(*spec.shape[:-1], -1), name, info.dtype)
    if spec.unpacked or info.dtype in (F32, F16, BF16):
        values = np.array(dequantize(data, info.dtype.name), np.float32)
        return leaf(values.reshape(spec.shape), name)
    raise ModelError(f"{file.path}: the vector {name} has type {info.dtype}, wanted a float type")
