"""An adapter in llama.cpp's format → a folder that PEFT loads."""

import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from pyggml.errors import AdapterError, first_names
from pyggml.files import new_folder
from pyggml.gguf.fields import brief
from pyggml.graph.arrays import array, read
from pyggml.lora.peft import chat_template, settings, tensors
from pyggml.lora.peft.twins import EXPERTS, Module, ModulePart, Twins
from pyggml.model import Model
from pyggml.models import LoraPair, LoraPairs
from pyggml.models.adapter import read_adapter

_Halves = tuple[np.ndarray, np.ndarray]


def to_peft(
    model: Model,
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    base: str | None = None,
) -> dict[str, int]:
    """Write an adapter file of this model as a folder that PEFT loads for the same model.

    base: the model's name or folder in transformers. Returns the rank of each module. The folder
    appears when it is complete, with the adapter's chat template. Raises AdapterError for a file
    that does not fit the model, and for tensors that are no module of transformers' class;
    PyggmlError if the folder is not empty or the disk refuses.
    """
    pairs, twins = read_adapter(path, model.parts), Twins(model)
    modules = _modules(path, pairs, twins)
    updates = {name: _halves(module, pairs) for name, module in modules.items()}
    ranks = {name: b.shape[-1] for name, (_, b) in updates.items()}
    scales = {name: _first(module, pairs).scale for name, module in modules.items()}
    stacks = {name for name, module in modules.items() if module.n_expert}
    single = {n for n in modules.keys() - stacks if n.endswith(twins.layout.by_weight)}
    targets = {name: f"{name}.weight" if name in single else name for name in modules}
    _warn(path, modules, twins.layout.warned)
    with new_folder(folder) as partial:
        settings.write(
            partial / settings.NAME,
            {targets[name]: rank for name, rank in ranks.items()},
            {targets[name]: scale for name, scale in scales.items()},
            target_modules=_short(modules.keys() - stacks - single, twins.modules),
            target_parameters=sorted(targets[name] for name in stacks | single) or None,
            base_model_name_or_path=base,
            fan_in_fan_out=twins.layout.conv1d,
        )
        stored = {
            n.replace(*twins.layout.stored): pair
            for n, pair in _with_names(updates, stacks).items()
        }
        tables = {n.replace(*twins.layout.stored) for n, m in modules.items() if m.table}
        tensors.write(partial / tensors.NAME, stored, tables)
        chat_template.write(partial, Path(path))
    return ranks


def _modules(path: str | os.PathLike[str], pairs: LoraPairs, twins: Twins) -> dict[str, Module]:
    """The modules that the file updates, by name. Raises AdapterError for other tensors."""
    modules = {
        name: module
        for name, module in twins.modules.items()
        if any(p.tensor in pairs for p in module.parts)
    }
    placed = {p.tensor for module in modules.values() for p in module.parts}
    if faults := [f"{brief(t)} {_why_no_module(twins, t)}" for t in pairs if t not in placed]:
        raise AdapterError(faults[:10], f"{path}: ")
    return modules


def _warn(path: str | os.PathLike[str], modules: Iterable[str], warned: Mapping[str, str]) -> None:
    for ending, why in warned.items():
        if names := [name for name in modules if name.endswith(ending)]:
            warnings.warn(f"{path}: {first_names(names)}: {why}", RuntimeWarning, stacklevel=3)


def _why_no_module(twins: Twins, tensor: str) -> str:
    """Why an update of this tensor has no place in a PEFT folder."""
    why = twins.changed.get(tensor)
    return f"cannot be a module's: {why}" if why else "is no module of the model's class"


def _first(module: Module, pairs: LoraPairs) -> LoraPair:
    return next(pairs[p.tensor] for p in module.parts if p.tensor in pairs)


def _halves(module: Module, pairs: LoraPairs) -> _Halves:
    """A module's A and B. Each other A among its tensors is further ranks, with B of its rows."""
    first = _first(module, pairs)
    if module.table:
        return read(first.a).T, read(first.b)
    n_out, n_in = module.shape[::-1] if module.upright else module.shape
    halves: list[_Halves] = []
    for p in module.parts:
        if p.tensor not in pairs:
            continue
        pair = pairs[p.tensor]
        narrow, b = _as_in_module(pair, p)
        a = np.empty((*narrow.shape[:-1], n_in), np.float32)
        a[..., p.columns] = narrow
        if pair.scale != first.scale:
            b = b * np.float32(pair.scale / first.scale)
        wide = next((wide for other, wide in halves if np.array_equal(other, a)), None)
        if wide is None:
            wide = np.zeros((*b.shape[: -1 - p.rows.ndim], n_out, pair.rank), np.float32)
            halves.append((a, wide))
        wide[..., p.rows, :] = b
    a, b = np.concatenate([a for a, _ in halves], -2), np.concatenate([b for _, b in halves], -1)
    return (b.swapaxes(1, 2), a.swapaxes(1, 2)) if module.upright else (a, b)


def _as_in_module(pair: LoraPair, part: ModulePart) -> _Halves:
    """A and B of a tensor, or of one of its experts; of a matrix for each head the A of all, and B
    by heads."""
    a, b = array(pair.a), array(pair.b)
    if part.expert is not None:
        a, b = a[part.expert], b[part.expert]
    if part.factor is not None:
        b = b / part.factor[:, None]
    if part.rows.ndim == 1:
        return a, b
    if part.upright:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    if (a != a[0]).any():
        raise AdapterError(
            f"{part.tensor}: heads have updates of their own, and the module of transformers' "
            "class, kv_b_proj, is one matrix for all: merge the adapter instead"
        )
    return a[0], b


def _with_names(updates: Mapping[str, _Halves], stacks: set[str]) -> dict[str, _Halves]:
    """The updates as PEFT's tensors: of experts A (n_expert · rank, n_in) lies by experts and B
    (n_out, rank · n_expert) by ranks; the first of two parameters is that of the base layer."""
    by_name = {}
    for name, (a, b) in updates.items():
        if name not in stacks:
            by_name[name] = (a, b)
            continue
        experts, parameter = name.rsplit(".", 1)
        later = [*EXPERTS][[*EXPERTS].index(parameter) + 1 :]
        inner = any(f"{experts}.{other}" in stacks for other in later)
        flat = a.reshape(-1, a.shape[-1]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)
        by_name[f"{experts}.base_layer" if inner else experts] = flat
    return by_name


def _short(chosen: Collection[str], names: Iterable[str]) -> list[str]:
    """The last words of the chosen modules' names if no other module has one, else whole names;
    these too where a class may read pictures, by modules of the same words."""
    words = {name.rsplit(".", 1)[-1] for name in chosen}
    of_text = any(".language_model." in name for name in chosen)
    if not of_text and all(name in chosen for name in names if name.rsplit(".", 1)[-1] in words):
        return sorted(words)
    return sorted(chosen)
