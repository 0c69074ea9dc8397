"""TensorBoard, Weights & Biases and MLflow: experiment trackers, each an extra of the installation.

TensorBoard        adapter.tensorboard/, by the package tensorboardX
Weights & Biases   adapter.wandb/, by wandb; offline unless WANDB_MODE says otherwise
MLflow             adapter.mlflow/, by mlflow-skinny or mlflow, as files; MLFLOW_TRACKING_URI names
                   another place, such as a server
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import time_ns
from typing import Any, Protocol

from pyggml.errors import ConfigError, suggestion
from pyggml.extras import how_to_install

_PACKAGES = {  # by extra
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
_LONGEST = 500  # characters of a parameter, which every version of MLflow takes


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
        values = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
        about = {"project": "pyggml", "name": name, "config": values}
        self._run = wandb.init(dir=str(folder), mode=mode, settings=quiet, **about)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the experiment "pyggml" in a database of SQLite; a resumed run is one of its own,
    which says its start."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any], start: int) -> None:
        # Nothing of a run is told to anybody, nor how the database is made.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric: Callable[..., Any] = Metric
        place, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None
        if place is None:
            folder.mkdir(exist_ok=True)
            path = folder.absolute()
            place, artifacts = f"sqlite:///{path.as_posix()}/{DATABASE}", path.as_uri()
        self._client = MlflowClient(place)
        experiment = self._client.get_experiment_by_name("pyggml")
        number = experiment.experiment_id if experiment else None
        run = self._client.create_run(
            number or self._client.create_experiment("pyggml", artifact_location=artifacts),
            run_name=name,
            tags={"start_step": str(start)},
        )
        self._run = run.info.run_id
        params = [Param(key, str(value)[:_LONGEST]) for key, value in settings.items()]
        self._client.log_batch(self._run, params=params)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = time_ns() // 10**6
        metrics = [self._metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run)


DATABASE = "mlflow.db"  # in the folder of MLflow
NONE = "none"  # what TRL's report_to calls no logger
LOGGERS: Mapping[str, Callable[[Path, str, Mapping[str, Any], int], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def loggers_of(names: Sequence[str]) -> Sequence[str]:
    """The names without NONE, which stands alone."""
    return () if tuple(names) == (NONE,) else names


def check_loggers(names: Sequence[str]) -> None:
    """ConfigError for names of no logger, and for those whose package is not installed."""
    faults = []
    for name in loggers_of(names):
        if name not in LOGGERS:
            near = suggestion(name, LOGGERS)
            faults.append(f"--log-to {name} is unknown, wanted some of {', '.join(LOGGERS)}{near}")
        elif missing := [each for each in _PACKAGES[name] if find_spec(each) is None]:
            needs = f"--log-to {name} needs the package {' and '.join(missing)}"
            faults.append(f"{needs}: {how_to_install(name)}")
    if faults:
        raise ConfigError(faults)


def logger(name: str, output: Path, settings: Mapping[str, Any], start: int) -> Logger:
    """The logger of this name for the run that writes adapter.gguf: its folder lies beside that.

    start: steps that were made before; what was logged of later ones is of an abandoned run.
    """
    stem = output.name.removesuffix(".gguf")
    return LOGGERS[name](output.with_name(f"{stem}.{name}"), stem, settings, start)
