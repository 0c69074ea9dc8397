"""Settings that are lists → runs, one for each combination of values."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

import click

from pyggml.cli.commands.finetune.job import AUTO, SETTINGS_FLAGS, Job, job_of
from pyggml.cli.terminal.devices import WHERE
from pyggml.cli.terminal.exit import option
from pyggml.cli.terminal.kinds import FileKind
from pyggml.cli.terminal.options import ListType, ValueList
from pyggml.errors import ConfigError
from pyggml.files import replacing
from pyggml.files.json_text import read_object

MOST_RUNS = 1000
BESIDE = "sweep.json"
_MOST_BYTES = 1 << 20
_OWN = ("output", "checkpoint_dir", "resume", "cache_dir", "threads", "max_memory", *WHERE)
_WHOLE = ("dir", "kwargs", "columns", "template")  # ends of settings whose values may have commas


def with_lists(options: Sequence[click.Parameter]) -> list[click.Parameter]:
    """The same options, of which settings that are one number or one word take several."""
    names = {
        flags.get(f.name, f.name) for kind, flags in SETTINGS_FLAGS.items() for f in fields(kind)
    }
    plain = (click.INT, click.FLOAT, click.STRING)
    changed = []
    for each in options:
        name = each.name or ""
        if name in names and each.type in plain and not each.multiple and not name.endswith(_WHOLE):
            each = copy(each)
            each.type = ListType(each.type)
        changed.append(each)
    return changed


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One of the runs: its name, the settings by which it differs, and its job."""

    name: str
    varied: Mapping[str, Any]
    job: Job

    @property
    def values(self) -> dict[str, str]:
        """The settings by which it differs, with their values in words."""
        return {name: _word(value) for name, value in self.varied.items()}

    @property
    def words(self) -> str:
        """lr 0.001, lora_rank 8."""
        return ", ".join(f"{name} {word}" for name, word in self.values.items())


def runs_of(
    folder: Path, given: Mapping[str, Any], places: Mapping[str, str], faults: Sequence[str] = ()
) -> list[SweepRun]:
    """The runs of these parameters, of which some are `ValueList`s; the last one varies fastest.

    Raises ConfigError where there is no list, too many runs, or for a run whose settings clash.
    """
    varied = {name: value for name, value in given.items() if isinstance(value, ValueList)}
    if not varied:
        fault = "no setting has several values: wanted a list, such as --lr 1e-4,3e-4"
        raise ConfigError([*faults, fault])
    every = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    if len(every) > MOST_RUNS:
        raise ConfigError(f"these lists make {len(every):,} runs, wanted at most {MOST_RUNS:,}")
    runs = []
    for values in every:
        name = _name(values)
        own: dict[str, Any] = {"output": folder / f"{name}.gguf", "resume": AUTO}
        own |= {"checkpoint_dir": str(folder / f"{name}.points")}
        own |= {"cache_dir": given["cache_dir"] or str(folder / "tokens")}
        try:
            runs.append(SweepRun(name, values, job_of({**given, **values, **own}, places, faults)))
        except ConfigError as error:
            raise ConfigError(error.message(option), f"{name}: ") from None
    return runs


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(values: Mapping[str, Any]) -> str:
    """lr-0.001_lora-rank-8: of the settings alone, so that it is the same next time."""
    words = (f"{name.replace('_', '-')}-{_word(value)}" for name, value in values.items())
    return "_".join(re.sub(r"[^\w.+-]+", "-", word) for word in words)


def check_folder(folder: Path, runs: Sequence[SweepRun]) -> None:
    """Note in the folder what all its runs share. ConfigError if its runs share something else."""
    here, path = _common_settings(runs[0]), folder / BESIDE
    has_runs = path.exists() and any(folder.glob("*.metrics.jsonl"))
    there = _read_settings(path) if has_runs else here
    if there is None:
        raise ConfigError(f"{path}: is none that a sweep wrote: name another folder")
    differ = [n for n in {**there, **here} if there.get(n) != here.get(n)]
    if differ:
        pairs = ", ".join(f"{n} {there.get(n)} there, {here.get(n)} here" for n in differ[:3])
        raise ConfigError(f"{folder}: holds runs of other settings ({pairs}): name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as out:
        out.write(json.dumps(here, indent=1).encode())


def _common_settings(run: SweepRun) -> dict[str, str]:
    """What the runs have in common; a setting that varies stands there as that."""
    same = {n: v for n, v in run.job.identity().items() if n not in _OWN and v is not None}
    return {n: "varies" if n in run.varied else str(v) for n, v in same.items()}


def _read_settings(path: Path) -> dict[str, str] | None:
    """What a sweep noted of its runs: words by setting, an objective among them. None for any other
    file."""
    value = read_object(path, _MOST_BYTES)
    is_plain = all(isinstance(v, str) for v in value.values())
    return value if is_plain and {"model", "objective"} <= value.keys() else None


COMMON_SETTINGS = FileKind("the settings of a sweep", lambda path: _read_settings(path) is not None)
