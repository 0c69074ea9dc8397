"""Hears the reports of a run, and writes them where they stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyggml.lora.record.gradients import Watch, gradients_record
from pyggml.lora.record.loggers import Logger, logger, loggers_of
from pyggml.lora.record.metrics import MetricsFile
from pyggml.lora.record.records import Record, numbers_of, record_of
from pyggml.lora.trainer.loop import Trainer
from pyggml.lora.trainer.reports import Report, StepReport

_NOT_SHOWN = ("step", "n_steps", "epoch")


class Recorder:
    """A callback of `Trainer.run`, made after `Trainer.resume`; leaving its context closes files.

    output     the adapter: beside adapter.gguf lie adapter.metrics.jsonl and the loggers' folders
    log_to     names of LOGGERS, or NONE alone
    settings   what loggers show of how the run was made
    replaces   whether metrics replace a file that no run has written
    """

    def __init__(
        self,
        trainer: Trainer,
        output: Path,
        log_to: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        replaces: bool = False,
    ) -> None:
        self._trainer, self._output = trainer, output
        self._log_to, self._settings = loggers_of(log_to), settings or {}
        self._start = trainer.progress.step
        self.metrics = MetricsFile(metrics_beside(output), trainer.history, self._start, replaces)
        self.faults: list[str] = []  # why something is not written any more, which ends no run
        self._watch = Watch(trainer.parameters, trainer.model.devices, trainer.n_steps)
        trainer.before_update = self._watch.keep  # steps within a backward pass have no such time
        self._loggers: dict[str, Logger] = {}
        self._waiting: list[Record] = []  # told before the first step

    def __call__(self, report: Report) -> None:
        record = record_of(report)
        self.metrics.add(record)
        self._waiting += [record] * bool(self._log_to)
        if isinstance(report, StepReport):
            self._add_gradients(report)
        if self._log_to and (isinstance(report, StepReport) or self._loggers):
            self._log()

    def _add_gradients(self, report: StepReport) -> None:
        picture = self._watch(report.step, report.grad_norm)
        if picture is None:
            return
        record = gradients_record(picture)
        self.metrics.add(record)
        if self._log_to:  # numbers by layer are enough for these
            norms = zip(picture.layers, picture.layer_norms[0].tolist(), strict=True)
            self._waiting.append({"event": record["event"], "step": report.step, **dict(norms)})

    def _log(self) -> None:
        for name in self._log_to:
            try:
                self._pass_on(name)
            except Exception as error:  # whatever another's tool raises
                self.faults.append(f"{name}: {error}")
        self._log_to = [name for name in self._log_to if name in self._loggers]
        self._waiting.clear()

    def _pass_on(self, name: str) -> None:
        """What waits, to this logger, which is made before its first record."""
        to = self._loggers.pop(name, None)
        to = to or logger(name, self._output, self._settings, self._start)
        for record in self._waiting:
            kind = "train" if record["event"] == "step" else record["event"]
            numbers = numbers_of(record).items()
            to.log(record["step"], {f"{kind}/{k}": x for k, x in numbers if k not in _NOT_SHOWN})
        self._loggers[name] = to

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self._trainer.before_update = None
        self.metrics.close()
        if self.metrics.fault:
            self.faults.append(self.metrics.fault)
        for name, each in self._loggers.items():
            try:
                each.close()
            except Exception as failure:  # as above
                self.faults.append(f"{name}: {failure}")


def metrics_beside(output: Path) -> Path:
    """adapter.gguf -> adapter.metrics.jsonl."""
    return output.with_name(output.name.removesuffix(".gguf") + ".metrics.jsonl")
