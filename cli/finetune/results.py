"""What a run tells and saves at its end."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from pyggml.cli.progress import Meter, rise
from pyggml.cli.show import row, say, size
from pyggml.errors import PyggmlError
from pyggml.lora import Adapter, Trainer


def say_result(trainer: Trainer) -> None:
    """The whole run, also what came before it was resumed."""
    history = trainer.history
    change = "loss {:.4f} → {:.4f}".format(*history.ends())
    if len(history.validations) > 1:
        first, last = history.validations[0], history.validations[-1]
        change += f", validation {first.loss:.4f} → {last.loss:.4f}"
    say()
    row("result", f"step {trainer.progress.step} of {trainer.n_steps}: {change}")
    if history.has_doubled:
        row("warning", rise(history))


def save(adapter: Adapter, meter: Meter, path: Path) -> None:
    """Write the adapter; if the disk refuses, the error says where else it was saved."""
    try:
        adapter.save(path)
    except PyggmlError as error:
        faults = [*error.faults, *rescued(adapter, meter, path)]
        raise PyggmlError(faults, error.about) from error
    row("adapter", f"{path}, {size(path.stat().st_size)}")


def rescued(adapter: Adapter, meter: Meter, path: Path) -> list[str]:
    """Save the last step's adapter in a temporary folder, so that an error costs no work; a clause
    that says where, or none if there was no step or no room."""
    if meter.last is None:
        return []
    spare = Path(tempfile.mkdtemp(prefix="pyggml-"), path.name)
    try:
        adapter.save(spare)
    except PyggmlError:
        spare.parent.rmdir()
        return []
    return [f"the adapter of step {meter.last.step} was saved as {spare}"]


def say_how_to_resume(trainer: Trainer, start: int, resumed: Callable[[Path], str]) -> None:
    step, folder = trainer.progress.step, trainer.config.checkpoint_dir
    if step == start:
        row("stopped", "before a step was made; nothing was written")
        return
    row("stopped", f"after step {step} of {trainer.n_steps}; the adapter is of that step")
    if folder is None:
        row("", "without --checkpoint-dir this run cannot be resumed")
        return
    row("resume", resumed(Path(folder)))


def say_how_to_use(model: Path, adapter: Path) -> None:
    given = shlex.join(["-m", str(model), "--lora", str(adapter)]) + ' -p "..."'
    say()
    row("use it", f"pyggml generate {given}")
    row("", f"llama-cli {given}")
