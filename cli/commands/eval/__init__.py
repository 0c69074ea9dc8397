"""`pyggml eval`: models, adapters, data → perplexity, token accuracy, right answers, differences.

subjects   files → the models to evaluate
files      a file of data → what each model makes of it
table      the figures as a table
record     the figures as JSON
progress   how long it will take
command    the options
"""

from pyggml.cli.commands.eval.command import command

__all__ = ["command"]
