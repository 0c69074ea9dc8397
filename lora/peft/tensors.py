"""adapter_model.safetensors: the A and B of modules, read and checked, or written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pyggml.errors import AdapterError, cause_of
from pyggml.files.safe_tensors import FLOATS, StoredTensor, stored_tensors
from pyggml.gguf.fields import brief
from pyggml.graph.tensor import Shape

NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTORS = ("lora_A.weight", "lora_B.weight")
_TABLE_FACTORS = ("lora_embedding_A", "lora_embedding_B")
_TENSOR = re.compile(rf"{re.escape(PREFIX)}(.+)\.({'|'.join([*_FACTORS, *_TABLE_FACTORS])})")
_BASE = re.compile(rf"{re.escape(PREFIX)}(.+)\.base_layer\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """A module's tensors, float32: A (rank, n_in) and B (n_out, rank).

    table      they are an embedding's, A (rank, n_rows) and B (n, rank)
    of_shape   of the base's matrix, if that was saved beside them, as PEFT does for a vocabulary's
    """

    table: bool
    a: np.ndarray
    b: np.ndarray
    of_shape: Shape | None


def read(folder: Path, most_bytes: int) -> dict[str, ModuleFactors]:
    """Module → its A and B. AdapterError for a file that is larger than `most_bytes`, damaged, or
    holds anything else."""
    path = folder / NAME
    tensors = _stored_tensors(path, most_bytes)
    faults: list[str] = []
    modules: dict[tuple[str, bool], dict[str, np.ndarray]] = {}
    bases: dict[str, Shape] = {}
    for name, info in tensors.items():
        match, base = _TENSOR.fullmatch(name), _BASE.fullmatch(name)
        if base is not None:
            bases |= {base[1]: info.shape} if base[2] == "weight" else {}
        elif match is None:
            faults.append(f"{brief(name)} is {_what(name)}")
        elif info.dtype not in FLOATS or len(info.shape) != 2:
            demand = f"wanted a matrix of {', '.join(FLOATS)}"
            faults.append(f"{brief(name)} is {info.dtype} {info.shape}, {demand}")
        else:
            table, factor = match[2] in _TABLE_FACTORS, match[2].removesuffix(".weight")[-1]
            modules.setdefault((match[1], table), {})[factor] = info.floats()
    for (module, _), factors in modules.items():
        faults += [f"{brief(module)} has no {factor}" for factor in "AB" if factor not in factors]
    if not tensors:
        faults.append("there are no tensors, wanted an A and a B of at least one module")
    if faults:
        raise AdapterError(faults[:10], f"{path}: ")
    return {
        m: ModuleFactors(table, h["A"], h["B"], bases.get(m)) for (m, table), h in modules.items()
    }


def _stored_tensors(path: Path, most_bytes: int) -> dict[str, StoredTensor]:
    try:
        n_bytes = path.stat().st_size
        if n_bytes > most_bytes:
            raise AdapterError(
                f"{path}: has {n_bytes:,} bytes, wanted at most the {most_bytes:,} of the whole "
                "model in float32"
            )
        return stored_tensors(path, most_bytes)
    except OSError as error:
        hint = ""
        if path.with_name("adapter_model.bin").is_file():
            hint = "; adapter_model.bin is not read: save the adapter as safetensors"
        raise AdapterError(f"{path}: cannot be read: {cause_of(error)}{hint}") from None
    except ValueError as error:
        raise AdapterError(f"{path}: is no safetensors file: {error}") from None


def _what(name: str) -> str:
    """What a tensor is that is no factor of an update."""
    if "lora_magnitude_vector" in name:
        return "DoRA's magnitude, for which an adapter file has no place"
    if "lora_" not in name:
        return "a whole tensor, for which an adapter file has no place"
    return f"no A or B of a module, wanted {PREFIX}MODULE.lora_A.weight and the like"


def write(
    path: Path, updates: Mapping[str, tuple[np.ndarray, np.ndarray]], tables: set[str]
) -> None:
    """Module → A and B, float32, in the shapes of `ModuleFactors`; `tables` are embeddings."""
    from safetensors.numpy import save

    arrays = {}
    for module, pair in updates.items():
        factors = _TABLE_FACTORS if module in tables else _FACTORS
        for factor, values in zip(factors, pair, strict=True):
            arrays[f"{PREFIX}{module}.{factor}"] = np.ascontiguousarray(values, np.float32)
    # save_file would raise an error of its own where the disk is full.
    path.write_bytes(save(arrays, {"format": "pt"}))
