"""What makes a run what it is: its model, text, adapter, settings and trained tensors, by part.

A checkpoint holds it as JSON. A run goes on from one where all is alike but the settings that may
change. Settings that are missing there are as they were before there were any to choose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyggml.backends.cpu import pages
from pyggml.errors import CheckpointError, Fault, cause_of
from pyggml.gguf.identity import Identity, identity
from pyggml.graph.arrays import read
from pyggml.lora.config import DataConfig, LoraConfig, TrainConfig
from pyggml.lora.objectives import USUAL
from pyggml.lora.objectives.choice import usual
from pyggml.lora.objectives.rewarded import REWARD_FILES
from pyggml.lora.trainer.learning_rate import OwnLearningRate
from pyggml.model import Model

if TYPE_CHECKING:
    from pyggml.lora.trainer.plan import RunPlan

Run = Mapping[str, Any]  # what makes a run what it is, by part
LENGTH = "length"  # of a run: its steps, which do not make it what it is
TEMPLATE = "template"  # a setting: the digest of the template that chats were written by
_EDGE = 1 << 20  # bytes at both ends of a model file that an older identity is made of
_OTHER = {"model": "is another model than that run's", "text": "is another text than that run's"}
# Settings that follow from what another one names: that one, and what is said where they differ.
# Older runs have none.
_CHANGED = {
    TEMPLATE: ("chat_template", "has another text than in that run: the template was changed"),
    REWARD_FILES: ("reward", "has another text than in that run: a file of rewards was changed"),
}
# What held in runs that are older than a setting, or that were not given it.
_TRAIN = {**USUAL.settle(TrainConfig()).shared_by_runs(), "warmup_ratio": 0.0}
_USUAL = {
    "adapter": LoraConfig().shared_by_runs(),
    "settings": {**DataConfig().shared_by_runs(), **_TRAIN, **usual()},
}
_FREE = {
    f.name for kind in (DataConfig, TrainConfig) for f in fields(kind) if f.metadata["may_change"]
}


# -- of this run --------------------------------------------------------------------------------


def run_identity(plan: RunPlan) -> Run:
    """What a checkpoint must share with this run."""
    model = str(identity(plan.model.file))
    _release(plan)
    return {
        "model": model,
        "text": plan.corpus.digest(),
        "adapter": plan.parameters.about,
        "settings": {
            **plan.corpus.about,
            "ctx": plan.corpus.train.ctx,
            **plan.config.shared_by_runs(),
            **_of_objective(plan),
            **_of_schedule(plan),
        },
        "tensors": {name: list(t.shape) for name, t in plan.parameters.tensors.items()},
    }


def _release(plan: RunPlan) -> None:
    """Release the file's pages of trained tensors: their numbers are in memory."""
    file = plan.model.file
    for name in file.tensors.keys() & plan.parameters.tensors.keys():
        if release := pages.release(file.data(name)):
            release()


def _of_schedule(plan: RunPlan) -> dict[str, Any]:
    """A schedule of the caller's has its function's name in the place of the settings'."""
    rate = plan.learning_rate
    return {"lr_scheduler": rate.name} if isinstance(rate, OwnLearningRate) else {}


def _of_objective(plan: RunPlan) -> dict[str, Any]:
    """The objective, its settings, and the adapters of the model that it compares with."""
    objective, reference = plan.objective, plan.reference
    about = {"objective": objective.name, **objective.shared_by_runs()}
    if objective.has_reference and reference is not None and reference.adapters:
        about["reference"] = _adapters_digest(reference)
    return about


def _adapters_digest(model: Model) -> str:
    """SHA-256 of a model's adapters."""
    digest = hashlib.sha256()
    for pairs in model.adapters:
        for name, pair in pairs.items():
            digest.update(f"{name} {pair.scale!r}".encode())
            for t in (pair.a, pair.b):
                digest.update(read(t).tobytes())
    return digest.hexdigest()[:32]


# -- of an older version ------------------------------------------------------------------------


def has_older_identity(run: Run) -> bool:
    """Whether a stored run knows its model by `older_identity`."""
    return bool(run.get("model")) and Identity.of(run["model"]) is None


def older_identity(paths: Iterable[Path]) -> str:
    """What older checkpoints have of a model: the size of its files and the SHA-256 of the first
    and last MiB of each.

    Raises CheckpointError if one cannot be read.
    """
    size, digest = 0, hashlib.sha256()
    for path in paths:
        try:
            n = path.stat().st_size
            with path.open("rb") as file:
                digest.update(file.read(_EDGE))
                file.seek(max(n - _EDGE, 0))
                digest.update(file.read(_EDGE))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {cause_of(error)}") from error
        size += n
    return f"{size} bytes, {digest.hexdigest()[:32]}"


# -- of two runs --------------------------------------------------------------------------------


def differences_to_stored(stored: Run, run: Run) -> list[Fault]:
    """What sets the run of a checkpoint apart from this one."""
    there, here = _fill_in(stored), _fill_in(_plain(run))
    there.pop(LENGTH, None)
    settings = there.get("settings")
    for name in _CHANGED:
        if not isinstance(settings, dict) or name not in settings:
            here.get("settings", {}).pop(name, None)
    return differences(there, here)


def _fill_in(run: Run) -> dict[str, Any]:
    """The run without what may change, with the usual settings of each part where it has none, or
    None."""
    whole, usual_run = dict(run), _plain(_USUAL)
    for part, settings in run.items():
        if isinstance(settings, dict):
            stated = {n: v for n, v in settings.items() if v is not None and n not in _FREE}
            whole[part] = usual_run.get(part, {}) | stated
    return whole


def _plain(run: Run) -> dict[str, Any]:
    """As it reads back from JSON: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(run))
    return plain


def differences(stored: Run, own: Run) -> list[Fault]:
    """What sets two runs apart: the settings, and nothing that follows from them."""
    by_part: dict[str, list[Fault]] = {}
    for part in sorted({*stored, *own}):
        theirs, ours = stored.get(part), own.get(part)
        if isinstance(theirs, dict) and isinstance(ours, dict):
            names = sorted({*theirs, *ours})
            pairs = [(name, theirs.get(name), ours.get(name)) for name in names]
            by_part[part] = [_setting(part, n, a, b) for n, a, b in pairs if _differ(a, b)]
        elif _differ(theirs, ours):
            by_part[part] = [(part, _other_part(part, theirs, ours))]
    if any(by_part.get(cause) for cause in ("adapter", "model")):
        by_part.pop("tensors", None)
    elif by_part.get("tensors"):
        by_part["tensors"] = ["other tensors are trained"]
    if by_part.get("settings"):
        by_part.pop("text", None)
    return [fault for faults in by_part.values() for fault in faults]


def _setting(part: str, name: str, theirs: object, ours: object) -> Fault:
    if name in _CHANGED and theirs is not None and ours is not None:
        return _CHANGED[name]
    return (f"{part}.{name}", _both_values(theirs, ours))


def _other_part(part: str, theirs: object, ours: object) -> str:
    there, here = Identity.of(theirs), Identity.of(ours)
    clause = there.difference(here) if there and here else ""
    return ": it ".join(filter(None, [_OTHER.get(part) or _both_values(theirs, ours), clause]))


def _differ(theirs: object, ours: object) -> bool:
    return theirs != ours or type(theirs) is not type(ours)


def _both_values(theirs: object, ours: object) -> str:
    there, here = ("not given" if v is None else str(v)[:60] for v in (theirs, ours))
    return f"is {there} there and {here} here"
