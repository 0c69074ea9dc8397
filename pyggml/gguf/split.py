"""Models in several files, as llama.cpp's gguf-split writes them.

NAME-00001-of-00003.gguf    all metadata, with split.count = 3 and split.no = 0
NAME-00002-of-00003.gguf    split.count, split.no = 1, more tensors
…                           split.tensors.count counts the tensors of all parts
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from pyggml.errors import GGUFError, first_names
from pyggml.gguf.fields import SCALARS, Field, ValueType, brief
from pyggml.gguf.parse import Contents

COUNT, NUMBER, N_TENSORS = "split.count", "split.no", "split.tensors.count"
KEYS = (COUNT, NUMBER, N_TENSORS)

_NAME = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
_NOT_WHOLE = (ValueType.FLOAT32, ValueType.FLOAT64, ValueType.BOOL, ValueType.STRING)


def n_parts(metadata: Mapping[str, Field]) -> int:
    """Number of the model's files: split.count, by default 1."""
    return max(1, _number(metadata, COUNT, 1))


def paths(path: Path, metadata: Mapping[str, Field]) -> tuple[Path, ...]:
    """The paths of all parts, from the path of one of them.

    GGUFError if its name does not fit its metadata, or if parts are missing.
    """
    count, number = n_parts(metadata), _number(metadata, NUMBER, None)
    if not number < count:
        raise GGUFError(f"has {NUMBER} {number}, wanted 0 to {count - 1}")
    match = _NAME.fullmatch(path.name)
    if match is None or (int(match[2]), int(match[3])) != (number + 1, count):
        raise GGUFError(
            f"is part {number + 1} of {count} of a model,"
            f" so its name should end in -{number + 1:05}-of-{count:05}.gguf"
        )
    parts = tuple(path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    missing = [p.name for p in parts if not p.exists()]
    if missing:
        raise GGUFError(f"wanted beside it, but missing: {first_names(missing, 5)}")
    return parts


def read(files: tuple[Path, ...], parse: Callable[[Path], Contents]) -> tuple[Contents, ...]:
    """The contents of all parts, in order. GGUFError for a damaged part or one of another model."""
    parts, home = [], dict[str, Path]()
    for number, path in enumerate(files):
        part = parse(path)
        own_number, count = _number(part.metadata, NUMBER, None), n_parts(part.metadata)
        if (own_number, count) != (number, len(files)):
            raise GGUFError(
                f"{path.name} is part {own_number + 1} of {count},"
                f" wanted part {number + 1} of {len(files)}"
            )
        for name in part.tensors:
            if name in home:
                raise GGUFError(f"tensor {brief(name)} is in {home[name].name} and in {path.name}")
            home[name] = path
        parts.append(part)
    n_stated = _number(parts[0].metadata, N_TENSORS, len(home))
    if n_stated != len(home):
        raise GGUFError(f"all parts together have {len(home)} tensors, wanted {n_stated}")
    return tuple(parts)


def _number(metadata: Mapping[str, Field], key: str, default: int | None) -> int:
    """The value of a key as an integer ≥ 0."""
    field = metadata.get(key)
    if field is None:
        if default is None:
            raise GGUFError(f"is part of a model, but metadata key {key} is missing")
        return default
    if field.n is not None or field.type in _NOT_WHOLE:
        raise GGUFError(f"metadata key {key} is {field.kind}, wanted a whole number")
    signed = SCALARS[field.type].kind == "i"
    value = int.from_bytes(field.payload, "little", signed=signed)
    if value < 0:
        raise GGUFError(f"metadata key {key} is {value}, wanted 0 or more")
    return value
