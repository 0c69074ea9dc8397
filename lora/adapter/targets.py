"""Config, model → the tensors that get an update, with their ranks and scales."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TypeVar

import numpy as np

from pyggml.errors import AdapterError, Fault, suggestion
from pyggml.graph.tensor import Shape
from pyggml.lora.adapter.names import ALL_LINEAR, fits
from pyggml.lora.config import LoraConfig
from pyggml.models import Parts, TensorSpec
from pyggml.models.adapter import TIED
from pyggml.requantize import needs_importance

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor, and the rank and scale of the update that it gets."""

    spec: TensorSpec
    rank: int
    scale: float

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of A and B, as in the adapter file."""
        both = self.spec.update(self.rank)
        assert both is not None, "targets() gives only what can be updated"
        return both

    @property
    def is_matrix(self) -> bool:
        """Whether it is one matrix of a product: neither a table nor a stack of experts."""
        return self.spec.linear and len(self.spec.shape) == 2


def targets(parts: Parts, config: LoraConfig) -> dict[str, Target]:
    """The tensors that get an update, by full name, in the model's order.

    Raises AdapterError with all faults: modules that the model lacks or that llama.cpp would not
    apply, patterns without a match, tensors too small for their rank, and, for DoRA and PiSSA,
    tensors that are no plain matrix.
    """
    n_layer, specs = parts.config.n_layer, parts.decoder.tensors()
    modules = parts.usual_modules if config.modules is None else config.modules
    faults: list[Fault] = [fault for m in modules if (fault := refusal(parts, m))]
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
    if config.modules is None:  # a module may be usual in some layers alone
        names = [n for n in names if n in specs and specs[n].usual]
    names += ["output.weight"] * ("output" in modules)
    bases = {n: specs[n] for n in names if n in parts.weights}
    chosen = {name: _target(name, spec, config) for name, spec in bases.items()}
    faults += _faults_of_modules(chosen, config)
    faults += _too_small(chosen, config.rank)
    faults += _no_matrices(chosen, config)
    faults += _unwritable(parts, chosen) if config.dora else []
    if faults:
        raise AdapterError(faults)
    return chosen


def warn_of_passed_over(parts: Parts, names: Iterable[str]) -> None:
    """Warn of tensors whose updates llama.cpp passes over, if there are any."""
    specs = parts.decoder.tensors()
    modules = dict.fromkeys(n.split(".")[-2] for n in names if not specs[n].applied)
    if modules:
        warnings.warn(
            f"llama.cpp passes over an adapter's updates of {', '.join(modules)}: merge the "
            "adapter into the model for it",
            RuntimeWarning,
            stacklevel=3,
        )


def _target(name: str, spec: TensorSpec, config: LoraConfig) -> Target:
    rank = _match(config.rank_pattern, name, config.rank)
    alpha = _match(config.alpha_pattern, name, config.alpha)
    if not config.rslora:
        return Target(spec, rank, alpha / rank)
    in_file = np.float32(alpha * sqrt(rank))  # which llama.cpp divides by the rank
    return Target(spec, rank, float(in_file) / rank)


def _match(patterns: Mapping[str, T] | None, name: str, default: T) -> T:
    """The value of the last pattern that matches a tensor."""
    values = [value for pattern, value in (patterns or {}).items() if fits(pattern, name)]
    return values[-1] if values else default


def _faults_of_modules(chosen: Mapping[str, Target], config: LoraConfig) -> list[Fault]:
    """Patterns without a target: most likely they are misspelt."""
    settings = ("rank_pattern", "alpha_pattern")
    return [
        (setting, f"has {pattern!r}, wanted a pattern that fits a matrix of the adapter")
        for setting in settings
        for pattern in getattr(config, setting) or ()
        if not any(fits(pattern, name) for name in chosen)
    ]


def _no_matrices(chosen: Mapping[str, Target], config: LoraConfig) -> list[Fault]:
    wanting = {"dora": config.dora, "init": config.init != "kaiming"}
    tables = [name for name, target in chosen.items() if not target.is_matrix]
    return [
        (setting, f"wants plain matrices, and {tables[0]} is a table or a matrix for each expert")
        for setting, wants in wanting.items()
        if wants and tables
    ]


def _unwritable(parts: Parts, names: Iterable[str]) -> list[Fault]:
    """DoRA's result is merged into the model, in the type that each matrix has."""
    types = {name: parts.weights[name].dtype for name in names}
    faults: list[Fault] = [
        (
            "dora",
            f"ends with a merged model, but {name} is {dtype}, which is packed by the importance "
            "of columns alone",
        )
        for name, dtype in types.items()
        if needs_importance(name, dtype.name)
    ]
    return faults[:1]


def refusal(parts: Parts, module: str) -> str | None:
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
        modules = _modules(parts)
        return (
            f"{module} is no linear module of this model{_suggest(parts, module)}; known are "
            f"{', '.join(modules)}, and their names in transformers"
        )
    if not any(f"blk.{i}.{module}.weight" in parts.weights for i in range(parts.config.n_layer)):
        return f"{module} is in none of this model's blocks"
    return None


def _suggest(parts: Parts, module: str) -> str:
    """What was probably meant, by the file's names or those of transformers."""
    from pyggml.lora.peft.twins import class_modules  # which imports gguf

    theirs = (name.rpartition(".")[2] for name, _ in class_modules(parts))
    return suggestion(module, [*_modules(parts), *theirs, ALL_LINEAR])


def _modules(parts: Parts) -> tuple[str, ...]:
    outer = ("token_embd", "output") if parts.output_name == "output" else ()
    return (*parts.decoder.modules, *outer)


def _too_small(chosen: Mapping[str, Target], usual: int) -> list[Fault]:
    """Tensors whose rank is above the most that they allow; the sentence names the smallest."""
    highest = {name: min(target.spec.shape[-2:]) for name, target in chosen.items()}
    small = [name for name, most in highest.items() if chosen[name].rank > most]
    if not small:
        return []
    least = min(small, key=highest.__getitem__)
    rank, most = chosen[least].rank, highest[least]
    rest = f" and {len(small) - 1} more matrices are too small" if len(small) > 1 else ""
    why = f"{least} has {most} rows or columns{rest}"
    setting = "rank" if rank == usual else "rank_pattern"
    return [(setting, f"is {rank}, wanted at most {most}: {why}")]
