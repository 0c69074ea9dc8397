"""`pyggml-finetune`: model + text → adapter. What it will do comes first, then it does it.

command   the options
job       what they mean: a model, data, settings, and places to write to
memory    --max-memory: settings that fit
plan      --dry-run: what a run takes
config_file   settings as YAML
run       the stages, from the model to the adapter
results   what is told and saved at the end
"""

from pyggml.cli.finetune.command import command

__all__ = ["command"]
