"""Calls of tools and thoughts in what a model writes.

syntax     one declaration per way to write calls
probe      which of them a template has
thoughts   the marks around a thought
values     arguments that are no JSON
reader     an answer as it comes → reasoning, content, calls
grammar    a declaration and tools → the grammar of calls that an answer is held to
"""

from pyggml.chat.tools.grammar import ToolChoice, grammar_of
from pyggml.chat.tools.probe import TemplateCalls, find_calls
from pyggml.chat.tools.reader import AnswerReader, Said
from pyggml.chat.tools.syntax import SYNTAXES, CallSyntax
from pyggml.chat.tools.thoughts import Thought, find_thought, is_opened

__all__ = [
    "SYNTAXES", "AnswerReader", "CallSyntax", "Said", "TemplateCalls", "Thought", "ToolChoice",
    "find_calls", "find_thought", "grammar_of", "is_opened",
]  # fmt: skip
