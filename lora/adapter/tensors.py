"""Training without an adapter: a model's own floats, or the scales of its quantised blocks.

train_tensors   norms, biases, an embedding, a small model: all numbers of the tensors
train_packed    all numbers too, while the model reads them as the blocks that the file will hold;
                gradients go straight through (Bengio et al. 2013, arXiv:1308.3432)
train_scales    d(1 + u) in place of each float16 scale d of the blocks, u from 0; the whole numbers
                stay. As the last phase of EfficientQAT (Chen et al. 2024, arXiv:2407.11062), with
                minima trained too, and relative, so that one learning rate suits all scales

The trained tensors replace the file's in the model's graphs. An adapter file cannot hold them, so
the result is a model file, of the size and types of the first.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from pyggml.backends.cpu import pages
from pyggml.errors import AdapterError, QuantError, first_names, suggestion
from pyggml.gguf import GGUFFile
from pyggml.graph.arrays import array, read, write
from pyggml.graph.dtypes import BF16, F16, F32, HALVES, DType
from pyggml.graph.tensor import Tensor, leaf
from pyggml.lora.adapter.names import FIXED, PARTS, fits, part_patterns
from pyggml.lora.adapter.parameters import Parameters
from pyggml.lora.adapter.starts import unpack
from pyggml.model import Model
from pyggml.models.weights import FRESH, zero_matrices
from pyggml.ops import cpy, rescale, scale
from pyggml.ops.product.scale_slopes import scales_of
from pyggml.quants import quantize
from pyggml.quants.scales import rescale as rescale_blocks
from pyggml.quants.scales import scale_places, types_with_scales
from pyggml.requantize import (
    Numbers,
    PackingLosses,
    needs_importance,
    numbers_in,
    rewrite,
    types_of,
)

SCALES = ".scales"
_RATE = 0.05  # of a weight of 0 bits: each bit halves the error of packing, and with it the step
# Of all numbers in blocks: below so many bits of a weight the first, else the second. A higher one
# makes blocks of 4 bits worse than they were: most changes of codes are then the gradient's noise.
_PACKED_RATES, _FEW_BITS = (1e-4, 2e-5), 4
_FLOATS = (F32, F16, BF16)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTensors:
    """A model's own tensors, trained directly.

    model        the model with these tensors: its logits follow training
    parameters   their numbers in float32, whatever the file's type, or in halves
    words        what they are, for a plan of the run
    changed      name of a tensor → its numbers, which the file gets in its type
    blocks       name of a tensor → its blocks as they are written
    rate         the learning rate that suits them; None: the objective's
    file_type    that of the file which is written; None: every tensor keeps its type
    """

    model: Model
    parameters: Parameters
    words: Sequence[str]
    changed: Mapping[str, Numbers] = field(default_factory=dict)
    blocks: Mapping[str, Numbers] = field(default_factory=dict)
    rate: float | None = None
    file_type: str | None = None

    def save(
        self, path: str | os.PathLike[str], metadata: Mapping[str, Any] | None = None
    ) -> PackingLosses:
        """Write the whole model, with these tensors in the types of its file.

        metadata: further keys, which replace the file's and those of the parameters. A key that is
        None is left out.

        Returns how much of what was trained is in the file, by tensor. An older file at `path`
        stays whole until the new one is complete. Raises QuantError for numbers that F16 cannot
        hold, PyggmlError if the disk refuses.
        """
        self.model.devices.gather(*self.parameters.trained_leaves)  # in a callback a device has it
        fresh = {} if self._is_fresh() else {FRESH: None}
        keys = {**fresh, **self.parameters.metadata, **(metadata or {})}
        how: dict[str, Any] = {"changed": self.changed, "blocks": self.blocks, "metadata": keys}
        how["allow_requantize"] = self.file_type is not None
        return rewrite(self.model.file, path, self.file_type, **how)

    def _is_fresh(self) -> bool:
        """Whether matrices of a fresh file are 0 still: those before one that began at 0 have no
        gradient in the first step, and others may not be trained."""
        own = self.parameters.tensors
        stay = {n: w for n, w in self.model.parts.weights.items() if n not in own and w.op is None}
        return self.model.file.get(FRESH) is not None and bool(zero_matrices(stay | own))


def _numbers(t: Tensor) -> np.ndarray:
    return np.asarray(read(t))


def train_tensors(
    model: Model, patterns: Sequence[str], in_halves: bool = False, unread: Collection[str] = ()
) -> TrainedTensors:
    """Make all tensors trainable that match one of the patterns; `model` itself stays as it is.

    in_halves   keep matrices in 16 bits, in the file's type or, of an F32 file, as BF16; each step
                rounds them by chance (pyggml.ops.optim_half). Vectors stay in float32
    unread      tensors that the objective does not read (`Objective.unread`), which stay

    Patterns are those of LoraConfig.rank_pattern, or words: norms, biases, embeddings, experts,
    router, last-4 for the last four blocks, or a module's name in transformers.

    Matrices are multiplied in bfloat16, and so are their gradients, with sums in float32, if the
    compute type of the model rounds floats on each device that computes it: "f32" is exact.

    Raises AdapterError for a pattern without a match, with every matching tensor that is not F32,
    F16 or BF16, and for halves of a model on several devices.
    """
    weights, (chosen, fixed, faults) = model.parts.weights, _chosen(model, patterns, unread)
    types = {name: model.file.tensors[name].dtype for name in chosen}
    _refuse([*faults, *_no_floats(types)])
    halves = _halves(model, chosen) if in_halves else {}
    about = {"train_tensors": list(patterns)} | ({"masters": "half"} if in_halves else {})
    shapes = {name: weights[name].shape for name in chosen}
    parameters = Parameters(shapes, about, halves=halves, devices=model.devices)
    for name, t in parameters.tensors.items():
        write(t, read(_as_type(weights[name], t.dtype)).reshape(t.shape))
        if release := pages.release(array(weights[name])):
            release()
    whole = [n for n in halves if halves[n] is types[n]]  # written as they are
    blocks = {n: partial(_numbers, parameters.tensors[n]) for n in whole}
    changed = {n: partial(parameters.numbers, n) for n in chosen if n not in blocks}
    words = [f"{_count(len(chosen), 'tensor')} of the model"]
    if halves:
        kinds = _kinds({n: parameters.tensors[n] for n in halves})
        words.append(f"matrices kept as {kinds}, their steps rounded by chance")
    words += _staying(fixed)
    tensors = _narrow(model, parameters.tensors, words)
    return TrainedTensors(_with(model, tensors), parameters, words, changed, blocks)


def _narrow(model: Model, tensors: Mapping[str, Tensor], words: list[str]) -> dict[str, Tensor]:
    """The tensors, of which matrices that products round are in BF16 for each pass, as words then
    say; those that choose experts are not among them, as a choice may turn over."""
    computing = model.devices.backends if model.devices.homes else model.devices.backends[:1]
    if not all(backend.rounds_floats for backend in computing):
        return {**tensors}
    specs, router = model.parts.decoder.tensors(), PARTS["router"]
    output = f"{model.parts.output_name}.weight"
    narrow = {
        name: cpy(t, BF16).named(name)
        for name, t in tensors.items()
        if name == output or (name in specs and specs[name].linear)
        if t.dtype is F32 and len(t.shape) == 2
        if not any(fits(pattern, name) for pattern in router)
    }
    if narrow:
        n = _count(len(narrow), "matrix", "matrices")
        words.append(f"{n} multiplied in bfloat16 (--compute f32: exactly)")
    return {**tensors, **narrow}


def _no_floats(types: Mapping[str, DType]) -> list[str]:
    """What is wrong with tensors of these types; nothing of floats."""
    wrong = [f"{name} is {d}" for name, d in types.items() if d not in _FLOATS]
    if not wrong:
        return []
    more = f" and {len(wrong) - 5} more are no floats" if len(wrong) > 5 else ""
    return [
        f"{', '.join(wrong[:5])}{more}, wanted F32, F16 or BF16: only floats train, which "
        "`pyggml quantize IN OUT F16 --allow-requantize` makes of a quantised model, or --qat "
        "TYPE, which trains what blocks of that type hold"
    ]


def _halves(model: Model, names: Sequence[str]) -> Mapping[str, DType]:
    """Matrices among these → the type in which they are kept. AdapterError for a model whose blocks
    are on several devices."""
    if model.devices.homes:
        raise AdapterError([("masters", "is half, and the blocks are on several devices: on one")])
    weights = {n: model.parts.weights[n] for n in names}
    return {
        n: w.dtype if w.dtype in HALVES else BF16 for n, w in weights.items() if len(w.shape) > 1
    }


def train_packed(
    model: Model,
    patterns: Sequence[str],
    file_type: str | None = None,
    original: GGUFFile | None = None,
    unread: Collection[str] = (),
) -> TrainedTensors:
    """Make all tensors trainable that match one of the patterns, for a file of another type.

    The model reads them, and all others, as that file will hold them: packed anew after each step,
    from float32 numbers which get the gradient of what was read (straight-through estimator).

    file_type   of the file, such as Q4_K_M; None: every tensor keeps the type it has
    original    the model before quantising, whose numbers training starts from
    unread      tensors that the objective does not read, which are packed once

    Raises AdapterError for a pattern without a match and for an original of other shapes,
    QuantError for a file type that is unknown, and for types packed by an importance matrix alone.
    """
    weights, (chosen, fixed, faults) = model.parts.weights, _chosen(model, patterns, unread)
    _refuse(faults)
    own, types = model.file.tensors, types_of(model.file, file_type)
    to_pack = [n for n in weights if n not in chosen and types[n] is not own[n].dtype]
    about = {"train_tensors": [*patterns], "qat": file_type or "the file's types"}
    of_blocks = {n: types[n] for n in chosen if types[n] is not F32}
    _check_packers({n: types[n] for n in [*of_blocks, *to_pack]}, file_type)
    shapes = {n: weights[n].shape for n in chosen}
    parameters = Parameters(shapes, about, types=of_blocks, devices=model.devices)
    _begin(parameters, model, original)
    operands = parameters.operands
    words = [f"{_count(len(chosen), 'tensor')} of the model, read as {_kinds(operands)}"]
    return TrainedTensors(
        _with(model, {n: _as_type(weights[n], types[n]) for n in to_pack} | operands),
        parameters,
        [*words, *_staying(fixed)],
        changed={n: partial(_numbers, operands[n]) for n in chosen if n not in of_blocks},
        blocks={n: partial(_numbers, operands[n]) for n in of_blocks},
        rate=_PACKED_RATES[_bits(operands.values()) >= _FEW_BITS],
        file_type=file_type,
    )


def _check_packers(types: Mapping[str, DType], file_type: str | None) -> None:
    """QuantError for tensors whose types are packed by the importance of columns alone."""
    if lack := [n for n, d in types.items() if needs_importance(n, d.name, file_type)]:
        why = (
            f"{types[lack[0]]} is packed by an importance matrix alone, and training has none; "
            "files of Q2_K, Q3_K_M or IQ4_XS need none"
        )
        raise QuantError([f"{first_names(lack, 3)}: {why}"])


def _begin(parameters: Parameters, model: Model, original: GGUFFile | None) -> None:
    """Give parameters the numbers that they start from, and pack them. Raises as `_start`."""
    for name, t in parameters.tensors.items():
        write(t, _start(model.parts.weights[name], name, original))
    parameters.pack(model.devices)


def _start(w: Tensor, name: str, file: GGUFFile | None) -> np.ndarray:
    """The float32 numbers of a tensor, or those that the file of an original has of it."""
    if file is None:
        return unpack(w).reshape(w.shape)
    info = file.tensors.get(name)
    if info is None or info.shape != w.shape:
        state = "missing" if info is None else f"of shape {info.shape}"
        raise AdapterError([("original", f"{name} is {state}, wanted {w.shape}")])
    return numbers_in(file, name)


def _as_type(w: Tensor, to: DType) -> Tensor:
    """A weight packed, or rounded, as a file of another type has it."""
    if w.dtype is to:
        return w
    numbers = unpack(w)
    blocks = numbers if to is F32 else quantize(numbers, to.name).view(to.numpy)
    return leaf(blocks, w.name, to)


def _kinds(tensors: Mapping[str, Tensor]) -> str:
    """Q4_K and 2 other types: the first is that of most numbers."""
    sizes = Counter[str]()
    for t in tensors.values():
        sizes[t.dtype.name] += t.n_elements
    (first, _), *rest = sizes.most_common()
    return f"{first} and {_count(len(rest), 'other type')}" if rest else first


def _chosen(
    model: Model, words: Sequence[str], unread: Collection[str]
) -> tuple[list[str], list[str], list[str]]:
    """The names of the tensors that fit a pattern or a word of a part, and of constants and unread
    ones among them, which stay. Faults: a word that none fits, or that all of them stay."""
    weights, meant = model.parts.weights, part_patterns(model.parts, words)
    fitting = [n for n in weights if any(fits(p, n) for own in meant.values() for p in own)]
    fixed = [name for name in fitting if any(fits(p, name) for p in (*FIXED, *unread))]
    faults = [
        f"the model has no {word}"
        if word in PARTS
        else f"{word!r} fits no tensor of the model{suggestion(word, [*weights, *PARTS, 'last-4'])}"
        for word, own in meant.items()
        if not any(fits(pattern, name) for pattern in own for name in weights)
    ]
    if fixed and fixed == fitting:
        faults.append(f"{first_names(fixed, 3)}: the loss has no slope there")
    return [name for name in fitting if name not in fixed], fixed, faults


def _staying(names: Sequence[str]) -> list[str]:
    """What is not trained, in words."""
    stay = f"stay{'s' * (len(names) == 1)}"
    return [f"{first_names(names, 3)} {stay}: the loss has no slope there"] if names else []


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        raise AdapterError(faults)


def train_scales(model: Model, unread: Collection[str] = ()) -> TrainedTensors:
    """Make the scales trainable of all matrices of blocks, experts, and tables of embeddings;
    `model` itself stays as it is.

    Types whose scales are no float16 (MXFP4, NVFP4) keep theirs. The more bits a matrix has, the
    smaller its steps: its scales need less correction. unread: tensors that the objective does not
    read, which keep theirs. Raises AdapterError if no matrix is left.
    """
    specs, weights = model.parts.decoder.tensors(), model.parts.weights
    packed = {n: w for n, w in weights.items() if w.dtype.quantised}
    chosen = {
        name: w
        for name, w in packed.items()
        if name not in unread
        if name in specs and (specs[name].linear or specs[name].table)
        if len(scale_places(w.dtype.name))
    }
    if not chosen:
        raise AdapterError([("train", f"scales: {_why_none(weights, packed)}")])
    shapes = {name + SCALES: scales_of(name, w) for name, w in chosen.items()}
    parameters = Parameters(shapes, {"train": "scales"}, devices=model.devices)
    bits = _bits(chosen.values())
    nodes, blocks = dict[str, Tensor](), dict[str, Numbers]()
    for name, w in chosen.items():
        u, step = parameters.tensors[name + SCALES], 2.0 ** (bits - _bits([w]))
        nodes[name] = rescale(w, u if step == 1 else scale(u, step)).named(name)
        blocks[name] = partial(_blocks, w, u, np.float32(step))
    words = [f"the scales of {_count(len(chosen), 'matrix', 'matrices')}"]
    if kept := [name.removesuffix(".weight") for name in packed if name not in chosen]:
        words.append(f"{first_names(kept, 3)} keep{'s' * (len(kept) == 1)} theirs")
    rate = _RATE * 2.0**-bits
    return TrainedTensors(_with(model, nodes), parameters, words, blocks=blocks, rate=rate)


def _bits(tensors: Iterable[Tensor]) -> float:
    """Bits of a weight."""
    each = [*tensors]
    return 8 * sum(t.n_bytes for t in each) / sum(t.n_elements for t in each)


def _with(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    """The model with these tensors in place of the file's."""
    trained = copy(model)
    trained.parts = replace(model.parts, weights={**model.parts.weights, **tensors})
    return trained


def _blocks(w: Tensor, u: Tensor, step: np.float32) -> np.ndarray:
    return rescale_blocks(read(w), read(u) * step, w.dtype.name)


def _why_none(weights: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> str:
    types = ", ".join(dict.fromkeys(w.dtype.name for w in (packed or weights).values()))
    reason = f"no matrix of the model has float16 scales, its tensors are {types}"
    if packed:
        return f"{reason}; wanted one in {', '.join(types_with_scales())}"
    return (
        f"{reason}; quantise the model first (pyggml quantize), or train an adapter or its floats"
    )


def _count(n: int, one: str, more: str = "") -> str:
    return f"{n} {one if n == 1 else more or one + 's'}"
