"""The words of a message, wherever it has them, and whether a template wrote them all.

Words are the content, text by text, a refusal, the thoughts, a plan of calls, and of a call its
name and its arguments with their names; of a tool its name, what it is about, and the names of its
parameters. A thought may stand in the content, before its end: </think>. Ids, and who speaks, are a
template's to use or not.

A word counts as written if the text has it, in whatever way it was escaped, and if the text has
another one where the word is changed.
"""

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyggml.chat.template import HAVE_PLACE, REASONING, ChatTemplate, Message, Tools
from pyggml.errors import TemplateError

Change = Callable[[str, str], str]  # a word and where it stands → another word
_THOUGHT = re.compile(r"(.*?)(</(?:seed:)?think>|\[/THINK\])(.*)", re.DOTALL)
_OPENING = re.compile(r"\s*(?:<(?:seed:)?think>|\[THINK\])?")
_ESCAPED = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|[nrt])")
_FLAGS = re.compile(r"/(?:no_)?think\b")  # switches in a system's text, which templates take out
_CONTENT, _THOUGHTS, _CALL = "content", "thought", "call"
ALPACA = ("instruction", "input")  # names of a message's parts, beside its content
_MORE, _PLAN = ("refusal",), "tool_plan"  # an answer in OpenAI's API; what Command R says of calls


@dataclass(frozen=True, slots=True)
class Word:
    """A word of message `number`, and where it stands: content, thought, call, or a field."""

    number: int
    where: str
    text: str


def map_words(message: Message, change: Change) -> dict[str, Any]:
    """A copy of a message with all words changed but the names of arguments."""
    changed = dict(message)
    own = ALPACA if ALPACA[0] in message else (_CONTENT,)
    for name in own:
        changed |= {name: _content(message[name], change)} if message.get(name) else {}
    for name in (*_MORE, _PLAN):
        if isinstance(message.get(name), str):
            changed[name] = change(message[name], name)
    thoughts = [name for name in REASONING if isinstance(message.get(name), str)]
    if thoughts:
        changed |= dict.fromkeys(thoughts, change(message[thoughts[0]], _THOUGHTS))
    if message.get("tool_calls"):
        changed["tool_calls"] = [_call(call, change) for call in message["tool_calls"]]
    return changed


def _content(value: Any, change: Change) -> Any:
    if isinstance(value, list | tuple):
        return [{**part, "text": change(part["text"], _CONTENT)} if isinstance(part, Mapping)
                and isinstance(part.get("text"), str) else part for part in value]  # fmt: skip
    if not isinstance(value, str):
        return value
    thought = _THOUGHT.fullmatch(value)
    if not thought:
        return change(value, _CONTENT)
    before, end, after = thought.groups()
    opening = _OPENING.match(before)
    first = opening.end() if opening else 0
    return before[:first] + change(before[first:], _THOUGHTS) + end + change(after, _CONTENT)


def _call(call: Any, change: Change) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _argument(function.get("arguments"), change)
    changed = {**function, "arguments": arguments}
    if isinstance(function.get("name"), str):
        changed["name"] = change(function["name"], _CALL)
    return {**call, "function": changed}


def _argument(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value, _CALL)
    if isinstance(value, Mapping):
        return {name: _argument(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_argument(inner, change) for inner in value]
    return value


def words_of(number: int, message: Message) -> Iterator[Word]:
    """All words of a message, in their order; white space is none."""
    words = list[Word]()

    def collect(text: str, where: str) -> str:
        if text.strip():
            words.append(Word(number, where, text.strip()))
        return text

    map_words(message, collect)
    yield from words
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        names = _names(function.get("arguments")) if isinstance(function, Mapping) else ()
        yield from (Word(number, _CALL, name) for name in names if name.strip())


def _names(value: Any) -> Iterator[str]:
    """The names of arguments, and those that are numbers."""
    if isinstance(value, Mapping):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _names(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)


def check_words(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools, text: str, asks: bool
) -> int:
    """How many thoughts the template takes out of earlier turns.

    asks: the text is that of a chat up to an answer.

    Raises TemplateError if any other word is not in the text.
    """
    lost = _Lost(template, messages, tools, text, asks)
    dropped = set[int]()
    for word in lost.words():
        if word.where != _THOUGHTS or not lost.takes_thought(word):
            way = f", for which {HAVE_PLACE}" if word.where in (_THOUGHTS, _CALL) else ""
            raise TemplateError(f"{template.origin}: leaves out {_name(word, messages)}{way}")
        dropped.add(word.number)
    for name, text in _tool_words(tools):
        if not lost.has(text):
            raise TemplateError(f"{template.origin}: leaves out {text[:40]!r} of the tool {name}")
    return len(dropped)


def _tool_words(tools: Tools) -> Iterator[tuple[str, str]]:
    """Of each tool its name with what a model is to know of it."""
    for tool in tools or ():
        function = tool.get("function")
        if not isinstance(function, Mapping):
            continue
        name, about = str(function.get("name", "")), function.get("description")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        names = properties if isinstance(properties, Mapping) else ()
        words = (name, about if isinstance(about, str) else "", *map(str, names))
        yield from ((name, word) for word in words if word.strip())


def _name(word: Word, messages: Sequence[Message]) -> str:
    number, calls = word.number + 1, messages[word.number].get("tool_calls")
    if word.where == _THOUGHTS:
        return f"the thought of message {number}"
    if word.where in (*_MORE, _PLAN):
        return f"the {word.where} of message {number}"
    if word.where == _CALL:
        return f"a call of message {number}, {word.text[:40]!r}"
    return f"the content of message {number} beside its calls" if calls else f"message {number}"


class _Lost:
    """The words that a text lacks."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Tools,
        text: str,
        asks: bool,
    ) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self.text, self.asks = text, asks
        self.flat: str | None = None
        self.n = 0
        while f"word{self.n}x" in text:
            self.n += 1
        self.source = template.for_tools(tools).source

    def words(self) -> Iterator[Word]:
        for i, message in enumerate(self.messages):
            for word in words_of(i, message):
                if not self.has(word.text):
                    yield word
        yield from self._without_effect()

    def has(self, word: str) -> bool:
        if word in self.text:
            return True
        if self.flat is None:
            self.flat = flat(self.text)
        if flat(word) in self.flat:
            return True
        return "/no_think" in self.source and flat(_FLAGS.sub("", word)) in self.flat

    def _without_effect(self) -> Iterator[Word]:
        """Words that can be changed without a change of the text."""
        words, changed = list[Word](), list[Message]()
        for i, message in enumerate(self.messages):
            changed.append(map_words(message, self._marking(i, words)))
        text = self._render(changed)
        for n, word in enumerate(words):
            if text is not None and self._mark(n) in text:
                continue
            if self._has_effect(word, n):
                continue
            yield word

    def _marking(self, i: int, words: list[Word], only: int | None = None) -> Change:
        """A change that puts a mark behind each word, or behind one of all, and notes them."""

        def mark(text: str, where: str) -> str:
            if not text.strip():
                return text
            words.append(Word(i, where, text.strip()))
            n = len(words) - 1
            return text + self._mark(n) if only is None or n == only else text

        return mark

    def _mark(self, n: int) -> str:
        return f"word{self.n}x{n}x"

    def _has_effect(self, word: Word, n: int) -> bool:
        """Whether a mark behind this word alone is in the text. What the template refuses then, it
        has looked at."""
        words = list[Word]()
        changed = [map_words(m, self._marking(i, words, n)) for i, m in enumerate(self.messages)]
        text = self._render(changed)
        return text is None or self._mark(n) in text

    def _render(self, messages: Sequence[Message]) -> str | None:
        return self.template.try_render(messages, self.tools, self.asks)

    def takes_thought(self, word: Word) -> bool:
        """Whether the template takes the thought out because others have spoken since.

        A chat that is learned has to show it where it is the last answer. One that is asked on may
        never have it, as with DeepSeek's models: there the template need but know of thoughts.
        """
        if word.number == len(self.messages) - 1:
            return False
        if self.asks:
            names = ("think]", "think>", *(n for n in REASONING if n in self.messages[word.number]))
            return any(name in self.source.lower() for name in names)
        text = self._render(self.messages[: word.number + 1])
        return text is not None and flat(word.text) in flat(text)


def flat(text: str) -> str:
    """A text in which whatever is escaped, as in JSON or HTML, is as if it were not.

    Quotes and backslashes are left out, and white space is one space: to compare, not to read.
    """
    while (plain := html.unescape(text)) != text:
        text = plain
    text = _ESCAPED.sub(lambda match: chr(int(match[1], 16)) if match[1] else " ", text)
    if any("\ud800" <= char <= "\udfff" for char in text):  # halves of a pair, as JSON has them
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(text.replace("\\", "").replace('"', "").replace("'", "").split())
