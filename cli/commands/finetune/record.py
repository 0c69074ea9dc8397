"""What of a run stays beside its adapter: metrics, logs of other tools, and the report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from pyggml.cli.commands.finetune import memory
from pyggml.cli.commands.finetune.job import Job
from pyggml.cli.terminal import samples
from pyggml.cli.terminal.exit import command_line
from pyggml.cli.terminal.paths import beside
from pyggml.cli.terminal.row_losses import RowLoss
from pyggml.cli.terminal.samples import Reading
from pyggml.cli.terminal.show import progress_lines, row, size
from pyggml.errors import PyggmlError
from pyggml.files.json_text import finite
from pyggml.lora import Report, StepReport, Trainer
from pyggml.lora.data.report import data_report, language_report
from pyggml.lora.record import Recorder, append, metrics_beside
from pyggml.model import Model

Rows = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ReportTable:
    """What was measured of the run's result: rows of words, the first of which has the columns."""

    title: str
    rows: Sequence[Sequence[str]]


def recorder(job: Job, trainer: Trainer, about: Rows) -> Recorder:
    """What hears the reports; it has been told what the run is, for its metrics.

    about: the rows that were told before the first step
    """
    settings = _settings(job)
    record = Recorder(trainer, job.output, job.log_to or (), settings, job.is_forced)
    plain = {name: v if _is_plain(v) else str(v) for name, v in settings.items()}
    record.metrics.add(
        {
            "event": "run",
            "step": trainer.progress.step,
            "settings": plain,
            "about": [*map(list, _merge_rows(about))],
            "data": asdict(data_report(trainer.corpus, trainer.model.tokenizer)),
        }
    )
    return record


def say_faults(recorded: Recorder) -> None:
    for fault in recorded.faults:
        row("warning", fault)


def save_answers(
    job: Job, trainer: Trainer, prompt: str, answers: Rows, losses: Sequence[RowLoss]
) -> None:
    """Add the answers before and after, the losses of some rows, and the languages of rows to the
    metrics; a full disk costs no more than these."""
    rows = [[row.text, *map(finite, row.losses)] for row in losses]
    record = {"event": "answers", "step": trainer.progress.step, "prompt": prompt}
    record |= {"answers": [*map(list, answers)]} | ({"rows": rows} if rows else {})
    most = memory.resident() + memory.LANGUAGES + memory.MARGIN
    if job.max_memory is None or most <= job.max_memory:
        languages = language_report(trainer.corpus, trainer.model.tokenizer)
        record["languages"] = asdict(languages)
    else:
        row("languages", f"of rows are not told: it takes {size(memory.LANGUAGES)}")
    _append(job, record)


def answer_on_the_way(
    job: Job, report: Report, model: Model, prompt: np.ndarray, recorded: Recorder
) -> None:
    """After a step where that is due print the model's answer to the prompt, and add it to the
    metrics. That after the last step follows anyway."""
    if not (job.answer_every and isinstance(report, StepReport)):
        return
    step = report.step
    if step % job.answer_every or step == report.n_steps:
        return
    with progress_lines():
        question, answer = samples.answer_at(step, model, prompt)
    about = {"prompt": question, "answer": answer}
    recorded.metrics.add({"event": "sample", "step": step, "sampled": about})


def save_table(job: Job, trainer: Trainer, table: ReportTable) -> None:
    """Add a table to the metrics, for the report; a full disk costs no more than that."""
    _append(job, {"event": "table", "step": trainer.progress.step, **asdict(table)})


def _append(job: Job, record: dict[str, Any]) -> None:
    try:
        append(metrics_beside(job.output), record)
    except PyggmlError as error:
        row("warning", str(error))


def save_report(
    job: Job, about: Rows, prompt: str = "", answers: Rows = (), readings: Sequence[Reading] = ()
) -> None:
    """Write the report, unless the user wants none; a full disk costs no more than that.

    about: the rows that were told before the first step
    """
    if job.report is False:
        return
    from pyggml.cli.web.report.run_page import Page, write  # templates: no step waits for them

    path = beside(job.output, ".html")
    title = job.output.name.removesuffix(".gguf")
    date = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    page = Page(
        title, _merge_rows(about), _settings(job), prompt, answers, readings,
        command=command_line(), date=date,
    )  # fmt: skip
    try:
        write(path, page, metrics_beside(job.output))
    except PyggmlError as error:
        row("warning", str(error))
    else:
        row("report", str(path))


def _merge_rows(rows: Rows) -> Rows:
    """With the rows that have no label put behind those that they go on with."""
    merged: list[tuple[str, str]] = []
    for label, text in rows:
        if label or not merged:
            merged.append((label, text))
        else:
            merged[-1] = (merged[-1][0], f"{merged[-1][1]}\n{text}")
    return merged


def _settings(job: Job) -> dict[str, object]:
    return {
        name: _as_argument(value) for name, value in job.identity().items() if value is not None
    }


def _is_plain(value: object) -> bool:
    """Whether JSON has it."""
    return isinstance(value, int | str) or (isinstance(value, float) and isfinite(value))


def _as_argument(value: object) -> object:
    """As the command line would have it."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, Path) else value
