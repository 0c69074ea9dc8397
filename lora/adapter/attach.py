"""Model → Adapter: fresh updates of chosen matrices, or the updates of a loaded adapter."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

import numpy as np

from pyggml.errors import AdapterError
from pyggml.gguf import GGUFFile
from pyggml.graph.arrays import read, write
from pyggml.graph.tensor import Shape, leaf
from pyggml.lora.adapter.adapter import Adapter
from pyggml.lora.adapter.names import resolve
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.adapter.starts import kaiming, pissa, row_squares, unpack
from pyggml.lora.adapter.targets import Target, targets, warn_of_passed_over
from pyggml.lora.config import LoraConfig
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs, Magnitude
from pyggml.models.stack import FilePairs
from pyggml.models.weights import factor_of
from pyggml.requantize import numbers_in
from pyggml.runtime import Devices

T = TypeVar("T")
A, B, LENGTHS = ".lora_a", ".lora_b", ".lora_magnitude"


def attach(
    model: Model,
    config: LoraConfig | None = None,
    *,
    on_top: bool = False,
    original: GGUFFile | None = None,
    started: Callable[[int, int], None] = lambda n_started, n_all: None,
) -> Adapter:
    """Trainable updates of a model's matrices, in `Adapter.model`; `model` itself stays as it is.

    on_top    put the new adapter on top of the model's own ones, which stay fixed
    original  the file that the model was quantised from, for LoftQ's start
    started   called after each matrix with how many have their A and B; PiSSA takes seconds each

    Raises AdapterError if the model has an adapter and `on_top` is false, for targets that
    `pyggml.lora.adapter.targets` refuses, and for an original that is missing or another model.
    """
    config = resolve(model.parts, config or LoraConfig())
    if model.adapters and not on_top:
        raise AdapterError(
            "the model has an adapter already: unfreeze(model) trains it, attach(…, on_top=True) "
            "trains another on top of it, and attach may be given model.with_adapters(), the model "
            "without it"
        )
    if model.adapters and config.dora:
        raise AdapterError([("dora", "is on, wanted a model without other adapters")])
    bases = targets(model.parts, config)
    warn_of_passed_over(model.parts, bases)
    scaled = [n for n in bases if factor_of(model.parts.weights, n) is not None]
    if scaled and config.dora:
        raise AdapterError([("dora", f"is on, but {scaled[0]} has a scale of its own beside it")])
    _check_original(bases, config, original)
    parameters = _parameters(bases, config, model.devices)
    pairs = {name: _pair(parameters, name, bases[name], config) for name in bases}
    for i, (name, target) in enumerate(bases.items(), 1):
        _start(model, parameters, name, target, config, original)
        started(i, len(bases))
        if config.dora:
            pairs[name] = replace(pairs[name], magnitude=_magnitude(model, parameters, name))
    return _adapter(model, model.adapters, config, parameters, pairs)


def unfreeze(model: Model, *, dropout: float = 0.0, plus_ratio: float = 1.0) -> Adapter:
    """The model's last adapter, made trainable with the numbers of its file; others stay fixed.

    `model` itself stays as it is. Ranks, alphas and modules are the file's; its chat template is
    saved again unless other chats are learned. Raises AdapterError if the model has no adapter, or
    one whose rank or alpha is out of range.
    """
    if not model.adapters:
        raise AdapterError("the model has 0 adapters, wanted one: load it with adapter=...")
    *below, loaded = model.adapters
    config = replace(_settings_of(loaded), dropout=dropout, plus_ratio=plus_ratio)
    specs = model.parts.decoder.tensors()
    bases = {n: Target(specs[n], p.rank - p.n_fixed, p.scale) for n, p in loaded.items()}
    fixed = {n for n, p in loaded.items() if p.n_fixed}
    parameters = _parameters(bases, config, model.devices, fixed)
    parameters.metadata = loaded.chats if isinstance(loaded, FilePairs) else {}
    pairs = {name: _pair(parameters, name, bases[name], config) for name in bases}
    for name, pair in loaded.items():
        a, b, n = read(pair.a), read(pair.b), pair.rank - pair.n_fixed
        if pair.n_fixed:
            write(parameters.constants[name + A], a[n:])
            write(parameters.constants[name + B], b[:, n:])
            a, b = a[:n], b[:, :n]
        write(parameters.tensors[name + A], a)
        write(parameters.tensors[name + B], b)
    return _adapter(model, below, config, parameters, pairs)


def _parameters(
    bases: Mapping[str, Target],
    config: LoraConfig,
    devices: Devices,
    with_constants: set[str] | None = None,
) -> Parameters:
    """A and B of every target, DoRA's magnitudes, and the A and B that PiSSA subtracts."""
    if with_constants is None:
        with_constants = set(bases) if config.init == "pissa" else set()
    shapes: dict[str, Shape] = {}
    constants: dict[str, Shape] = {}
    for name, target in bases.items():
        both = dict(zip((name + A, name + B), target.shapes, strict=True))
        shapes |= both
        constants |= both if name in with_constants else {}
        if config.dora:
            shapes[name + LENGTHS] = target.spec.shape[:1]
    rates = {name + B: config.plus_ratio for name in bases}
    return Parameters(shapes, asdict(config), rates, constants, devices=devices)


def _pair(parameters: Parameters, name: str, target: Target, config: LoraConfig) -> LoraPair:
    a, b = parameters.tensors[name + A], parameters.tensors[name + B]
    return LoraPair(a, b, target.scale, 0.0 if target.spec.table else config.dropout)


def _start(
    model: Model,
    parameters: Parameters,
    name: str,
    target: Target,
    config: LoraConfig,
    original: GGUFFile | None,
) -> None:
    a, b = parameters.tensors[name + A], parameters.tensors[name + B]
    if original is not None:
        with np.errstate(invalid="ignore"):  # inf − inf is NaN, which no adapter starts from
            lost = numbers_in(original, name) - unpack(model.parts.weights[name])
        start = pissa(lost, target.rank, target.scale, config.seed, name)
        for t, values in zip((a, b), start, strict=True):
            write(t, values)
        return
    if config.init == "pissa":
        w = unpack(model.parts.weights[name])
        start = pissa(w, target.rank, target.scale, config.seed, name)
        write(a, start[0])
        write(b, start[1])
        write(parameters.constants[a.name], start[0])
        write(parameters.constants[b.name], -start[1])
        return
    drawn = b if target.spec.table else a
    write(drawn, kaiming(config.seed, drawn.name, drawn.shape, target.spec.table))


def _check_original(
    bases: Mapping[str, Target], config: LoraConfig, original: GGUFFile | None
) -> None:
    """AdapterError unless LoftQ's start, and it alone, has an original with these matrices."""
    if (original is not None) != (config.init == "loftq"):
        raise AdapterError([("init", f"is {config.init}: loftq and an original want each other")])
    if original is None:
        return
    if config.dora:
        raise AdapterError([("dora", "is on, wanted a start without LoftQ")])
    for name, target in bases.items():
        info = original.tensors.get(name)
        if info is None or info.shape != target.spec.shape:
            there = f"of shape {info.shape}" if info else "missing"
            raise AdapterError(
                f"{original.path}: is not the original of this model: {name} is {there}, wanted "
                f"{target.spec.shape}"
            )


def _magnitude(model: Model, parameters: Parameters, name: str) -> Magnitude:
    """DoRA's start: the length of each row of a matrix. B is 0, so nothing changes at first."""
    squares = row_squares(unpack(model.parts.weights[name]))
    write(parameters.tensors[name + LENGTHS], np.sqrt(squares))
    return Magnitude(parameters.tensors[name + LENGTHS], leaf(squares, f"{name} squares"))


def _adapter(
    model: Model,
    stack: tuple[LoraPairs, ...] | list[LoraPairs],
    config: LoraConfig,
    parameters: Parameters,
    pairs: LoraPairs,
) -> Adapter:
    """The adapter over these parameters, above `others` and PiSSA's subtracted start."""
    constants = parameters.constants
    fixed = {
        name: LoraPair(constants[name + A], constants[name + B], pair.scale)
        for name, pair in pairs.items()
        if name + A in constants
    }
    below = (*stack, fixed) if fixed else tuple(stack)
    return Adapter(model.with_adapters(*below, pairs), config, parameters, pairs, fixed)


def _settings_of(pairs: LoraPairs) -> LoraConfig:
    """The settings of a loaded adapter; ranks and alphas unlike the most common one become
    patterns."""
    ranks = {name: pair.rank - pair.n_fixed for name, pair in pairs.items()}
    alphas = {name: float(np.float32(pair.scale * ranks[name])) for name, pair in pairs.items()}
    rank, alpha = _usual(ranks), _usual(alphas)
    modules = dict.fromkeys(name.removesuffix(".weight").split(".")[-1] for name in pairs)
    return LoraConfig(
        rank=rank,
        alpha=alpha,
        modules=tuple(modules),
        rank_pattern={n: r for n, r in ranks.items() if r != rank} or None,
        alpha_pattern={n: a for n, a in alphas.items() if a != alpha} or None,
        init="pissa" if any(pair.n_fixed for pair in pairs.values()) else "kaiming",
    )


def _usual(values: Mapping[str, T]) -> T:
    return Counter(values.values()).most_common(1)[0][0]
