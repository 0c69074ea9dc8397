"""The models to evaluate: the one of -m with its adapters, and those of --compare."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyggml import gguf
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import Adapter, ModelSource, adapter_word
from pyggml.errors import ConfigError
from pyggml.models.adapter import file_digest
from pyggml.models.stack import read_below


def subjects(
    model: Path | None,
    adapters: Sequence[Adapter] | None,
    stacks: Sequence[Sequence[Adapter]],
    controls: tuple[Adapter, ...] = (),
    layers: tuple[int, int] | None = None,
    **how: Any,
) -> list[ModelSource]:
    """-m with its adapters, if it is given, and each of `stacks`: a model, or adapters of -m, of
    which those of --lora that they were trained on are a part.

    controls   the control vectors of -m, which the others have not, after blocks `layers`
    how        threads, compute type and device of all

    Raises ConfigError if there is nothing to evaluate, or an adapter without a model.
    """
    if model is None and (adapters or controls or not stacks):
        raise ConfigError("-m is missing, wanted -m MODEL.gguf, or --compare and models")
    given = tuple(adapters or ())
    evaluated = []
    if model is not None:
        evaluated = [ModelSource(model, given, controls=controls, layers=layers, **how)]
    for stack in stacks:
        path, weight = stack[0]
        if len(stack) > 1 or ADAPTER.is_one(path):
            if model is None:
                raise ConfigError(f"{path}: is an adapter, wanted -m and the model it is for")
            evaluated.append(ModelSource(model, (*_below(stack, given), *stack), **how))
        elif weight != 1:
            raise ConfigError(f"{path}: is a model, wanted no weight: those are for adapters")
        else:
            evaluated.append(ModelSource(path, **how))
    return evaluated


def _below(stack: Sequence[Adapter], given: Sequence[Adapter]) -> list[Adapter]:
    """Those of the given adapters that the lowest of a stack was trained on top of."""
    with gguf.open(stack[0][0]) as file:
        named = {(below.digest, below.weight) for below in read_below(file)}
    if not named:
        return []
    in_stack = [path.resolve() for path, _ in stack]
    return [
        (path, weight)
        for path, weight in given
        if path.resolve() not in in_stack and (file_digest(path), weight) in named
    ]


def names(models: Sequence[ModelSource]) -> list[str]:
    """What to call each: the names of its files, with their folders only where it takes them."""
    short = [_name(source, whole=False) for source in models]
    long = [_name(source, whole=True) for source in models]
    return [b if short.count(a) > 1 else a for a, b in zip(short, long, strict=True)]


def _name(source: ModelSource, whole: bool) -> str:
    paths = [(source.path, 1.0), *source.adapters, *source.controls]
    return " + ".join(adapter_word((p if whole else Path(p.name), w)) for p, w in paths)
