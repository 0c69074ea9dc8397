"""Two models of one architecture → the adapter that makes the first nearly the second.

Δ = W' − W of each matrix, by its r largest singular values: of all updates of rank r the nearest to
Δ (Eckart, Young 1936). It is what mergekit's `extract_lora` does. What no adapter holds, such as
norms, stays out, and is told.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml.errors import AdapterError, ModelError, NotFiniteError, first_names
from pyggml.graph.arrays import read
from pyggml.lora.adapter.combine import as_update, nearest_update, rank_of
from pyggml.lora.adapter.file import Update, base_keys, write_adapter
from pyggml.lora.adapter.starts import unpack
from pyggml.lora.adapter.targets import refusal, warn_of_passed_over
from pyggml.lora.config.combination import Combination
from pyggml.model import Model
from pyggml.models.stack import LABELS, POOLING, base_metadata
from pyggml.models.weights import factor_of
from pyggml.tokenizer.metadata import template_in
from pyggml.tokenizer.same_tokens import check_same_tokens


@dataclass(frozen=True, slots=True)
class Extract:
    """What an adapter holds of the difference between two models.

    left_out   name of a tensor -> the part of its difference that the rank leaves out, by root
               mean squares
    not_held   name of a tensor that no adapter updates -> its difference as a part of the base's
               numbers
    """

    left_out: dict[str, float]
    not_held: dict[str, float]


def extract(
    base: Model,
    trained: Model,
    path: str | os.PathLike[str],
    how: Combination,
    progress: Callable[[int, int], None] = lambda done, n: None,
) -> Extract:
    """Write the adapter of `base` that makes it nearly `trained`.

    how        its rank, or its error
    progress   called with the tensors that are compared, and all

    Labels, pooling and chat template of `trained` go with it where `base` has others. An older
    file at `path` stays whole until the new one is complete. Raises ModelError for models with
    other tensors or tokens, AdapterError where no matrix differs, NotFiniteError for numbers that
    are none.
    """
    _check_alike(base, trained)
    updates, result = dict[str, Update](), Extract({}, {})
    for number, (name, weight) in enumerate(base.parts.weights.items()):
        before = unpack(weight)
        change = unpack(trained.parts.weights[name]) - before
        if not np.isfinite(change).all():
            raise NotFiniteError(f"{name}: the models differ by what is no finite number")
        if not change.any():
            pass
        elif _is_held(base, name):
            updates[name], result.left_out[name] = _of_tensor(base, name, change, how)
        else:
            result.not_held[name] = _share(change, before)
        progress(number + 1, len(base.parts.weights))
    if not updates:
        names = f": {first_names([*result.not_held], 3)} alone" if result.not_held else ""
        raise AdapterError(f"the models differ in no matrix that an adapter holds{names}")
    warn_of_passed_over(base.parts, updates)
    about = base_keys(base) | base_metadata(base.file) | _metadata_of_texts(base, trained)
    write_adapter(path, base, updates, about)
    return result


def _metadata_of_texts(base: Model, trained: Model) -> dict[str, str]:
    """What whoever reads the update must know of texts, where the trained model has it anew."""
    old, new = ({key: m.file.word(key) for key in (LABELS, POOLING)} for m in (base, trained))
    template = template_in(trained.file)
    more = {} if template == template_in(base.file) else template
    return {key: word for key, word in {**new, **more}.items() if word and word != old.get(key)}


def _share(change: np.ndarray, of: np.ndarray) -> float:
    """The root mean square of a change as a part of that of the numbers before."""
    return float(np.linalg.norm(change)) / max(float(np.linalg.norm(of)), 1e-30)


def _check_alike(base: Model, trained: Model) -> None:
    """ModelError for models of other architectures, tensors or tokens."""
    ours, theirs = base.config.architecture, trained.config.architecture
    if ours != theirs:
        raise ModelError(f"{trained.file.path}: is {theirs}, wanted {ours} as {base.file.path}")
    shapes, new = ({n: w.shape for n, w in m.parts.weights.items()} for m in (base, trained))
    apart = [name for name in {**shapes, **new} if shapes.get(name) != new.get(name)]
    if apart:
        there, here = (sizes.get(apart[0]) or "missing" for sizes in (new, shapes))
        raise ModelError(
            f"{trained.file.path}: {apart[0]} is {there}, and {here} in {base.file.path}: an "
            "adapter wants the same tensors in both"
        )
    check_same_tokens(trained.file, base.file)


def _is_held(model: Model, name: str) -> bool:
    """Whether an adapter file may update a tensor, and llama.cpp load it."""
    spec = model.parts.decoder.tensors()[name]
    module = name.removesuffix(".weight").split(".")[-1]
    return spec.update(1) is not None and refusal(model.parts, module) is None


def _of_tensor(
    model: Model, name: str, change: np.ndarray, how: Combination
) -> tuple[Update, float]:
    """A tensor's update, and the part of its difference that is left out; experts one by one, of
    one rank."""
    factor = factor_of(model.parts.weights, name)
    factors = np.ones(1, np.float32) if factor is None else read(factor).reshape(-1)
    matrices = change if change.ndim == 3 else change[None]
    scaled = [m * f for m, f in zip(matrices, np.resize(factors, len(matrices)), strict=True)]
    full = min(change.shape[-2:])
    most = min(how.rank or full, full)
    each = [nearest_update(m, most, most) for m in scaled]
    rank = min(max(rank_of(s, how) for s in each), most)
    table = model.parts.decoder.tensors()[name].table
    update = as_update([s.halves(rank) for s in each], table, change.shape)
    energy = sum(s.energy for s in each)
    lost = sum(s.energy * s.left_out(rank) ** 2 for s in each)
    return update, float(np.sqrt(lost / energy))
