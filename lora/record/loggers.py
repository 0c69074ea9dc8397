"""TensorBoard and Weights & Biases: other tools that show runs, each an extra of the installation.

TensorBoard        adapter.tensorboard/, by the package tensorboardX
Weights & Biases   adapter.wandb/, by wandb; offline unless WANDB_MODE says otherwise
"""

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

from pyggml.errors import ConfigError

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # by extra


class Logger(Protocol):
    """A tool that shows numbers over steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> None:
        from tensorboardX import SummaryWriter

        # What an earlier run, or one that was killed, logged of the steps to come is not shown. Its
        # file stays: names have seconds, which two runs may share.
        self._writer = SummaryWriter(
            str(folder), purge_step=start and start + 1, filename_suffix=f".{time_ns()}"
        )
        rows = (f"| {k} | {v} |" for k, v in settings.items())
        self._writer.add_text("settings", "\n".join(["| setting | value |", "|---|---|", *rows]))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> None:
        import wandb

        folder.mkdir(exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        known = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
        about = {"project": "pyggml", "name": name, "config": known}
        self._run = wandb.init(dir=str(folder), mode=mode, settings=quiet, **about)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check_loggers(names: Iterable[str]) -> None:
    """ConfigError for names of no logger, and for those whose package is not installed."""
    faults = []
    for name in names:
        if name not in LOGGERS:
            faults.append(f"--log-to {name} is unknown, wanted some of {', '.join(LOGGERS)}")
        elif find_spec(_PACKAGES[name]) is None:
            faults.append(
                f"--log-to {name} needs the package {_PACKAGES[name]}: pip install 'pyggml[{name}]'"
            )
    if faults:
        raise ConfigError(faults)


def logger(name: str, output: Path, settings: Mapping[str, Any], start: int) -> Logger:
    """The logger of this name for the run that writes adapter.gguf: its folder lies beside that.

    start: steps that were made before; what was logged of later ones is of an abandoned run.
    """
    stem = output.name.removesuffix(".gguf")
    return LOGGERS[name](output.with_name(f"{stem}.{name}"), stem, settings, start)
