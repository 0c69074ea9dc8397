"""The models to evaluate: the one of -m with its adapters, and those of --compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyggml import Model, gguf, load
from pyggml.cli.terminal.options import adapter_word
from pyggml.errors import ConfigError

Adapter = tuple[Path, float]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model file and the adapters on top of it."""

    model: Path
    adapters: tuple[Adapter, ...] = ()

    def load(self, compute: str, device: str) -> Model:
        return load(self.model, [*self.adapters] or None, compute, device=device)


def subjects(
    model: Path | None, adapters: Sequence[Adapter] | None, others: Sequence[Adapter]
) -> list[Subject]:
    """-m with its adapters, if it is given, and each other file: a model, or an adapter of -m.

    Raises ConfigError if there is nothing to evaluate, or an adapter without a model.
    """
    if model is None and (adapters or not others):
        raise ConfigError("-m is missing, wanted -m MODEL.gguf, or --compare and models")
    evaluated = [] if model is None else [Subject(model, tuple(adapters or ()))]
    for path, weight in others:
        if _is_adapter(path):
            if model is None:
                raise ConfigError(f"{path}: is an adapter, wanted -m and the model it is for")
            evaluated.append(Subject(model, ((path, weight),)))
        elif weight != 1:
            raise ConfigError(f"{path}: is a model, wanted no weight: those are for adapters")
        else:
            evaluated.append(Subject(path))
    return evaluated


def names(models: Sequence[Subject]) -> list[str]:
    """What to call each: the names of its files, with their folders only where it takes them."""
    short = [_name(subject, whole=False) for subject in models]
    long = [_name(subject, whole=True) for subject in models]
    return [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]


def _name(subject: Subject, whole: bool) -> str:
    paths = [(subject.model, 1.0), *subject.adapters]
    return " + ".join(adapter_word((p if whole else Path(p.name), w)) for p, w in paths)


def _is_adapter(path: Path) -> bool:
    with gguf.open(path) as file:
        return file.get("general.type") == "adapter"
