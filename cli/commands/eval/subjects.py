"""The models to evaluate: the one of -m with its adapters, and those of --compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyggml import gguf
from pyggml.cli.terminal.options import Adapter, ModelSource, adapter_word
from pyggml.errors import ConfigError


def subjects(
    model: Path | None, adapters: Sequence[Adapter] | None, others: Sequence[Adapter], **how: Any
) -> list[ModelSource]:
    """-m with its adapters, if it is given, and each other file: a model, or an adapter of -m.

    how: threads, compute type and device of all

    Raises ConfigError if there is nothing to evaluate, or an adapter without a model.
    """
    if model is None and (adapters or not others):
        raise ConfigError("-m is missing, wanted -m MODEL.gguf, or --compare and models")
    evaluated = [] if model is None else [ModelSource(model, tuple(adapters or ()), **how)]
    for path, weight in others:
        if _is_adapter(path):
            if model is None:
                raise ConfigError(f"{path}: is an adapter, wanted -m and the model it is for")
            evaluated.append(ModelSource(model, ((path, weight),), **how))
        elif weight != 1:
            raise ConfigError(f"{path}: is a model, wanted no weight: those are for adapters")
        else:
            evaluated.append(ModelSource(path, **how))
    return evaluated


def names(models: Sequence[ModelSource]) -> list[str]:
    """What to call each: the names of its files, with their folders only where it takes them."""
    short = [_name(source, whole=False) for source in models]
    long = [_name(source, whole=True) for source in models]
    return [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]


def _name(source: ModelSource, whole: bool) -> str:
    paths = [(source.path, 1.0), *source.adapters]
    return " + ".join(adapter_word((p if whole else Path(p.name), w)) for p, w in paths)


def _is_adapter(path: Path) -> bool:
    with gguf.open(path) as file:
        return file.get("general.type") == "adapter"
