"""A GGUF model → the same model in another file type, as from llama.cpp's quantiser; or with other
numbers in some of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from pyggml import gguf
from pyggml.dtypes import F32, DType
from pyggml.errors import ConfigError, ModelError, QuantError
from pyggml.gguf.fields import shown
from pyggml.quants import (
    FILE_TYPES,
    QUANTS,
    ModelFacts,
    dequantize,
    is_packed,
    mix,
    quantize,
)

QUANTISATION_VERSION = 2  # of ggml's block formats


def requantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    file_type: str,
    progress: Callable[[str, DType, DType], None] | None = None,
    allow_requantize: bool = False,
) -> None:
    """Write `target` with the tensor types of `file_type` (Q8_0, Q4_K_M, F16, …).

    A source in several files becomes one file. Vectors, norms and small tables keep their types, as
    in llama.cpp. One tensor is in memory at a time; before each, progress(name, old type, new type)
    is called. A quantised tensor gets another type than F32 only with `allow_requantize`: the two
    losses add up.
    Raises QuantError for that, an unknown file type or data too large for a type, GGUFError for a
    damaged source, ModelError if it is no model, ConfigError if both paths are one file.
    """
    if file_type not in FILE_TYPES:
        raise QuantError(f"{file_type!r} is no file type; known are {', '.join(FILE_TYPES)}")
    with gguf.open(source) as file:
        if Path(target).exists() and any(Path(target).samefile(part) for part in file.paths):
            raise ConfigError(
                f"{target}: is the file to read from; wanted another name to write to"
            )
        wanted = _types(file, file_type)
        if not allow_requantize:
            _check_source(file, wanted)
        metadata = {k: f for k, f in file.metadata.items() if k not in gguf.SPLIT_KEYS}
        metadata["general.file_type"] = gguf.Field.of(FILE_TYPES[file_type].number)
        metadata["general.quantization_version"] = gguf.Field.of(QUANTISATION_VERSION)
        tensors = [
            (
                name,
                wanted[name],
                info.shape,
                partial(_converted, file, name, wanted[name], progress),
            )
            for name, info in file.tensors.items()
        ]
        gguf.write(target, metadata, tensors)


def rewrite(
    file: gguf.GGUFFile,
    target: str | os.PathLike[str],
    changed: Mapping[str, Callable[[], np.ndarray]],
) -> None:
    """Write the same model with other numbers in some tensors, each packed as the type that it has.

    changed: name → a function that gives the tensor's float32 numbers, of its shape. It is called
    right before the tensor is written, so that one tensor is in memory at a time. Metadata and all
    other tensors stay as they are; a source in several files becomes one file.
    Raises QuantError for numbers that a type cannot hold, PyggmlError if the disk refuses.
    """
    metadata = {k: f for k, f in file.metadata.items() if k not in gguf.SPLIT_KEYS}

    def data(name: str) -> np.ndarray:
        if name not in changed:
            return file.data(name)
        return _packed(file, name, changed[name](), file.tensors[name].dtype)

    tensors = [(name, i.dtype, i.shape, partial(data, name)) for name, i in file.tensors.items()]
    gguf.write(target, metadata, tensors)


def _check_source(file: gguf.GGUFFile, wanted: Mapping[str, DType]) -> None:
    """QuantError if a tensor that is quantised already would lose more; F32 holds it exactly."""
    twice = [
        i for n, i in file.tensors.items() if i.dtype.quantised and wanted[n] not in (i.dtype, F32)
    ]
    if twice:
        fault = (
            f"is off, but {len(twice)} tensors are quantised already ({shown(twice[0].name)} is "
            f"{twice[0].dtype}): quantise the original file (F32, F16, BF16), or turn it on and "
            "lose twice"
        )
        raise QuantError([("allow_requantize", fault)], f"{file.path}: ")


def _types(file: gguf.GGUFFile, file_type: str) -> dict[str, DType]:
    kept = {
        name: info.dtype for name, info in file.tensors.items() if not is_packed(name, info.shape)
    }
    unknown = [
        f"{shown(name)} has type {info.dtype}"
        for name, info in file.tensors.items()
        if name not in kept and info.dtype.name not in QUANTS
    ]
    if unknown:
        raise QuantError(f"{file.path}: {'; '.join(unknown[:10])}; known are {', '.join(QUANTS)}")
    shapes = [(name, info.shape) for name, info in file.tensors.items()]
    return mix(file_type, shapes, _facts(file)) | kept


def _facts(file: gguf.GGUFFile) -> ModelFacts:
    kind = file.optional("general.type", str, "model")
    if kind in ("adapter", "checkpoint"):
        raise ModelError(f"{file.path}: general.type is {kind!r}, wanted a model")
    architecture = file.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelError(f"{file.path}: names no architecture, so it is no model")

    def count(key: str, default: int) -> int:
        value = file.get(f"{architecture}.{key}", default)
        if isinstance(value, np.ndarray) and value.size:
            value = value[0].item()
        return value if isinstance(value, int) else default

    n_head = count("attention.head_count", 1)
    return ModelFacts(
        architecture=architecture,
        n_layer=count("block_count", 0),
        n_head=n_head,
        n_head_kv=count("attention.head_count_kv", n_head),
        n_expert=count("expert_count", 0),
    )


def _converted(
    file: gguf.GGUFFile,
    name: str,
    to: DType,
    progress: Callable[[str, DType, DType], None] | None,
) -> np.ndarray:
    info, data = file.tensors[name], file.data(name)
    if progress is not None:
        progress(name, info.dtype, to)
    return data if to is info.dtype else _packed(file, name, dequantize(data, info.dtype.name), to)


def _packed(file: gguf.GGUFFile, name: str, values: np.ndarray, to: DType) -> np.ndarray:
    """A tensor's numbers as this type holds them."""
    shape = file.tensors[name].shape
    try:
        raw = quantize(values.reshape(shape), to.name)
    except QuantError as error:
        raise QuantError(f"{file.path}: tensor {shown(name)}: {error}") from None
    return raw if to.quantised else raw.view(to.numpy).reshape(shape)
