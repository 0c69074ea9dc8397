"""Chats as models read them: messages → text → tokens, and which of them are learned.

limits     what a template may cost
sandbox    Jinja2 as chat templates expect it
template   messages → text
source     which template: the model's own, a built-in one, a file's
answers    where in the text the assistant's answers stand
encode     tokens, and which of them are learned
"""

from pyggml.chat.encode import TRAIN_ON, ChatEncoder, EncodedChat
from pyggml.chat.source import BUILT_IN, MODEL, find_template
from pyggml.chat.template import ChatTemplate, Message

__all__ = [
    "BUILT_IN",
    "MODEL",
    "TRAIN_ON",
    "ChatEncoder",
    "ChatTemplate",
    "EncodedChat",
    "Message",
    "find_template",
]
