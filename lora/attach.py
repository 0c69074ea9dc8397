"""Config, model → Adapter: which matrices get an update, and how the updates start.

A ~ uniform(−1/√n_in, 1/√n_in), B = 0, so that nothing changes at first; for the token embedding
A = 0, so that tokens that are never seen never change, and B ~ normal(0, 1). Both are PEFT's starts
(Kaiming with a = √5). Every tensor has a random stream of its own, named by seed and tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from zlib import crc32

import numpy as np

from pyggml.backends import read, write
from pyggml.errors import AdapterError, Fault
from pyggml.lora.adapter import Adapter
from pyggml.lora.config import LoraConfig
from pyggml.lora.parameters import Parameters
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs, Parts, TensorSpec
from pyggml.models.adapter import TIED
from pyggml.tensor import Shape


def attach(model: Model, config: LoraConfig | None = None) -> Adapter:
    """Trainable updates of a model's matrices. `model` stays as it is; `Adapter.model` has them.

    Raises AdapterError if the model has an adapter already, and with every module that it lacks or
    llama.cpp would not apply, and a matrix that is too small for the rank.
    """
    if model.adapters:
        raise AdapterError(
            "the model has an adapter already: unfreeze(model) trains it, and attach may be given "
            "model.with_adapters(), the model without it"
        )
    config = config or LoraConfig()
    bases = targets(model.parts, config)
    shapes: dict[str, Shape] = {}
    for name, spec in bases.items():
        shapes |= zip((f"{name}.lora_a", f"{name}.lora_b"), _updates(spec, config), strict=True)
    parameters = Parameters(shapes, asdict(config))
    pairs = {}
    for name, spec in bases.items():
        a, b = parameters.tensors[f"{name}.lora_a"], parameters.tensors[f"{name}.lora_b"]
        drawn = b if spec.table else a
        write(drawn, _start(config.seed, drawn.name, drawn.shape, spec.table))
        pairs[name] = LoraPair(a, b, config.alpha / config.rank)
    return Adapter(model.with_adapters(pairs), config, parameters, pairs)


def unfreeze(model: Model) -> Adapter:
    """The adapter that a model was loaded with, to be trained on from where its file ends.

    `model` stays as it is; rank, alpha and modules are the file's. Raises AdapterError if the model
    has no adapter, or several, or one whose alpha is no single number.
    """
    if len(model.adapters) != 1:
        raise AdapterError(
            f"the model has {len(model.adapters)} adapters, wanted one: load it with adapter=..."
        )
    (loaded,) = model.adapters
    tensors = {t.name: t for pair in loaded.values() for t in (pair.a, pair.b)}
    config = _settings_of(loaded)
    parameters = Parameters({name: t.shape for name, t in tensors.items()}, asdict(config))
    for name, t in parameters.tensors.items():
        write(t, read(tensors[name]))
    pairs = {
        name: replace(pair, a=parameters.tensors[pair.a.name], b=parameters.tensors[pair.b.name])
        for name, pair in loaded.items()
    }
    return Adapter(model.with_adapters(pairs), config, parameters, pairs)


def _settings_of(pairs: LoraPairs) -> LoraConfig:
    """What the updates of a file were made with: scale = alpha / rank, and alpha is one number."""
    ranks = {name: pair.b.shape[-1] for name, pair in pairs.items()}
    alphas = {float(np.float32(pair.scale * ranks[name])) for name, pair in pairs.items()}
    if len(alphas) > 1:
        raise AdapterError(
            f"the adapter has no alpha and ranks from {min(ranks.values())} to "
            f"{max(ranks.values())}, wanted one alpha for all"
        )
    modules = dict.fromkeys(name.removesuffix(".weight").split(".")[-1] for name in pairs)
    return LoraConfig(rank=max(ranks.values()), alpha=alphas.pop(), modules=tuple(modules))


def _updates(spec: TensorSpec, config: LoraConfig) -> tuple[Shape, Shape]:
    found = spec.update(config.rank)
    assert found is not None, "targets() gives only what can be updated"
    return found


def _start(seed: int, name: str, shape: Shape, normal: bool) -> np.ndarray:
    rng = np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))
    if normal:
        return rng.standard_normal(shape, np.float32)
    bound = shape[-1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def targets(parts: Parts, config: LoraConfig) -> dict[str, TensorSpec]:
    """The tensors that get an update, by full name, in the model's order."""
    n_layer, specs = parts.config.n_layer, parts.decoder.tensors()
    modules = parts.decoder.usual_modules if config.modules is None else config.modules
    faults: list[Fault] = [fault for m in modules if (fault := _refusal(parts, m))]
    if config.skip_layers >= n_layer and not {"output", "token_embd"} & set(modules):
        fault = f"is {config.skip_layers}, wanted below the model's {n_layer} blocks"
        faults.append(("skip_layers", fault))
    names = ["token_embd.weight"] * ("token_embd" in modules)
    names += [
        f"blk.{i}.{m}.weight"
        for i in range(config.skip_layers, n_layer)
        for m in parts.decoder.modules
        if m in modules
    ]
    names += ["output.weight"] * ("output" in modules)
    bases = {n: specs[n] for n in names if n in parts.weights}
    faults += _too_small({name: min(spec.shape[-2:]) for name, spec in bases.items()}, config.rank)
    if faults:
        raise AdapterError(faults)
    return bases


def _refusal(parts: Parts, module: str) -> str | None:
    """Why this module cannot be adapted, or None if it can."""
    if module == "output":
        if parts.output_name == "output":
            return None
        return (
            "output cannot be adapted: this model's output matrix is its token embedding, and "
            "llama.cpp would refuse an adapter for a matrix that the file does not have"
        )
    if module == "token_embd":
        tied = parts.output_name == "token_embd"
        return f"token_embd cannot be adapted: {TIED}" if tied else None
    if module.endswith("_norm"):
        return f"{module} cannot be adapted: llama.cpp ignores updates of norms"
    if module not in parts.decoder.modules:
        return f"{module} is no linear module of this model, known are {', '.join(_known(parts))}"
    if not any(f"blk.{i}.{module}.weight" in parts.weights for i in range(parts.config.n_layer)):
        return f"{module} is in none of this model's blocks"
    return None


def _known(parts: Parts) -> tuple[str, ...]:
    outer = ("token_embd", "output") if parts.output_name == "output" else ()
    return (*parts.decoder.modules, *outer)


def _too_small(highest: Mapping[str, int], rank: int) -> list[Fault]:
    """Matrices, by the highest rank that an update of each can have, which this one exceeds."""
    small = [name for name, most in highest.items() if rank > most]
    if not small:
        return []
    least = min(small, key=highest.__getitem__)
    others = f" and {len(small) - 1} more matrices are too small" if len(small) > 1 else ""
    why = f"{least} has {highest[least]} rows or columns{others}"
    return [("rank", f"is {rank}, wanted at most {highest[least]}: {why}")]
