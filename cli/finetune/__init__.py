"""`pyggml-finetune`: model + text → adapter. It says what it will do, then does it.

command       the options
job           the job that they describe: model, data, settings, outputs
memory        --max-memory: settings that fit
plan          --dry-run: the memory and time of a run
config_file   settings as YAML
run           the stages, from the model to the adapter
results       what is printed and saved at the end
"""

from pyggml.cli.finetune.command import command

__all__ = ["command"]
