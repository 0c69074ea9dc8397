"""The options of `pyggml sweep`: those of `pyggml finetune`, and how the runs are made."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pyggml.cli.commands.finetune import config_file
from pyggml.cli.commands.finetune.command import command as finetune
from pyggml.cli.commands.finetune.job import files_read, save_settings, with_hub_files
from pyggml.cli.commands.sweep.halving import Halving
from pyggml.cli.commands.sweep.lists import (
    BESIDE,
    COMMON_SETTINGS,
    SweepRun,
    check_folder,
    runs_of,
    with_lists,
)
from pyggml.cli.commands.sweep.progress import run_all
from pyggml.cli.commands.sweep.results import OVER, PAGE, cells, results_of, write_page
from pyggml.cli.terminal.devices import device_options
from pyggml.cli.terminal.exit import STOPPED
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption, by_group, is_forced
from pyggml.cli.terminal.hints import program
from pyggml.cli.terminal.lines import say_lines
from pyggml.cli.terminal.options import words
from pyggml.cli.terminal.places import Output, OutputFolder, check_places
from pyggml.cli.terminal.show import plural, printable, row, say
from pyggml.cli.web.report import REPORT
from pyggml.errors import ConfigError
from pyggml.lora.objectives.choice import ObjectiveConfig
from pyggml.lora.ranks.started import n_processes

_NOT_OF_SWEEPS = ("output", "resume", "checkpoint_dir", "preview", "dry_run", "ranks")


def _sweep(config: Path | None, output: Path | None, halving: int | None, **given: Any) -> int:
    """The exit code. What the command line gives goes over the file."""
    again = {"config": config, "output": output, "halving": halving, **given}
    settings = config_file.of_command_line(again, command, config)
    values = {**settings.values}
    folder, factor = values.pop("output"), values.pop("halving")
    if folder is None:
        raise ConfigError("wanted -o FOLDER, where the runs lie")
    values |= dict.fromkeys(_NOT_OF_SWEEPS)
    if values["threads"] is None and n_processes() > 1:
        values["threads"] = max((os.cpu_count() or 1) // n_processes(), 1)
    runs = runs_of(folder, values, settings.places, settings.faults)
    forced = is_forced(click.get_current_context())
    jobs = [replace(with_hub_files(r.job), is_forced=forced) for r in runs]
    if jobs[0].n_ranks > 1:
        several = f"{jobs[0].device} is a process for each, and a run of a sweep is one"
        raise ConfigError(f"--device {several}: wanted one device, or --split for its blocks")
    runs = [SweepRun(r.name, r.varied, job) for r, job in zip(runs, jobs, strict=True)]
    _check_places(folder, runs, values, config)
    check_folder(folder, runs)
    every = runs[0].job.train.val_every
    judging = None if factor is None else Halving(folder, runs, factor, every)
    command_line = shlex.join([*program("sweep"), *words(command.params, again)])
    whole = run_all(runs, judging, command_line, partial(save_settings, options=finetune.params))
    return _tell(folder, runs, whole, command_line)


def _check_places(
    folder: Path, runs: Sequence[SweepRun], values: dict[str, Any], config: Path | None
) -> None:
    """ConfigError if a file of the sweep, or of one of its runs, would replace another kind of file
    or what is read."""
    read = files_read(runs[0].job, finetune.params, values, config)
    own = [Output(folder / BESIDE, COMMON_SETTINGS), Output(folder / PAGE, REPORT)]
    outputs = [*own, *(o for r in runs for o in r.job.outputs)]
    check_places(outputs, read, runs[0].job.is_forced, makes_folder=False)


def _tell(folder: Path, runs: Sequence[SweepRun], whole: bool, again: str) -> int:
    """Print the table and write the page; the exit code."""
    results, notes = results_of(runs), _notes(runs)
    say()
    say_lines([tuple(map(printable, line)) for line in cells(results)])
    for text in notes:
        row("note", text)
    best = results[0]
    if best.loss is not None:
        row("best", f"{best.run.words}: {best.run.job.output}")
    row("page", str(write_page(folder, results, notes)))
    n_running = sum(r.state == "running" for r in results)
    n_left = sum(r.state not in OVER for r in results) - n_running
    if n_running:
        row("left", f"{plural(n_running, 'run')} of another process, under way")
    if n_left:
        row("left", f"{plural(n_left, 'run')}; {again} goes on")
    return 0 if whole else STOPPED


def _notes(runs: Sequence[SweepRun]) -> list[str]:
    """What is to be known of the losses beside each other."""
    of_objective = {f.name for f in fields(ObjectiveConfig)} | {"preference_beta"}
    other = [n for n in runs[0].varied if n in of_objective]
    fault = "losses of different objectives, or of different settings of one, do not compare"
    return [f"{fault}: {', '.join(other)}"] if other else []


_OF_BLOCKS = {o.name: o for o in device_options()}  # of several devices, not processes
_OF_RUNS = [o for o in finetune.params if o.expose_value and o.name not in _NOT_OF_SWEEPS]
_OPTIONS = [
    *with_lists([_OF_BLOCKS.get(o.name, o) for o in _OF_RUNS]),
    GroupedOption(
        ["-o", "--output"],
        type=OutputFolder(),
        metavar="FOLDER",
        group="output",
        common=True,
        help="folder of the runs: adapters, their metrics and pages, and sweep.html; runs that "
        "are there already are not made again",
        brief="folder of the runs",
    ),
    GroupedOption(
        ["--halving"],
        type=click.IntRange(min=2),
        metavar="N",
        group="output",
        common=True,
        help="successive halving: at its validations 1, N, N², … a run goes on only if it is among "
        "the best 1/N of those that came as far (wants optuna: pyggml[sweep])",
        brief="end hopeless runs early: keep the best 1/N",
    ),
]

command = GroupedCommand(
    "sweep",
    callback=_sweep,
    help="Fine-tune once for each combination of settings that are lists, and compare.\n\n"
    "The command again goes on where it was stopped; started several times at once, as mpiexec "
    "does, the processes share the runs.",
    quiet="progress",
    asks=False,
    examples=[
        "pyggml sweep -m model.gguf -f chats.jsonl -o runs --lr 1e-4,3e-4,1e-3",
        "pyggml sweep -m a.gguf -f a.jsonl -o runs --lora-rank 8,16,32 --halving 3",
        "mpiexec -n 4 pyggml sweep -m a.gguf -f a.jsonl -o runs --seed 1,2,3,4",
    ],
    params=by_group(_OPTIONS),
)
