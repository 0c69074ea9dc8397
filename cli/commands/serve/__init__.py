"""`pyggml serve`: a model and its adapters behind the API that OpenAI's clients speak.

command    the options
startup    starts the server, and stops it
limits     what clients may ask for
app        the routes
fields     a JSON object → checked fields, every fault at once
params     the fields of a request for a chat or a text
service    a request → sequences of the worker, and their events
answers    pieces of text → the API's objects, whole or streamed
chat_page  the page of `--web`, of the files in web/
"""

from pyggml.cli.commands.serve.command import command

__all__ = ["command"]
