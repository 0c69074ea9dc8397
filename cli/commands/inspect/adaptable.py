"""Which modules of a model LoRA can target, and what an adapter of some rank costs."""

from collections.abc import Mapping
from math import prod
from typing import Any

from pyggml.cli.commands.inspect.fold import ranges
from pyggml.errors import ModelError, PyggmlError
from pyggml.gguf import GGUFFile

N_BYTES = 4  # of a trained number in an adapter file: F32
N_KEPT = 4 * N_BYTES  # of one in training: itself, its gradient and two moments


def adaptable(file: GGUFFile, rank: int) -> dict[str, Any]:
    """{"buildable", "why_not"}, and of a model that can be built what `attach` would make of it.

    rank           that of the costs
    modules        each with: module, blocks, n (tensors), shapes, default (whether it is a target
                   unless others are named), n_parameters at this rank
    n_parameters   of the default targets; n_bytes: of their adapter file, but for its header
    training_bytes of them with gradients and AdamW's moments
    """
    from pyggml import models  # which imports Numba: not for files that are no models

    try:
        parts = models.read(file)
    except ModelError as error:
        reason = str(error).split("; known are ")[0]  # without the list of all architectures
        return {"buildable": False, "why_not": reason.removeprefix(f"{file.path}: ")}
    specs = parts.decoder.tensors()
    outer = ("token_embd", "output") if parts.output_name == "output" else ()
    names = [*parts.decoder.modules, *outer]
    modules = [m for name in names if (m := _module(parts, specs, name, rank))["n"]]
    in_blocks = (s for n, s in specs.items() if n.startswith("blk.") and n in parts.weights)
    n = sum(_n_parameters(spec, rank) for spec in in_blocks if spec.linear and spec.usual)
    about = {"buildable": True, "rank": rank, "modules": modules, "n_parameters": n}
    about |= {"n_bytes": N_BYTES * n, "training_bytes": N_KEPT * n}
    return about | _refusal(parts, rank)


def _refusal(parts: Any, rank: int) -> dict[str, str]:
    """Why this rank cannot be had, if it cannot."""
    from pyggml.lora import LoraConfig
    from pyggml.lora.adapter.targets import targets

    try:
        targets(parts, LoraConfig(rank=rank))
    except PyggmlError as error:
        return {"refused": str(error)}
    return {}


def _module(parts: Any, specs: Mapping[str, Any], name: str, rank: int) -> dict[str, Any]:
    """The facts of a module: of all blocks that have it, or of a matrix outside of them."""
    numbers = range(parts.config.n_layer)
    places = {i: f"blk.{i}.{name}.weight" for i in numbers if f"{name}.weight" not in specs}
    places = places or {-1: f"{name}.weight"}
    there = {i: specs[full] for i, full in places.items() if full in parts.weights}
    shapes = dict.fromkeys(tuple(spec.shape) for spec in there.values())
    return {
        "module": name,
        "blocks": ranges(i for i in there if i >= 0),
        "n": len(there),
        "shapes": [list(shape) for shape in shapes],
        "default": name in parts.usual_modules,
        "n_parameters": sum(_n_parameters(spec, rank) for spec in there.values()),
    }


def _n_parameters(spec: Any, rank: int) -> int:
    """Numbers in an update of one tensor."""
    return sum(map(prod, spec.update(rank)))
