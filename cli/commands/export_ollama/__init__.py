"""`pyggml export-ollama`: model, adapter and settings → a Modelfile.

command    the options, and the lines of the file
modelfile  its quoting, its paths, and a chat's turns as a template of Go's
"""

from pyggml.cli.commands.export_ollama.command import command

__all__ = ["command"]
