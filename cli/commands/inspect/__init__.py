"""`pyggml inspect`: a GGUF file at a glance, and what training it would take.

facts       what a file is and says of itself, as plain values
fold        tensors, with equal ones of several blocks as one
adaptable   which modules LoRA can target, and what a rank costs
training    a pass of training, planned but not run
reading     a text: the loss of every token, and gradients
present     plain values → sections
terminal    sections on a terminal
html        sections as a page
machine     what computes here
"""

from pyggml.cli.commands.inspect.command import command

__all__ = ["command"]
