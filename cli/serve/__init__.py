"""`pyggml serve`: a model and its adapters behind the API that OpenAI's clients speak.

command      the options; starts the server
limits       what a client may ask for
app          the routes, and what stands before them
guard        who may call: hosts, origins, keys
body         a request's body → a JSON object, within bounds
fields       a JSON object → checked fields, every fault at once
requests     the fields of a request for a chat or a completion
answers      pieces of text → the objects of the API, whole or streamed
errors       faults → the error objects of the API
web          the page of `--web`
"""

from pyggml.cli.serve.command import command

__all__ = ["command"]
