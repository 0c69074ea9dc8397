"""`pyggml serve`: a model and its adapters behind the API that OpenAI's clients speak.

command    the options
startup    starts the server, and stops it
limits     what clients may ask for
app        the routes
fields     a JSON object → checked fields, every fault at once
params     the fields of a request for a chat or a text
reference  the fields of OpenAI's reference that are answered, refused or ignored
responses  a request of /v1/responses → one for a chat
choices    which tools may be called
chats      what a template makes of chats
service    a request → sequences of the worker, and their events
answers    pieces of text → the API's objects, whole or streamed; chat_answers: those of chats,
           response_answers: the items and events of /v1/responses
operators  what llama-server tells operators: tokens, settings, slots, metrics
adapters   adapters that are loaded and dropped while it runs
journal    the log of requests, and the counts of /metrics
chat_page  the page of `--web`, of the files in web/
"""

from pyggml.cli.commands.serve.command import command

__all__ = ["command"]
