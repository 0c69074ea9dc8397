"""`pyggml-finetune`: model + text → adapter. It says what it will do, then does it.

command       the options
job           the job that they describe: model, data, settings, outputs
memory        --max-memory: settings that fit
dry_run       --dry-run: the memory and time of a run
summary       what a run will do, line by line, before it takes memory or time
chats         the same of chats, and samples of them
config_file   settings as YAML
stages        the stages, from the model to the adapter
results       what is printed and saved at the end
"""

from pyggml.cli.commands.finetune.command import command

__all__ = ["command"]
