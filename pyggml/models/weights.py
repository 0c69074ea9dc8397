"""A file's tensors as leaves of a graph, checked against the decoder's list of tensors."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from pyggml.errors import ModelError, first_names, first_of
from pyggml.gguf import GGUFFile
from pyggml.graph.arrays import array
from pyggml.graph.dtypes import BF16, F16, F32
from pyggml.graph.tensor import Shape, Tensor, leaf
from pyggml.quants import QUANTS, dequantize

Weights = Mapping[str, Tensor]
# Beside a matrix NAME.weight of NVFP4: its factor, and that of its inputs, if these are packed too.
SCALE, INPUT_SCALE = ".scale", ".input_scale"
_PIECE = 1 << 20  # bytes
# Two matrices as one, as some converters wrote and write them.
_FUSED = {
    "ssm_in.weight": "attn_qkv and attn_gate",
    "ffn_gate_up_exps.weight": "ffn_gate_exps and ffn_up_exps",
    "ssm_beta_alpha.weight": "ssm_beta and ssm_alpha",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a model file.

    optional   the file may lack it
    linear     a matrix, or one matrix for each expert; used only through Net.linear or
               Net.by_expert, so that adapters can update it
    table      a table of rows, used only through Net.rows, so that adapters can update it
    usual      adapters update it by default
    applied    llama.cpp applies an adapter's update of it; else the update counts there once it is
               merged into the model
    unpacked   copied as F32, as vectors are: it is small and no operand of a matrix product
    """

    shape: Shape
    optional: bool = False
    linear: bool = False
    table: bool = False
    usual: bool = True
    applied: bool = True
    unpacked: bool = False

    def update(self, rank: int) -> tuple[Shape, Shape] | None:
        """The shapes of A and B in an adapter file; None if adapters cannot update the tensor.

        A table of n_rows rows of n numbers has A (n_rows, rank) and B (n, rank), as in llama.cpp.
        """
        if not (self.linear or self.table):
            return None
        *experts, n_out, n_in = self.shape
        if self.table:
            return (n_out, rank), (n_in, rank)
        return (*experts, rank, n_in), (*experts, n_out, rank)


# Full name in the file, such as "blk.0.attn_q.weight" -> its declaration.
Tensors = Mapping[str, TensorSpec]


def matrix(
    name: str, n_out: int, n_in: int, bias: bool | None = None, usual: bool = True
) -> Tensors:
    """A matrix for Net.linear and its bias. bias: whether it has one; None if it may have one."""
    tensors = {f"{name}.weight": TensorSpec((n_out, n_in), linear=True, usual=usual)}
    if bias is not False:
        tensors[f"{name}.bias"] = TensorSpec((n_out,), optional=bias is None)
    return tensors


def matrices(name: str, n_expert: int, n_out: int, n_in: int, bias: bool = False) -> Tensors:
    """One matrix for each expert, for Net.by_expert, and their biases if they have any.

    Adapters do not update them by default: updates of so many matrices are large.
    """
    tensors = {f"{name}.weight": TensorSpec((n_expert, n_out, n_in), linear=True, usual=False)}
    if bias:
        tensors[f"{name}.bias"] = TensorSpec((n_expert, n_out), unpacked=True)
    return tensors


def latent_matrix(name: str, *shape: int) -> Tensors:
    """A matrix, or one of each head, whose updates by an adapter llama.cpp passes over."""
    return {f"{name}.weight": TensorSpec(shape, linear=True, usual=False, applied=False)}


def merge_tensors(tensors: Iterable[Tensors]) -> Tensors:
    """Several lists as one; a tensor that parts share is listed once."""
    merged: dict[str, TensorSpec] = {}
    for part in tensors:
        merged |= part
    return merged


def read_weights(
    file: GGUFFile, tensors: Tensors, is_unread: Callable[[str], bool] = lambda name: False
) -> Weights:
    """Leaves for a decoder's tensors. Matrices stay memory-mapped, vectors are copied as F32.

    is_unread(name): whether the file may hold a tensor that the decoder does not use.
    Leading axes of one element are ignored in the comparison of shapes, as in ggml.

    Raises ModelError with every tensor that is missing, of a wrong shape, of an unknown type, or
    unused: without it, the logits would not be the model's.
    """
    scales = _scales(file, tensors)
    passed = {name.removesuffix(SCALE) + INPUT_SCALE for name in scales}
    unused = [n for n in file.tensors if not (n in tensors or n in scales or is_unread(n))]
    faults = [_unused_fault(n) for n in unused if n not in passed]
    weights = {name: _leaf(file, name, spec) for name, spec in scales.items()}
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
        raise ModelError(f"{file.path}: {first_of(faults, 20)}")
    return weights


def factor_of(weights: Weights, full: str) -> Tensor | None:
    """What a file has beside the matrix `full`, to multiply what it gives: a factor of all, or of
    each expert. None if there is none; a scale of another shape is a part's own."""
    factor = weights.get(full.removesuffix(".weight") + SCALE)
    shape = weights[full].shape[:-2] or (1,)
    return factor if factor is not None and factor.shape == shape else None


FRESH = "pyggml.fresh"  # key of a file of first numbers: the seed. There matrices may well be 0


def zero_matrices(weights: Weights) -> list[str]:
    """Names of the matrices whose bytes are all 0, as a download leaves them that was broken off.
    Of others the first bytes alone are read."""
    return [name for name, w in weights.items() if len(w.shape) > 1 and is_zero(array(w))]


def warn_of_zeros(file: GGUFFile, weights: Weights) -> None:
    """A RuntimeWarning, for the caller's caller, that names such matrices of a file, unless it says
    that its numbers are fresh."""
    if file.get(FRESH) is None and (zeros := zero_matrices(weights)):
        warnings.warn(
            f"{file.path}: all of {first_names(zeros)} is 0, as where a download broke off",
            RuntimeWarning,
            stacklevel=3,
        )


def is_zero(raw: np.ndarray) -> bool:
    """Whether all bytes of a tensor are 0."""
    data = raw.reshape(-1).view(np.uint8)
    if data[:64].any():
        return False
    return not any(data[at : at + _PIECE].any() for at in range(0, data.size, _PIECE))


def _scales(file: GGUFFile, tensors: Tensors) -> Tensors:
    """The factors beside matrices that a file has: one of a matrix, or one of each expert."""
    scales = {}
    for name, spec in tensors.items():
        scale = name.removesuffix(".weight") + SCALE
        if spec.linear and scale in file.tensors:
            shape = spec.shape[:-2] or (1,)
            if file.tensors[scale].shape == shape:
                scales[scale] = TensorSpec(shape, unpacked=True)
    return scales


def _unused_fault(name: str) -> str:
    part = name.split(".", 2)[-1]
    if part in _FUSED:
        return (
            f"{name} holds {_FUSED[part]} in one, a form that is not read: convert the checkpoint "
            "anew"
        )
    return f"{name} is not used by this architecture"


def _without_ones(shape: Shape) -> Shape:
    """A shape without its leading axes of one element."""
    return shape[next((i for i, n in enumerate(shape) if n != 1), len(shape)) :]


def _leaf(file: GGUFFile, name: str, spec: TensorSpec) -> Tensor:
    info, data = file.tensors[name], file.data(name)
    if min(len(info.shape), len(spec.shape)) > 1 and not spec.unpacked:
        return leaf(data.reshape(*spec.shape[:-1], -1), name, info.dtype)
    if spec.unpacked or info.dtype in (F32, F16, BF16):
        values = np.array(dequantize(data, info.dtype.name), np.float32)
        return leaf(values.reshape(spec.shape), name)
    raise ModelError(f"{file.path}: the vector {name} has type {info.dtype}, wanted a float type")
