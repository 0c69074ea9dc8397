"""How models write calls of tools: one declaration for each way,
Calls are written as opening, call, between, call, …, closing. A call is

    before {"name": NAME, "arguments": ARGUMENTS} after     keys: the names of both
    before NAME middle ARGUMENTS after                      without keys

A declaration says this once. What reads calls is made of it, and what holds an answer to them.
`#` in it stands for a number. White space, where it has some, may be any or none.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from pyggml.chat.tools.values import GEMMA, PYTHON, TAGS, Notation

NAME = r"(?P<name>[^\s\"'<>(){}\[\],]{1,128}?)"
_KEYS = ("name", "tool_name"), ("arguments", "parameters")
# Of an object, up to the braces of its arguments, whatever simple fields stand before.
_OBJECT = re.compile(
    r'\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|-?\d+|null)\s*,\s*)*?'
    rf'"(?:{"|".join(_KEYS[0])})"\s*:\s*"(?P<name>[^"\\]{{1,128}})"\s*,\s*'
    rf'"(?:{"|".join(_KEYS[1])})"\s*:\s*(?=\{{)'
)


@dataclass(frozen=True)
class CallSyntax:
    """family   models that write so
    notation    of arguments that are no JSON
    marks       texts with which calls begin
    head        what is read before arguments, where models write more than this says
    bare        what a call without a mark begins with, before the name of a tool that there is
    """

    family: str
    marks: Collection[str] = ()
    opening: str = ""
    before: str = ""
    keys: tuple[str, str] | None = None
    middle: str = ""
    after: str = ""
    between: str = ""
    closing: str = ""
    notation: Notation | None = None
    head: str = ""
    bare: str = ""

    @cached_property
    def lead(self) -> re.Pattern[str]:
        """What stands before a call, as far as its name or object."""
        marks = self.marks if self.is_bare else ()
        parts = (*marks, self.opening, self.between.strip(), self.before)
        pattern = "".join(rf"(?:{_loose(part)})?\s*" for part in parts if part.strip())
        return re.compile(rf"\s*{pattern}")

    @cached_property
    def start(self) -> re.Pattern[str]:
        """What stands before the arguments of a call, with its name."""
        if self.head:
            return re.compile(self.head)
        if self.keys:
            return re.compile(self.lead.pattern + _OBJECT.pattern)
        first = "".join(rf"(?:{_loose(part)})?\s*" for part in (self.opening, self.between) if part)
        call = rf"{_loose(self.before)}{NAME}{_loose(self.middle)}\s*(?=\{{)"
        return re.compile(rf"\s*{first}{call}")

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """What stands behind a call."""
        parts = re.split(r"\s+|(?<=\])(?=<)", self.closing)
        texts = (self.after, self.closing, self.between, *parts)
        return tuple(dict.fromkeys(text.strip() for text in texts if text.strip()))

    @property
    def is_bare(self) -> bool:
        """Whether an object with which an answer begins may be a call, without a mark."""
        return self.keys is not None and not self.opening and not self.before

    @property
    def is_list(self) -> bool:
        """Whether a further call needs no mark of its own."""
        return bool(self.opening) or self.is_bare


def _loose(text: str) -> str:
    """A pattern of the text: any white space where it has some, and around brackets."""
    pattern = "".join(r"\s*" if part.isspace() else re.escape(part) for part in _split(text))
    return pattern.replace(re.escape("#"), r"\d+")


def _split(text: str) -> list[str]:
    spaced = re.sub(r"(?<=[\[\]>,])(?=[\[\]{<])", " ", text)
    return [part for part in re.split(r"(\s+)", spaced) if part]


_HARMONY = (
    r"\s*(?:<\|start\|>assistant)?\s*(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>[\w.-]{1,128})"
    r"\s*(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>\s*(?=\{)"
)
_R1 = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"

SYNTAXES = (
    CallSyntax(
        "Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3",
        marks=("<tool_call>",),
        before="<tool_call>\n",
        keys=("name", "arguments"),
        after="\n</tool_call>",
        between="\n",
    ),
    CallSyntax(
        "Qwen 3 Coder, Qwen 3.5",
        marks=("<tool_call>", "<function="),
        before="<tool_call>\n<function=",
        middle=">\n",
        after="</function>\n</tool_call>",
        between="\n",
        notation=TAGS,
        head=rf"\s*(?:<tool_call>)?\s*<function={NAME}>\s*",
    ),
    CallSyntax(
        "Mistral 7B v0.3, Nemo",
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS][",
        keys=("name", "arguments"),
        between=", ",
        closing="]",
    ),
    CallSyntax(
        "Mistral Small 3.2, Devstral, Ministral 3",
        marks=("[TOOL_CALLS]",),
        before="[TOOL_CALLS]",
        middle="[ARGS]",
        head=rf"\s*\[TOOL_CALLS\]\s*{NAME}(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{{)",
    ),
    CallSyntax(
        "Granite 3",
        marks=("<|tool_call|>",),
        opening="<|tool_call|>[",
        keys=("name", "arguments"),
        between=", ",
        closing="]",
    ),
    CallSyntax(
        "Command R7B, Command A",
        marks=("<|START_ACTION|>",),
        opening="<|START_ACTION|>[\n    ",
        keys=("tool_name", "parameters"),
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
    ),
    CallSyntax(
        "Command R, R+",
        marks=("Action:\n```json",),
        opening="Action:\n```json\n[\n    ",
        keys=("tool_name", "parameters"),
        between=",\n    ",
        closing="\n]```",
    ),
    CallSyntax(
        "Gemma 4",
        marks=("<|tool_call>",),
        before="<|tool_call>call:",
        after="<tool_call|>",
        notation=GEMMA,
        head=rf"\s*<\|tool_call>\s*call:\s*{NAME}\s*(?=\{{)",
    ),
    CallSyntax(
        "gpt-oss",
        marks=(
            "<|channel|>commentary to=functions.",
            "<|channel|>analysis to=functions.",
            "<|start|>assistant to=functions.",
            " to=functions.",
        ),
        before="<|channel|>commentary to=functions.",
        middle=" <|constrain|>json<|message|>",
        after="<|call|>",
        head=_HARMONY,
    ),
    CallSyntax(
        "DeepSeek R1, V3",
        marks=_R1,
        opening=_R1[0],
        before=f"{_R1[1]}function<｜tool▁sep｜>",
        middle="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
    CallSyntax(
        "DeepSeek V3.1",
        marks=_R1,
        opening=_R1[0],
        before=_R1[1],
        middle="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    CallSyntax(
        "Kimi K2",
        marks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        opening="<|tool_calls_section_begin|>",
        before="<|tool_call_begin|>functions.",
        middle=":#<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
    CallSyntax(
        "LFM2",
        marks=("<|tool_call_start|>",),
        opening="<|tool_call_start|>[",
        between=", ",
        closing="]<|tool_call_end|>",
        notation=PYTHON,
        head=rf"\s*(?:<\|tool_call_start\|>)?\s*[\[,]?\s*{NAME}\s*(?=\()",
        bare="[",
    ),
    CallSyntax(
        "Llama 3.1 to 3.3", marks=("<|python_tag|>",), keys=("name", "parameters"), between="; "
    ),
)
BARE = SYNTAXES[-1]
