"""The options of `pyggml-finetune`."""

import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from pyggml.cli.commands.finetune import config_file
from pyggml.cli.commands.finetune.job import (
    LORA_FLAGS,
    OBJECTIVE_FLAGS,
    Job,
    check_shared,
    files_read,
    job_of,
    save_settings,
    with_hub_files,
)
from pyggml.cli.commands.finetune.memory import memory_settings
from pyggml.cli.commands.finetune.record import ReportTable
from pyggml.cli.commands.finetune.stages import Around, Watcher, run
from pyggml.cli.terminal.devices import device_options
from pyggml.cli.terminal.exit import FAILED, STOPPED, silence, words_again
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption, by_group, is_forced
from pyggml.cli.terminal.hints import program
from pyggml.cli.terminal.kinds import ADAPTER
from pyggml.cli.terminal.options import ADAPTERS, ONE_MODEL, Names, Size, settings_options, words
from pyggml.cli.terminal.places import PATH, FileWord, OutputPath, check_places
from pyggml.errors import PyggmlError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig
from pyggml.lora.objectives.choice import ObjectiveConfig, defaults_of_runs
from pyggml.lora.ranks import Ranks, ranks_of_process
from pyggml.lora.ranks.local import start
from pyggml.lora.record import LOGGERS
from pyggml.requantize import check_file_type

Typed = tuple[click.Command, Mapping[str, Any]]  # a command, and its parameters as they were given


def fine_tune(
    config: Path | None,
    given: Mapping[str, Any],
    watch: Watcher | None = None,
    measure: Callable[[], ReportTable] | None = None,
    typed: Typed | None = None,
) -> int:
    """The exit code. What the command line gives goes over the file; watch, measure: see `Around`;
    typed: what continues the run, where that is another command.

    Of several ranks the first one alone is heard.
    """
    ranks = ranks_of_process()
    if not ranks.is_first:
        silence(sys.stdout)
    around, typed = partial(Around, watch=watch, measure=measure), typed or (command, given)
    return _together(ranks, partial(_train, config, given, around, typed))


def _together(ranks: Ranks, do: Callable[[Ranks], int]) -> int:
    """What all ranks do, and the exit code of this one."""
    try:
        with ranks.together():
            return do(ranks)
    except PyggmlError:
        if ranks.is_first:
            raise
        return FAILED
    except (KeyboardInterrupt, SystemExit):
        ranks.abort(STOPPED)
        raise


def _train(
    config: Path | None,
    given: Mapping[str, Any],
    around: Callable[..., Around],
    typed: Typed,
    ranks: Ranks,
) -> int:
    settings = config_file.of_command_line(given, command, config)
    job = with_hub_files(job_of(settings.values, settings.places, settings.faults))
    job = replace(job, is_forced=is_forced(click.get_current_context()))
    if not job.writes_nothing:
        inputs = files_read(job, command.params, settings.values, config)
        check_places(job.outputs, inputs, job.is_forced, makes_folder=not job.dry_run)

    def resume_command(job: Job, folder: Path) -> str:
        of, its = typed
        given_again = {"config": config, **its, "resume": folder}
        if job.max_memory is not None:  # which would choose anew
            given_again |= memory_settings(job)
        elif ranks.size > 1:  # another number of processes shall make the same passes
            given_again["grad_accum"] = job.train.grad_accum
        again = words(of.params, given_again)
        return shlex.join([*ranks.launcher, *program(of.name or ""), *again])

    def train(ranks: Ranks) -> int:
        saves = partial(save_settings, options=command.params)
        return run(job, around(resume_command, saves), ranks)

    check_shared(job, ranks)
    if ranks.size > 1 or job.n_ranks == 1 or job.previews_only:
        return train(ranks)
    with start(job.n_ranks, words_again()) as local:
        return _together(local, train)


def _path(*names: str, group: str, help: str, common: bool = True, **how: Any) -> GroupedOption:
    return GroupedOption(names, type=PATH, group=group, common=common, help=help, **how)


_DEVICES = (
    "cuda:all, or several as cuda:0,cuda:1: a process for each, they share the passes of a step; "
    "with --gpu-layers or --split each of several computes some blocks"
)
_OPTIONS = [
    _path("-m", "--model", group="model", **ONE_MODEL),
    _path(
        "--init",
        group="model",
        help="adapter to train further; rank, alpha and target modules are its file's",
        common=False,
    ),
    _path(
        "--original",
        group="model",
        help="model that --model was quantised from, for --lora-init loftq, or for --train full to "
        "start from, in blocks of the types of --model",
        common=False,
    ),
    GroupedOption(
        ["-f", "--file", "data"],
        type=FileWord(),
        multiple=True,
        callback=lambda context, option, value: value or None,
        metavar="FILE[:WEIGHT]",
        group="data",
        common=True,
        help="text, or rows of JSON Lines, JSON, CSV or parquet (docs/data.md), a folder or "
        "pattern of these, hub:OWNER/NAME of a data set, or - for standard input; may be given "
        "several times: an epoch reads FILE:2 twice, of FILE:0.5 a half",
        brief="text, or rows as JSON Lines, JSON, CSV, parquet",
    ),
    GroupedOption(
        ["-o", "--output"],
        type=OutputPath(ADAPTER),
        group="output",
        common=True,
        help="adapter to write, replaced only at the end; its settings go beside it, as .yaml",
    ),
    GroupedOption(
        ["--lora", "below"],
        **ADAPTERS,
        group="model",
        help="frozen adapter below the new one; of several the updates add up",
    ),
    GroupedOption(
        ["--train", "what"],
        metavar="WORD",
        group="adapter",
        help="what is trained: adapter; full, all tensors of a model of floats; or scales, those "
        "of a model's quantised blocks: the output is then the whole model, of the same size and "
        "types  [default: adapter]",
        brief="adapter, full, or scales of the blocks",
    ),
    GroupedOption(
        ["--train-tensors"],
        type=Names(),
        metavar="A,B",
        group="adapter",
        aliases=("train-modules",),
        help="train float tensors of the model itself instead of an adapter: norms, biases, "
        "embeddings, experts, router, last-4 (blocks), a module's name, or patterns, such as "
        "'blk.*.attn_norm.weight'; the output is the whole model",
    ),
    GroupedOption(
        ["--qat"],
        metavar="TYPE",
        callback=lambda context, option, value: value and check_file_type(value.upper()),
        group="adapter",
        help="with --train full: train the model as it will be in a file of TYPE, such as Q4_0 or "
        "Q2_K (those of `pyggml quantize`), which is what is written: quantisation-aware training",
    ),
    GroupedOption(
        ["--masters"],
        type=click.Choice(("f32", "half")),
        group="adapter",
        help="in what the model's own tensors are kept while they train: f32; or half, 16 bits, in "
        "the file's type (of an F32 file BF16) with each step rounded by chance, for half the "
        "memory  [default: f32]",
        brief="tensors that train in f32, or half",
    ),
    *settings_options(LoraConfig, LORA_FLAGS, without=["seed"]),
    *settings_options(DataConfig, {}),
    *settings_options(ObjectiveConfig, OBJECTIVE_FLAGS),
    *settings_options(TrainConfig, {}, defaults=defaults_of_runs()),
    _path(
        "--resume",
        group="output",
        help="checkpoint, or folder of them, to continue from; a folder gets the next ones too; "
        "auto: --checkpoint-dir, if it has one, else a new run",
        aliases=("resume-from-checkpoint",),
        brief="checkpoint, or folder of them, to go on from",
    ),
    GroupedOption(
        ["--preview"],
        type=click.IntRange(min=0),
        group="data",
        help="print N samples as the model reads them, coloured where tokens have a loss",
    ),
    GroupedOption(
        ["--prompt"],
        group="output",
        help="prompt that is answered before and after training, of chats as a user's message; \\n "
        "is a new line (default: a line of the validation text, or its first question)",
    ),
    GroupedOption(
        ["--answer-every"],
        type=click.IntRange(min=0),
        group="output",
        help="steps between answers to the prompt on the way  [0 or more; default: 0, none]",
    ),
    GroupedOption(
        ["--log-to"],
        type=Names(),
        metavar="A,B",
        group="output",
        aliases=("report-to",),
        help=f"experiment trackers: {', '.join(LOGGERS)} (all offline), in folders beside the "
        "adapter, or none; each is an extra, such as pyggml[tensorboard]",
    ),
    GroupedOption(
        ["--report/--no-report"],
        default=None,
        group="output",
        help="report: write a page with the run's charts, settings and answers beside the adapter, "
        "as .html  [default: True]",
    ),
    GroupedOption(
        ["--max-memory"],
        type=Size(),
        metavar="SIZE",
        group="memory",
        common=True,
        help="memory to stay below, such as 4GB: by a smaller --batch with more --grad-accum, then "
        "--grad-checkpointing, then a smaller --ctx",
        brief="memory to stay below, such as 4GB",
    ),
    *device_options(_DEVICES),
    GroupedOption(
        ["--ranks"],
        type=click.IntRange(min=1),
        group="memory",
        help="processes that share the passes of a step, and this machine's threads; with --device "
        "cuda each takes a card  [default: one, or one for each device]",
    ),
    _path(
        "--config",
        group="help",
        help="YAML file of settings, named like the long options: `lora_rank: 16`; an option that "
        "is given here takes precedence",
        brief="YAML file of settings: `lora_rank: 16`",
    ),
    GroupedOption(
        ["--dry-run"],
        is_flag=True,
        default=None,
        group="help",
        common=True,
        help="print the plan, the memory and the time of a run, measured on two steps, and write "
        "nothing",
        brief="print plan, memory and time of a run, and stop",
    ),
    GroupedOption(
        ["--demo"],
        is_flag=True,
        default=None,
        group="help",
        help="a small run that needs no other option",
    ),
]

command = GroupedCommand(
    "finetune",
    callback=lambda config, **given: fine_tune(config, given),
    help="Train a LoRA adapter for a GGUF model, whose quantised weights stay.\n\n"
    "Ctrl-C, SIGTERM, a closed terminal or pipe ends the run after its step and saves adapter and "
    "checkpoint; before the first step they stay as they were.",
    quiet="plan, progress or samples",
    asks=False,
    examples=[
        "pyggml finetune -m model-Q4_K_M.gguf -f chats.jsonl -o adapter.gguf --epochs 3",
        "pyggml finetune -m model.gguf -f pairs.jsonl -o a.gguf --objective dpo",
        "pyggml finetune -m model.gguf -f chats.jsonl --dry-run --max-memory 8GB",
    ],
    params=by_group(_OPTIONS),
)
