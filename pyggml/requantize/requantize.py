"""A GGUF model → the same model in another file type, as from llama.cpp's quantiser, with other
numbers in some of its tensors, or both.

file_type   None: every tensor keeps its type. Vectors, norms and small tables always do, as in
            llama.cpp
changed     tensor name → its new numbers, called right before the tensor is written
blocks      tensor name → its new bytes, of the type that it gets, likewise
progress    called before each tensor
importance  of columns, in the fits of types that weight them (pyggml.quants.packers.weighted)
rounding    "update": blocks that keep what changed (pyggml.quants.keep); "nearest": each weight as
            llama.cpp packs it. They differ for tensors with an update alone
base        the model before it was trained: what differs from it is an update too, but for tensors
            of `changed`, whose update is against the file itself
metadata    keys in place of the file's, or new ones; None leaves a key out

A tensor is packed at most once, from float32 numbers, and one is in memory at a time. A tensor that
is quantised already gets another type than F32 only with `allow_requantize`: the two losses add up.
Other metadata is kept, and a source in several files becomes one file.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pyggml import gguf
from pyggml.errors import ConfigError, Fault, ModelError, QuantError, suggestion
from pyggml.gguf.fields import brief
from pyggml.graph.dtypes import F32, DType
from pyggml.models.build import NO_MODELS
from pyggml.quants import QUANTS, dequantize, quantize
from pyggml.quants.keep import has_levels, quantize_update
from pyggml.requantize.file_types import FILE_TYPES, ModelFacts
from pyggml.requantize.imatrix import ImportanceMatrix, InputSums
from pyggml.requantize.losses import PackingLosses, TensorLoss, measure
from pyggml.requantize.mix import is_packed, mix, needs_importance

QUANTISATION_VERSION = 2  # of ggml's block formats


Progress = Callable[[str, DType, DType], None]  # name, old type, new type of a tensor
Numbers = Callable[[], np.ndarray]  # a tensor's float32 numbers, of its shape, or its bytes
ROUNDINGS = ("update", "nearest")
_NONE: Mapping[str, Any] = MappingProxyType({})


def requantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    file_type: str,
    progress: Progress | None = None,
    allow_requantize: bool = False,
    importance: ImportanceMatrix | None = None,
) -> PackingLosses:
    """Write `target` with the tensor types of `file_type` (Q8_0, Q4_K_M, F16, …); see `rewrite`.

    Raises what `rewrite` raises, and GGUFError for a damaged source.
    """
    with gguf.open(source) as file:
        return rewrite(file, target, file_type, {}, progress, allow_requantize, importance)


def rewrite(
    file: gguf.GGUFFile,
    target: str | os.PathLike[str],
    file_type: str | None = None,
    changed: Mapping[str, Numbers] = _NONE,
    progress: Progress | None = None,
    allow_requantize: bool = False,
    importance: ImportanceMatrix | None = None,
    *,
    rounding: str = "update",
    base: gguf.GGUFFile | None = None,
    metadata: Mapping[str, Any] = _NONE,
    blocks: Mapping[str, Numbers] = _NONE,
) -> PackingLosses:
    """Write a model again: with the tensor types of a file type, with other numbers, or with both;
    see the head of this file. Returns what was lost, by tensor.

    An older file at `target` stays until the new one is complete. Raises QuantError for an unknown
    file type or rounding, a second loss that is not allowed, a type that lacks its importance, or
    numbers that a type cannot hold; ModelError if the file is no model; ConfigError if `target` is
    the source, or `base` another model; FileChangedError if the source changes meanwhile;
    PyggmlError if the disk refuses.
    """
    _check_target(file, Path(target))
    _check_base(file, base)
    sums = importance.sums if importance else _NONE
    types = types_of(file, file_type, importance is not None)
    plan = _Plan(file, types, changed, sums, rounding, base, blocks)
    faults = [*_misfits(file, importance), *_lacks_importance(plan.new_types, file_type, sums)]
    faults += _unknown_rounding(rounding)
    faults += [] if allow_requantize else _packed_twice(file, types)
    if faults:
        raise QuantError(faults, f"{file.path}: ")
    losses: list[TensorLoss] = []
    tensors = [
        (n, types[n], i.shape, partial(_checked, file, plan.tensor, n, progress, losses.append))
        for n, i in file.tensors.items()
    ]
    gguf.write(target, _metadata(file, file_type, importance, metadata), tensors)
    return PackingLosses(losses)


def _checked(
    file: gguf.GGUFFile, make: Callable[..., np.ndarray], *arguments: object
) -> np.ndarray:
    """A tensor made of the file's, which was as it should be until then."""
    result = make(*arguments)
    file.check()
    return result


def _check_target(file: gguf.GGUFFile, target: Path) -> None:
    if target.exists() and any(target.samefile(part) for part in file.paths):
        raise ConfigError(f"{target}: is the file to read from; wanted another name to write to")


def _metadata(
    file: gguf.GGUFFile,
    file_type: str | None,
    importance: ImportanceMatrix | None,
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """The source's, with llama.cpp's keys for what was done, and more."""
    kept: dict[str, Any] = {k: f for k, f in file.metadata.items() if k not in gguf.SPLIT_KEYS}
    if file_type is not None:
        kept["general.file_type"] = FILE_TYPES[file_type].number
        kept["general.quantization_version"] = QUANTISATION_VERSION
    if importance is not None:
        kept |= {f"quantize.imatrix.{key}": value for key, value in importance.origin().items()}
    return {key: value for key, value in {**kept, **more}.items() if value is not None}


def _lacks_importance(
    packed: Mapping[str, DType], file_type: str | None, sums: Mapping[str, InputSums]
) -> list[Fault]:
    """Whether the importance of columns is missing where a type is packed by it alone."""
    names = [n for n, d in packed.items() if needs_importance(n, d.name, file_type)]
    names = [name for name in names if name not in sums]
    if not names:
        return []
    more = f" and {len(names) - 1} others" if len(names) > 1 else ""
    lack = "the given one does not name" if sums else "none is given (pyggml imatrix makes one) for"
    return [
        f"{packed[names[0]]} is packed by an importance matrix alone, and {lack} "
        f"{brief(names[0])}{more}"
    ]


def _packed_twice(file: gguf.GGUFFile, types: Mapping[str, DType]) -> list[Fault]:
    """Whether a tensor that is quantised already would lose more; F32 holds it exactly."""
    twice = [
        i for n, i in file.tensors.items() if i.dtype.quantised and types[n] not in (i.dtype, F32)
    ]
    if not twice:
        return []
    fault = (
        f"is off, but {len(twice)} tensors are quantised already ({brief(twice[0].name)} is "
        f"{twice[0].dtype}): quantise the original file (F32, F16, BF16); with it on, the error "
        "of this quantisation comes on top of that of the first"
    )
    return [("allow_requantize", fault)]


def _misfits(file: gguf.GGUFFile, importance: ImportanceMatrix | None) -> list[Fault]:
    """Whether the importance matrix is another model's: of other names, or of other shapes."""
    if importance is None:
        return []
    sizes = {n: s.squares.size for n, s in importance.sums.items() if n in file.tensors}
    shapes = {name: file.tensors[name].shape for name in sizes}
    wrong = [
        f"{brief(name)} of shape {shapes[name]} has the importance of {size} columns: the "
        "importance matrix is another model's"
        for name, size in sizes.items()
        if size not in (shapes[name][-1], prod(shapes[name][:-2]) * shapes[name][-1])
    ]
    if not sizes:
        return ["has none of the tensors that the importance matrix names: it is another model's"]
    return [*wrong[:1]]


def types_of(
    file: gguf.GGUFFile, file_type: str | None, has_importance: bool = False
) -> dict[str, DType]:
    """The type of each tensor of a model in a file of this type; None: the type that it has.

    No tensor is refused for want of importance. Raises QuantError and ModelError as `rewrite`.
    """
    if file_type is None:
        return {name: info.dtype for name, info in file.tensors.items()}
    if file_type not in FILE_TYPES:
        near = suggestion(file_type, FILE_TYPES)
        raise QuantError(f"{file_type!r} is no file type; known are {', '.join(FILE_TYPES)}{near}")
    kept = {
        name: info.dtype for name, info in file.tensors.items() if not is_packed(name, info.shape)
    }
    unknown = [
        f"{brief(name)} has type {info.dtype}"
        for name, info in file.tensors.items()
        if name not in kept and info.dtype.name not in QUANTS
    ]
    if unknown:
        raise QuantError(f"{file.path}: {'; '.join(unknown[:10])}; known are {', '.join(QUANTS)}")
    shapes = [(name, info.shape) for name, info in file.tensors.items()]
    return mix(file_type, shapes, replace(_facts(file), has_importance=has_importance)) | kept


def _facts(file: gguf.GGUFFile) -> ModelFacts:
    kind = file.optional("general.type", str, "model")
    if kind in NO_MODELS:
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
        n_layer=count("block_count", 0) * max(count("num_loops", 1), 1),  # as llama.cpp counts
        n_head=n_head,
        n_head_kv=count("attention.head_count_kv", n_head),
        n_expert=count("expert_count", 0),
    )


def _check_base(file: gguf.GGUFFile, base: gguf.GGUFFile | None) -> None:
    """ConfigError if the model before training is another one."""
    if base is None:
        return
    shapes = {name: info.shape for name, info in base.tensors.items()}
    for name, info in file.tensors.items():
        if len(info.shape) > 1 and shapes.get(name) != info.shape:
            there = f"of shape {shapes[name]}" if name in shapes else "missing"
            raise ConfigError(
                f"{base.path}: is not the model before training: {brief(name)} is {there}, wanted "
                f"{info.shape}"
            )


def _unknown_rounding(rounding: str) -> list[Fault]:
    if rounding in ROUNDINGS:
        return []
    return [("rounding", f"is {rounding!r}, wanted {' or '.join(ROUNDINGS)}")]


def numbers_in(file: gguf.GGUFFile, name: str) -> np.ndarray:
    """A tensor's numbers, float32, in its shape."""
    info = file.tensors[name]
    return dequantize(file.data(name), info.dtype.name).reshape(info.shape)


@dataclass(frozen=True, slots=True)
class _Plan:
    """What becomes of each tensor; the fields are `rewrite`'s."""

    file: gguf.GGUFFile
    targets: Mapping[str, DType]
    changed: Mapping[str, Numbers]
    sums: Mapping[str, InputSums]
    rounding: str
    base: gguf.GGUFFile | None
    blocks: Mapping[str, Numbers]

    @property
    def new_types(self) -> dict[str, DType]:
        """The tensors that do not keep their bytes, and their new types."""
        types = {name: info.dtype for name, info in self.file.tensors.items()}
        return {n: d for n, d in self.targets.items() if n in self.changed or d is not types[n]}

    def tensor(
        self, name: str, progress: Progress | None, hear: Callable[[TensorLoss], None]
    ) -> np.ndarray:
        """A tensor as the new file holds it; `hear` gets what that loses."""
        info, to = self.file.tensors[name], self.targets[name]
        if progress is not None:
            progress(name, info.dtype, to)
        if name in self.blocks:
            return self.blocks[name]()
        if name not in self.new_types:
            return self.file.data(name)
        changed = self.changed.get(name)
        meant = numbers_in(self.file, name) if changed is None else changed().reshape(info.shape)
        origin = self._origin(name)
        try:
            raw = self._pack(name, meant, origin)
        except QuantError as error:
            raise QuantError(f"{self.file.path}: tensor {brief(name)}: {error}") from None
        before = None if origin is None else numbers_in(origin, name)
        hear(measure(name, to, meant, raw, before))
        return raw if to.quantised else raw.view(to.numpy).reshape(info.shape)

    def _origin(self, name: str) -> gguf.GGUFFile | None:
        """The file with the numbers that an update of this tensor is against."""
        file = self.file if name in self.changed else self.base
        return file if file is not None and name in file.tensors else None

    def _pack(self, name: str, meant: np.ndarray, origin: gguf.GGUFFile | None) -> np.ndarray:
        to = self.targets[name]
        importance = self.sums[name].means if name in self.sums else None
        if origin is None or self.rounding == "nearest" or not has_levels(to.name):
            return quantize(meant, to.name, importance)
        file = origin
        own = file.data(name) if file.tensors[name].dtype is to else None
        return quantize_update(meant, numbers_in(file, name), to.name, importance, own)
