"""Chats as models read them: messages → text → tokens, with the learned ones marked.

limits     the most that a template may cost
sandbox    Jinja2 as chat templates expect it
template   messages → text
source     the choice of a template: the model's own, a built-in one, a file's
calls      the form of calls that a template reads
words      the words of messages, and whether the text has them
turns      what a template writes around messages, where that is all it does
answers    the ranges of the assistant's answers in the text
encode     the tokens, and which of them are learned
messages   messages as files and requests have them, read and checked
"""

from pyggml.chat.answers import answer_ending
from pyggml.chat.encode import TRAIN_ON, ChatEncoder, EncodedChat
from pyggml.chat.source import (
    BUILT_IN,
    MODEL,
    carried_metadata,
    carries_template,
    find_template,
    template_file,
    template_metadata,
    write_alike,
)
from pyggml.chat.template import ChatTemplate, Message, read_names
from pyggml.chat.turns import Turns, find_turns
from pyggml.tokenizer.metadata import TOOL_USE

__all__ = [
    "BUILT_IN", "MODEL", "TOOL_USE", "TRAIN_ON", "ChatEncoder", "ChatTemplate", "EncodedChat",
    "Message", "Turns", "answer_ending", "carried_metadata", "carries_template", "find_template",
    "find_turns", "read_names", "template_file", "template_metadata", "write_alike",
]  # fmt: skip
