"""`pyggml sweep`: fine-tunes that differ in some settings, and one table of them.

command    the options: those of `pyggml finetune`, whose settings may be lists
lists      lists of values → runs, one for each combination
progress   one run after the other; other processes take runs of the same folder
halving    which runs are hopeless, by Optuna's successive halving
results    what became of each run, as a table and as a page
"""

from pyggml.cli.commands.sweep.command import command

__all__ = ["command"]
