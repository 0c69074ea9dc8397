"""The command line, understood: a job, and whether there is room and a place for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pyggml.cli import demo
from pyggml.cli.options import given_settings
from pyggml.cli.paths import check_output, check_space
from pyggml.errors import CheckpointError, ConfigError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig
from pyggml.lora.checkpoint import KEPT, existing, held

LORA_FLAGS = {"rank": "lora_rank", "alpha": "lora_alpha", "modules": "lora_modules"}
_HEADER_BYTES = 64 << 10  # more than the header of an adapter takes


@dataclass(frozen=True, slots=True)
class Job:
    """What to train, on what, how, and where the results go."""

    model: Path
    data: Path
    output: Path
    init: Path | None
    resume: Path | None
    prompt: str | None
    lora: LoraConfig
    reading: DataConfig
    train: TrainConfig


def job_of(given: Mapping[str, Any]) -> Job:
    """The job that these parameters ask for; None is what the user did not give."""
    given = dict(given)
    if given["init"] is not None:
        _check_init(given)
    if given["demo"]:
        demo.check()
        defaults: dict[str, Any] = {"model": demo.BASE, "data": demo.TEXT, "output": demo.OUTPUT}
        defaults |= {"prompt": demo.PROMPT, **demo.SETTINGS}
        of_file = LORA_FLAGS.values() if given["init"] is not None else ()
        given = given | {
            name: value
            for name, value in defaults.items()
            if given[name] is None and name not in of_file
        }
    flags = {"model": "-m MODEL.gguf", "data": "-f TEXT", "output": "-o ADAPTER.gguf"}
    missing = [flag for name, flag in flags.items() if given[name] is None]
    if missing:
        raise ConfigError(f"wanted {', '.join(missing)}, or --demo, which needs nothing else")
    if given["checkpoint_dir"] is None and given["resume"] is not None and given["resume"].is_dir():
        given = given | {"checkpoint_dir": str(given["resume"])}  # it goes on where it was
    if given["checkpoint_every"] is not None and given["checkpoint_dir"] is None:
        raise ConfigError("--checkpoint-every wants --checkpoint-dir, a folder for checkpoints")
    return Job(
        **{name: given[name] for name in (*flags, "init", "resume", "prompt")},
        lora=LoraConfig(**given_settings(LoraConfig, LORA_FLAGS, given)),
        reading=DataConfig(**given_settings(DataConfig, {}, given)),
        train=TrainConfig(**given_settings(TrainConfig, {}, given)),
    )


def _check_init(given: Mapping[str, Any]) -> None:
    """The file settles what the adapter is."""
    settled = [LORA_FLAGS.get(f.name, f.name) for f in fields(LoraConfig) if f.name != "seed"]
    clash = ["--" + name.replace("_", "-") for name in settled if given[name] is not None]
    if clash:
        raise ConfigError(
            f"--init takes rank, alpha and modules from its file: leave out {', '.join(clash)}"
        )


def check_places(job: Job) -> None:
    """What would fail after hours fails now."""
    check_output(job.output, {"model": job.model, "text": job.data, "checkpoint": job.resume})
    folder = job.train.checkpoint_dir
    if folder is not None and Path(folder).exists():
        if not Path(folder).is_dir():
            raise ConfigError(f"{folder}: is a file, wanted a folder for checkpoints")
        check_output(Path(folder, "step.gguf"), {})
        with held(Path(folder)):  # the run takes it again; a refusal shall come before the work
            pass
    if job.resume is not None and not job.resume.exists():
        raise CheckpointError(f"{job.resume}: does not exist, wanted a checkpoint to resume from")


def check_room(job: Job, n_adapter: int) -> None:
    """ConfigError if a disk lacks room for an adapter of so many bytes, or its checkpoints."""
    n_adapter += _HEADER_BYTES
    check_space(job.output, n_adapter)
    folder = job.train.checkpoint_dir
    if folder is not None:  # the numbers and two moments of each; one more than those that stay
        there = sum(path.stat().st_size for path in existing(Path(folder)))
        check_space(Path(folder), max(0, 3 * n_adapter * (KEPT + 1) - there))


def checkpoint_of(path: Path) -> Path:
    """A checkpoint, or the newest one in a folder."""
    if not path.is_dir():
        return path
    found = existing(path)
    if not found:
        raise CheckpointError(f"{path}: holds no checkpoint")
    return found[-1]
