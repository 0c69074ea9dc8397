"""The options of `pyggml-finetune`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from pyggml.cli.finetune.job import LORA_FLAGS, job_of
from pyggml.cli.finetune.run import run
from pyggml.cli.options import PATH, SETTINGS, settings_options, words
from pyggml.lora import DataConfig, LoraConfig, TrainConfig


def _finetune(**given: Any) -> int:
    def resumed(folder: Path) -> str:
        again = words(command.params, given | {"resume": folder})
        return shlex.join(["pyggml-finetune", *again])

    return run(job_of(given), resumed)


command = click.Command(
    "finetune",
    context_settings=SETTINGS,
    callback=_finetune,
    help="Train a LoRA adapter for a GGUF model; its weights stay as they are, quantised.\n\n"
    "Ctrl-C, SIGTERM or a closed terminal or pipe ends the run after the step under way, and saves "
    "adapter and checkpoint; before the first step nothing is written.",
    params=[
        click.Option(["-m", "--model"], type=PATH, help="GGUF model to adapt"),
        click.Option(
            ["-f", "--file", "data"],
            type=PATH,
            help="UTF-8 text; or rows (JSON Lines, JSON, CSV) with text, or with prompt and "
            "completion, of which the completion is learned",
        ),
        click.Option(
            ["-o", "--output"], type=PATH, help="adapter to write, replaced only at the end"
        ),
        click.Option(["--demo"], is_flag=True, help="a small run that needs no other option"),
        click.Option(
            ["--init"],
            type=PATH,
            help="adapter to train further; rank, alpha and modules are its file's",
        ),
        *settings_options(LoraConfig, LORA_FLAGS, without=["seed"]),
        *settings_options(DataConfig, {}),
        *settings_options(TrainConfig, {}),
        click.Option(
            ["--resume"],
            type=PATH,
            help="checkpoint, or folder of them, to continue from; a folder gets the next ones too",
        ),
        click.Option(
            ["--prompt"],
            help="answered before and after training; \\n is a new line "
            "(default: a line of the held-out text)",
        ),
    ],
)
