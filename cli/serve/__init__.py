"""`pyggml serve`: a model and its adapters behind the API that OpenAI's clients speak.

command   the options
run       starts the server, and stops it
limits    what clients may ask for
guard     who may call: hosts, origins, keys
app       the routes
body      a request's body → a JSON object, within bounds
fields    a JSON object → checked fields, every fault at once
asked     the fields of a request for a chat or a text
service   what is asked → requests to the worker, and what it tells
answers   pieces of text → the API's objects, whole or streamed
errors    faults → the API's error objects
page      the page of `--web`, of the files in web/
"""

from pyggml.cli.serve.command import command

__all__ = ["command"]
