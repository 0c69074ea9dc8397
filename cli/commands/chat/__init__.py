"""`pyggml chat`: a conversation with a model.

conversation   the rounds, and the cache that has read them
console        lines of a user in, answers out; what begins with / is a command
command        the options
"""

from pyggml.cli.commands.chat.command import command

__all__ = ["command"]
