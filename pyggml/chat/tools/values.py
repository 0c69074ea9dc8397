"""Arguments of calls that are no JSON: as Python has them, as Gemma 4 has them, as tags.

Each reader takes a text and the place where arguments begin, and gives their values and the place
behind them. It raises `Unfinished` where the text ends before them, ValueError for anything else.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_DEEPEST = 64
_WORD = re.compile(r"[^\W\d][\w.-]*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_WORDS = {"True": True, "true": True, "False": False, "false": False}
_WORDS |= {"None": None, "null": None}  # type: ignore[dict-item]
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_CLOSED = re.compile(r"(?:\s*</param(?:eter)?>)*")  # more than one, as some models write it
_NEXT = "<param", "</parameter>", "</param>", "</function>", "</invoke>"
_PARAMETER = re.compile(r'\s*<param(?:eter)?(?:=| name=")(?P<key>[^">]+)"?(?: [^>]*)?>\n?')


class Unfinished(Exception):
    """The text ends before the arguments do."""


Arguments = dict[str, Any]
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Notation:
    """How arguments are written that are no JSON.

    read     as above
    quote    around a text
    word     a regular expression of what a text may hold
    joint    between the name of an argument and its value
    words    true, false and null; ends: around all arguments
    """

    read: Callable[[str, int, Schema], tuple[Arguments, int]]
    quote: str = ""
    word: str = ""
    joint: str = ""
    words: tuple[str, str, str] = ("true", "false", "null")
    ends: tuple[str, str] = ("", "")


@dataclass(slots=True)
class _Literals:
    """A place in a text of values. quotes: what a text may stand between."""

    text: str
    at: int
    quotes: tuple[str, ...]
    escapes: bool

    def peek(self) -> str:
        """The next character that is no space."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        if self.at == len(self.text):
            raise Unfinished
        return self.text[self.at]

    def take(self, character: str) -> None:
        if self.peek() != character:
            raise ValueError(f"wanted {character}")
        self.at += 1

    def pairs(self, joint: str, end: str, depth: int) -> Arguments:
        """key joint value, … end."""
        pairs: Arguments = {}
        while self.peek() != end:
            key = self._quoted() if self._quote() else self._word()
            self.take(joint)
            pairs[key] = self.value(depth + 1)
            if self.peek() != end:
                self.take(",")
        self.at += 1
        return pairs

    def value(self, depth: int) -> Any:
        first = self.peek()
        if depth > _DEEPEST:
            raise ValueError("nested too deeply")
        if self._quote():
            return self._quoted()
        if first == "{":
            self.at += 1
            return self.pairs(":", "}", depth)
        if first in "[(":
            self.at += 1
            return self._items("]" if first == "[" else ")", depth)
        if first in "-0123456789":
            number = _NUMBER.match(self.text, self.at)
            if not self.text[self.at :].strip("-+.eE0123456789"):
                raise Unfinished
            if number is None:
                raise ValueError("- is no number")
            self.at = number.end()
            return json.loads(number[0])
        word = self._word()
        if word not in _WORDS:
            raise ValueError(f"{word} is no value")
        return _WORDS[word]

    def _items(self, end: str, depth: int) -> list[Any]:
        items = list[Any]()
        while self.peek() != end:
            items.append(self.value(depth + 1))
            if self.peek() != end:
                self.take(",")
        self.at += 1
        return items

    def _word(self) -> str:
        self.peek()
        word = _WORD.match(self.text, self.at)
        if word is None:
            raise ValueError("wanted a name")
        if word.end() == len(self.text):
            raise Unfinished
        self.at = word.end()
        return word[0]

    def _quote(self) -> str:
        self.peek()
        rest = self.text[self.at : self.at + max(map(len, self.quotes))]
        if any(quote.startswith(rest) and quote != rest for quote in self.quotes):
            raise Unfinished
        return next((quote for quote in self.quotes if rest.startswith(quote)), "")

    def _quoted(self) -> str:
        quote = self._quote()
        self.at += len(quote)
        parts = list[str]()
        while not self.text.startswith(quote, self.at):
            if self.at >= len(self.text):
                raise Unfinished
            character = self.text[self.at]
            self.at += 1
            if self.escapes and character == "\\":
                character = self._escaped()
            parts.append(character)
        self.at += len(quote)
        return "".join(parts)

    def _escaped(self) -> str:
        if self.at >= len(self.text):
            raise Unfinished
        letter = self.text[self.at]
        self.at += 1
        n = {"x": 2, "u": 4}.get(letter)
        if n is None:
            return _ESCAPES.get(letter, letter)
        digits = self.text[self.at : self.at + n]
        if len(digits) < n:
            raise Unfinished
        try:
            character = chr(int(digits, 16))
        except ValueError:  # a template may have written the text without escapes
            return f"\\{letter}"
        self.at += n
        return character


def _read_python(text: str, at: int, schema: Schema) -> tuple[Arguments, int]:
    """(city='Rome', days=[1, 2])"""
    literals = _Literals(text, at, ("'", '"'), escapes=True)
    literals.take("(")
    return literals.pairs("=", ")", 0), literals.at


def _read_gemma(text: str, at: int, schema: Schema) -> tuple[Arguments, int]:
    """{city:<|"|>Rome<|"|>,days:[1,2]}"""
    literals = _Literals(text, at, ('<|"|>', '"'), escapes=False)
    literals.take("{")
    return literals.pairs(":", "}", 0), literals.at


def _read_tags(text: str, at: int, schema: Schema) -> tuple[Arguments, int]:
    """<parameter=city>Rome</parameter>…</function>; what is no string by the schema is JSON."""
    arguments: Arguments = {}
    while tag := _PARAMETER.match(text, at):
        closing = "</parameter>" if "<parameter" in tag[0] else "</param>"
        end = text.find(closing, tag.end())
        if end < 0:
            raise Unfinished
        arguments[tag["key"]] = _tagged(
            text[tag.end() : end].removesuffix("\n"), schema, tag["key"]
        )
        closed = _CLOSED.match(text, end)
        at = closed.end() if closed else end
    rest = text[at:].lstrip()
    if rest.startswith(("</function>", "</invoke>")):
        return arguments, at
    if rest.startswith("<param") or any(tag.startswith(rest) for tag in _NEXT):
        raise Unfinished
    raise ValueError("wanted a parameter")


def _tagged(text: str, schema: Schema, key: str) -> Any:
    properties = schema.get("properties")
    about = properties.get(key) if isinstance(properties, Mapping) else None
    if isinstance(about, Mapping) and about.get("type") == "string":
        return text
    try:
        return _WORDS[text] if text in _WORDS else json.loads(text)
    except (ValueError, RecursionError):
        return text


PYTHON = Notation(
    _read_python,
    quote='"',
    word=r'(?:[^"\\\n]|\\["\\nt])*',
    joint="=",
    words=("True", "False", "None"),
    ends=("(", ")"),
)
GEMMA = Notation(_read_gemma, quote='<|"|>', word=r"[^<]*", joint=":", ends=("{", "}"))
TAGS = Notation(_read_tags)
