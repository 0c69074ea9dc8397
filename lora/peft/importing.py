"""An adapter of PEFT → one in llama.cpp's format."""

import os
import warnings
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np

from pyggml.errors import AdapterError
from pyggml.gguf.fields import brief
from pyggml.lora.adapter.file import Update, write_adapter
from pyggml.lora.adapter.targets import warn_of_passed_over
from pyggml.lora.peft import chat_template, settings, tensors
from pyggml.lora.peft.tensors import ModuleFactors
from pyggml.lora.peft.twins import Module, ModulePart, Twins
from pyggml.model import Model
from pyggml.models.adapter import TIED

# Number of an expert, or None for a tensor that is no stack of experts → its update.
_Updates = dict[int | None, Update]


def from_peft(
    model: Model, folder: str | os.PathLike[str], path: str | os.PathLike[str]
) -> dict[str, int]:
    """Write the adapter of a PEFT folder, for this model, as llama.cpp loads it; it carries the
    chat template of the folder, if that has one.

    Returns the rank of each module. An older file at `path` stays whole until the new one is
    complete. Raises AdapterError with whatever an adapter file cannot hold, or the model has no
    place for.
    """
    source, twins = Path(folder), Twins(model)
    how, carried = settings.read(source), chat_template.read(source)
    modules = tensors.read(source, 4 * sum(prod(i.shape) for i in model.file.tensors.values()))
    faults: list[str] = []
    ranks: dict[str, int] = {}
    placed: dict[str, _Updates] = {}
    dropped: dict[str, list[str]] = {}
    for name, given in modules.items():
        module = twins.find(name, (given.b.shape[0], given.a.shape[1]))
        if module is None:
            _note_unknown(model, twins, name, dropped, faults)
            continue
        named = module.name if module.n_expert else name
        rank, scale = how.rank_of(named), how.scale_of(named)
        if fault := _misfit(model, given, module, rank):
            faults.append(f"{brief(name)} {fault}")
            continue
        ranks[named] = rank
        _place(placed, given, module, float(np.float32(scale * rank)))
    updates = {t: _whole(model, t, placed[t], faults) for t in model.file.tensors if t in placed}
    if dropped and not placed:
        faults.append(f"all its modules are {' or '.join(dropped)}, wanted some of the text")
    if faults:
        raise AdapterError(faults[:10], f"{source}: ")
    _warn_of_dropped(dropped)
    warn_of_passed_over(model.parts, updates)
    write_adapter(path, model, updates, carried)
    return ranks


def _place(placed: dict[str, _Updates], given: ModuleFactors, module: Module, alpha: float) -> None:
    for p in module.parts:
        update = Update(*_halves(given, module, p), alpha)
        experts = placed.setdefault(p.tensor, {})
        is_some = p.rows.min() < 0 and p.expert in experts
        experts[p.expert] = _join(experts[p.expert], update) if is_some else update


def _join(*updates: Update) -> Update:
    """One update of a matrix that is the sum of these: their ranks in turn."""
    ranks = [len(u.a) for u in updates]
    b = [u.b * np.float32(u.alpha / rank) for u, rank in zip(updates, ranks, strict=True)]
    a = np.concatenate([u.a for u in updates])
    return Update(a, np.concatenate(b, axis=1), float(sum(ranks)))


def _note_unknown(
    model: Model, twins: Twins, name: str, dropped: dict[str, list[str]], faults: list[str]
) -> None:
    if why := twins.without_effect(name):
        dropped.setdefault(why, []).append(name)
    else:
        faults.append(_unknown(model, twins, name))


def _warn_of_dropped(dropped: Mapping[str, Sequence[str]]) -> None:
    for why, names in dropped.items():
        count = f"{len(names)} modules" if len(names) > 1 else "a module"
        warnings.warn(
            f"{count} {why} left out, without effect on text: {brief(', '.join(names))}",
            RuntimeWarning,
            stacklevel=3,
        )


def _unknown(model: Model, twins: Twins, name: str) -> str:
    if why := twins.change(name):
        return f"{brief(name)} cannot be updated: {why}"
    if name.endswith("lm_head") and model.parts.output_name != "output":
        return f"{brief(name)} has no tensor: this model's output matrix is its token embedding"
    return f"{brief(name)} is no module of this model that adapters update"


def _misfit(model: Model, given: ModuleFactors, module: Module, rank: int) -> str | None:
    """What of a module's A and B does not fit it."""
    n_out, n_in = module.shape
    if given.table != module.table:
        kinds = ("a matrix", "an embedding")
        return f"is an update of {kinds[given.table]}, wanted one of {kinds[module.table]}"
    if module.table and model.parts.output_name == module.parts[0].tensor.removesuffix(".weight"):
        return f"cannot be updated: {TIED}"
    if given.of_shape not in (None, module.shape):
        return (
            f"is of a matrix {given.of_shape}, wanted {module.shape}: was its vocabulary resized?"
        )
    wide = rank * max(module.n_expert, 1)
    shapes = ((rank, n_out), (n_in, rank)) if module.table else ((wide, n_in), (n_out, wide))
    if (given.a.shape, given.b.shape) != shapes:
        return (
            f"has A {given.a.shape} and B {given.b.shape}, wanted {shapes[0]} and {shapes[1]} for "
            f"rank {rank}, as in {settings.NAME}"
        )
    return None


def _halves(
    given: ModuleFactors, module: Module, part: ModulePart
) -> tuple[np.ndarray, np.ndarray]:
    """A tensor's A and B as an adapter file has them: a table's A (n_rows, rank), experts' stacks.

    PEFT's A (n_expert · rank, n_in) lies by experts, its B (n_out, rank · n_expert) by ranks.
    """
    a, b = given.a, given.b
    if module.table:
        return a.T, b
    if module.n_expert:
        a = a.reshape(module.n_expert, -1, a.shape[1])
        b = b.reshape(b.shape[0], -1, module.n_expert).transpose(2, 0, 1)
    if module.upright:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    a, b = a[..., part.columns], b[..., part.rows, :]
    if part.rows.min() < 0:
        b[part.rows < 0] = 0
    if part.factor is not None:
        b = b * part.factor[:, None]
    if part.rows.ndim == 1:
        return a, b
    a = np.broadcast_to(a, (len(b), *a.shape))  # the same for each head
    return (b.swapaxes(1, 2), a.swapaxes(1, 2)) if part.upright else (a, b)


def _whole(model: Model, tensor: str, updates: _Updates, faults: list[str]) -> Update:
    """The update of a tensor. An expert that has none gets zeros."""
    if None in updates:
        return updates[None]
    first = next(iter(updates.values()))
    if any((len(u.a), u.alpha) != (len(first.a), first.alpha) for u in updates.values()):
        faults.append(f"the experts of {tensor} have several ranks or alphas, wanted one for all")
        return first
    n = model.parts.decoder.tensors()[tensor].shape[0]
    a, b = (np.zeros((n, *x.shape), np.float32) for x in (first.a, first.b))
    for i, update in updates.items():
        a[i], b[i] = update.a, update.b
    return Update(a, b, first.alpha)
