"""Hears the reports of a run, and writes them where they stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pyggml.lora.record.layers import norm_by_layer
from pyggml.lora.record.loggers import Logger, logger
from pyggml.lora.record.metrics import MetricsFile
from pyggml.lora.record.records import Record, numbers_of, record_of
from pyggml.lora.reports import Report, StepReport
from pyggml.lora.train import Trainer

_NOT_SHOWN = ("step", "n_steps", "epoch")
_SAMPLED = 50  # steps of a run whose gradient is measured block by block


class Recorder:
    """A callback of `Trainer.run`, made after `Trainer.resume`; leaving its context closes files.

    output     the adapter: beside adapter.gguf lie adapter.metrics.jsonl and the loggers' folders
    log_to     names of LOGGERS
    settings   what loggers show of how the run was made
    """

    def __init__(
        self,
        trainer: Trainer,
        output: Path,
        log_to: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._trainer, self._output = trainer, output
        self._log_to, self._settings = log_to, settings or {}
        self._start = trainer.progress.step
        self.metrics = MetricsFile(metrics_beside(output), trainer.history, self._start)
        self.faults: list[str] = []  # why something is not written any more, which ends no run
        self._loggers: dict[str, Logger] = {}
        self._waiting: list[Record] = []  # told before the first step

    def __call__(self, report: Report) -> None:
        record = record_of(report)
        if isinstance(report, StepReport) and self._is_sampled(report.step):
            record["grad_norm_by_layer"] = self._norms(report.grad_norm)
        self.metrics.add(record)
        if not self._log_to:
            return
        self._waiting.append(record)
        if isinstance(report, StepReport) or self._loggers:
            self._log()

    def _is_sampled(self, step: int) -> bool:
        n_steps = self._trainer.n_steps
        return step in (1, n_steps) or step % max(1, n_steps // _SAMPLED) == 0

    def _norms(self, norm: float) -> dict[str, float]:
        p = self._trainer.parameters
        self._trainer.model.devices.gather(p.buffers["gradient"])
        return norm_by_layer(p.gradients, norm)

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
