"""What a template makes of chats: their prompts, the end of an answer, its calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pyggml.chat import ChatEncoder, ChatTemplate, answer_ending
from pyggml.chat.tools import (
    AnswerReader,
    TemplateCalls,
    Thought,
    find_calls,
    find_thought,
    grammar_of,
    is_opened,
)
from pyggml.cli.commands.serve.params import ChatParams
from pyggml.cli.web.errors import ApiError
from pyggml.generation import Sampling
from pyggml.generation.sampling import MOST_STOPS
from pyggml.tokenizer import Tokenizer

_END = 16  # tokens of a prompt that may open a thought


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """What writes chats as a model reads them, or the fault why nothing does.

    ending     the text that ends an answer: of a vocabulary without a token for it, the model
               writes that text
    calls      how its models write calls of tools; None: in a way that is not known here
    thought    what stands around their thoughts
    ids        control tokens, by name
    shown      those of them that calls and thoughts are made of
    """

    encoder: ChatEncoder | None = None
    ending: str = ""
    fault: str = ""
    calls: TemplateCalls | None = None
    thought: Thought | None = None
    ids: Mapping[str, int] = field(default_factory=dict)
    shown: frozenset[int] = frozenset()

    @staticmethod
    def of(template: ChatTemplate, tokenizer: Tokenizer) -> ChatWriter:
        names = tokenizer.control_names()
        ids = {n: tokenizer.encode(n, add_special=False, parse_special=True)[-1] for n in names}
        has_tools = "tools" in template.for_tools([{}]).reads
        calls = find_calls(template, names) if has_tools else None
        thought = find_thought(template.source)
        syntax = calls and calls.syntax
        marks = "".join(
            [
                *((*syntax.marks, syntax.opening, syntax.before, syntax.middle) if syntax else ()),
                *((syntax.after, syntax.closing, "[CALL_ID]") if syntax else ()),
                *((thought.open, thought.close, *thought.frames) if thought else ()),
            ]
        )
        ends = [n for n in ids if tokenizer.is_eog(ids[n])]
        shown = frozenset(id for name, id in ids.items() if name in marks and name not in ends)
        encoder, ending = ChatEncoder(template, tokenizer), answer_ending(template)
        return ChatWriter(encoder, ending, "", calls, thought, ids, shown)

    def sampling(self, params: ChatParams) -> Sampling:
        """The settings of an answer, which ends where the template ends a turn, and is held to what
        may be called. Raises ApiError if it cannot be."""
        how = params.how
        stop = tuple(dict.fromkeys([*how.stop, *filter(None, [self.ending])]))[:MOST_STOPS]
        how, choice = replace(how, stop=stop), params.choice
        if choice is None:
            return how
        if how.regex is not None or how.grammar is not None:
            said = "cannot hold an answer beside tools, wanted a JSON schema or tool_choice none"
            raise ApiError(400, f"regex or grammar {said}", "tools")
        is_strict = any(tool["function"].get("strict") is True for tool in choice.tools)
        if not choice.needs and not is_strict and how.json_schema is None:
            return how
        if self.calls is None:
            said = "calls of this model's template are written in a way that is not known here"
            raise ApiError(400, f"{said}, so that none can be required", "tool_choice")
        schema = how.json_schema if not choice.needs else None
        choice = replace(
            choice,
            several=choice.several and self.calls.several,
            schema=None if schema is None else json.loads(schema),
        )
        grammar = grammar_of(self.calls.syntax, choice, self.ids, self.thought)
        return how if grammar is None else replace(how, json_schema=None, grammar=grammar)

    def reader(
        self, params: ChatParams, prompt: Sequence[int] | np.ndarray
    ) -> Callable[[], AnswerReader]:
        """Makes what reads an answer to a prompt."""
        assert self.encoder is not None
        tokenizer = self.encoder.tokenizer
        end = tokenizer.decode([int(id) for id in prompt[-_END:]], special=True)
        is_open = is_opened(end, self.thought)
        tools = params.choice.tools if params.choice else ()
        syntax = self.calls.syntax if self.calls and tools else None
        needs = params.choice is not None and params.choice.needs
        return lambda: AnswerReader(syntax, tools, self.thought, is_open, calls_alone=needs)
