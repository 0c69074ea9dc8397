"""Model → Adapter: which matrices get an update, and how the updates start.

A ~ uniform(−1/√n_in, 1/√n_in), as PEFT (Kaiming with a = √5), B = 0, so that nothing changes at
first. Every A has a random stream of its own, named by seed and tensor.
"""

from __future__ import annotations

from dataclasses import asdict
from zlib import crc32

import numpy as np

from pyggml.errors import AdapterError
from pyggml.lora.adapter import Adapter
from pyggml.lora.config import LoraConfig
from pyggml.lora.parameters import Parameters
from pyggml.model import Model
from pyggml.models import LoraPair, Parts
from pyggml.tensor import Shape


def attach(model: Model, config: LoraConfig | None = None) -> Adapter:
    """Add trainable updates to a model; every graph built from now on has them.

    Raises AdapterError with every module that the model lacks or llama.cpp would not apply, and
    every matrix that is too small for the rank.
    """
    config = config or LoraConfig()
    bases = targets(model.parts, config)
    shapes: dict[str, Shape] = {}
    for name, (n_out, n_in) in bases.items():
        shapes[f"{name}.lora_a"] = (config.rank, n_in)
        shapes[f"{name}.lora_b"] = (n_out, config.rank)
    parameters = Parameters(shapes, asdict(config))
    pairs = {}
    for name in bases:
        a, b = parameters.tensors[f"{name}.lora_a"], parameters.tensors[f"{name}.lora_b"]
        assert a.data is not None
        a.data[:] = _start(config.seed, a.name, a.shape)
        pairs[name] = LoraPair(a, b, config.alpha / config.rank)
    model.adapters.append(pairs)
    base_name = str(model.file.get("general.name", model.config.architecture))
    return Adapter(model.config.architecture, base_name, config, parameters, pairs)


def _start(seed: int, name: str, shape: Shape) -> np.ndarray:
    rng = np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))
    bound = shape[1] ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def targets(parts: Parts, config: LoraConfig) -> dict[str, Shape]:
    """The matrices that get an update: full name -> (n_out, n_in), in the model's order."""
    n_layer = parts.config.n_layer
    modules = parts.decoder.modules if config.modules is None else config.modules
    faults = [fault for m in modules if (fault := _refusal(parts, m))]
    if config.skip_layers >= n_layer and "output" not in modules:
        faults.append(
            f"skip_layers is {config.skip_layers}, wanted below the model's {n_layer} blocks"
        )
    names = [
        f"blk.{i}.{m}.weight"
        for i in range(config.skip_layers, n_layer)
        for m in parts.decoder.modules
        if m in modules
    ]
    names += ["output.weight"] * ("output" in modules)
    bases = {n: parts.weights[n].shape for n in names if n in parts.weights}
    faults += [fault for n, shape in bases.items() if (fault := _too_small(n, shape, config.rank))]
    if faults:
        raise AdapterError("; ".join(faults))
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
        return "token_embd cannot be adapted: it is a table of rows, not a linear module"
    if module.endswith("_norm"):
        return f"{module} cannot be adapted: llama.cpp ignores updates of norms"
    if module not in parts.decoder.modules:
        return f"{module} is no linear module of this model, known are {', '.join(_known(parts))}"
    if not any(f"blk.{i}.{module}.weight" in parts.weights for i in range(parts.config.n_layer)):
        return f"{module} is in none of this model's blocks"
    return None


def _known(parts: Parts) -> tuple[str, ...]:
    return (*parts.decoder.modules, *(["output"] if parts.output_name == "output" else []))


def _too_small(name: str, shape: Shape, rank: int) -> str | None:
    if rank <= min(shape):
        return None
    return f"{name} is {shape[0]} × {shape[1]}, so rank is {rank}, wanted at most {min(shape)}"
