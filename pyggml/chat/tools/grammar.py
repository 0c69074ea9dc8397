"""Tools and the syntax of their calls → the grammar that an answer is held to, in Lark's form.

Arguments follow the schema of their tool: all of it where they are JSON. In other notations types,
names, enumerations, alternatives and what is required hold; bounds and patterns do not.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyggml.chat.tools.syntax import CallSyntax
from pyggml.chat.tools.thoughts import Thought
from pyggml.chat.tools.values import TAGS, Notation

_TEXT = "/(?s:.*)/"
_SPACE = r"/[ \n]{0,4}/"
_GAP = r"/( |\n {0,12})?/"  # between the parts of a call's object
_NUMBER = r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?/"
_WHOLE = "/-?(0|[1-9][0-9]{0,17})/"
_DEEPEST = 12  # of schemas within each other; deeper ones are any value
_JSON = {"whitespace_pattern": r"( |\n{1,2}[ \t]{0,20})"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What an answer may be.

    tools     of which one is called
    needs     whether it is a call; else it may be text
    several   whether more than one may be called
    schema    of JSON that the text follows
    """

    tools: Sequence[Mapping[str, Any]]
    needs: bool
    several: bool
    schema: Any = None


def grammar_of(
    syntax: CallSyntax, choice: ToolChoice, ids: Mapping[str, int], thought: Thought | None
) -> str | None:
    """The grammar. ids: of control tokens by their names. thought: one that may come first.

    None where text is allowed that no grammar can tell from calls: a thought's control tokens.
    """
    rules = _Rules(ids, syntax.notation)
    calls = _calls(rules, syntax, choice)
    if choice.needs or choice.schema is not None:
        begin = _opening(rules, thought)
        other = f" | {begin} {_json(choice.schema)}" if choice.schema is not None else ""
        start = f"{begin} {calls}{other}"
    elif thought is not None and rules.has_control(thought.open + thought.close):
        return None
    else:
        start = _beside_text(rules, syntax, choice, calls)
    return "\n".join([f"start: {start}", *rules.lines])


def _opening(rules: "_Rules", thought: Thought | None) -> str:
    """A thought, or none."""
    if thought is None:
        return ""
    whole = (
        rules.literal(thought.open.strip()),
        rules.until(thought.close),
        rules.literal(thought.turn),
    )
    return f"({' '.join(filter(None, whole))})? {_SPACE}"


def _beside_text(rules: "_Rules", syntax: CallSyntax, choice: ToolChoice, calls: str) -> str:
    """Any text, and calls from their mark on."""
    if syntax.is_bare:
        return rf"/([^{{\s](?s:.*))?/ | {calls}"
    mark = next(iter(syntax.marks))
    if rules.has_control(mark):
        return f"{_TEXT} ({calls})?"
    rest = _calls(rules, syntax, choice, mark)
    return f"{_TEXT} | {rules.until(mark)} {rest}"


def _calls(rules: "_Rules", syntax: CallSyntax, choice: ToolChoice, after: str = "") -> str:
    """All calls, behind a mark if that is there already."""
    one = rules.add(" | ".join(_call(rules, syntax, tool) for tool in choice.tools))
    first = one
    opening = syntax.opening.removeprefix(after)
    if after and not syntax.opening:
        first = rules.add(" | ".join(_call(rules, syntax, t, after) for t in choice.tools))
    more = f"({rules.literal(syntax.between)} {one})*" if choice.several else ""
    return f"{rules.literal(opening)} {first} {more} {rules.literal(syntax.closing)}"


def _call(rules: "_Rules", syntax: CallSyntax, tool: Mapping[str, Any], after: str = "") -> str:
    """One call of a tool."""
    function = tool["function"]
    schema = function.get("parameters")
    schema = schema if isinstance(schema, dict) and schema else {"type": "object"}
    name, before = function["name"], syntax.before.removeprefix(after)
    head, end = rules.literal(before + name + syntax.middle), rules.literal(syntax.after)
    if syntax.keys:
        first, second = syntax.keys
        parts = (before + "{", f'"{first}": "{name}",', f'"{second}":')
        head = " ".join(f"{rules.literal(part)} {_GAP}" for part in parts)
        end = f'{_GAP} "}}" {end}'
    if syntax.notation is None:
        arguments = _json(schema)
    elif syntax.notation is TAGS:
        arguments = rules.tags(schema)
    else:
        arguments = rules.pairs(schema, schema, *syntax.notation.ends, syntax.notation.joint)
    return f"{head} {arguments} {end}"


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": _JSON}
    return f"%json {json.dumps(schema)}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(slots=True)
class _Rules:
    """Lines of a grammar. ids: of control tokens, by name."""

    ids: Mapping[str, int]
    notation: Notation | None
    lines: list[str] = field(default_factory=list)

    def add(self, body: str, options: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def has_control(self, text: str) -> bool:
        return any(name in text for name in self.ids)

    def literal(self, text: str) -> str:
        """A text, of which names of control tokens are these, and # a number."""
        names = "|".join(map(re.escape, sorted(self.ids, key=len, reverse=True)))
        parts = re.split(f"({names}|:#)" if names else "(:#)", text)
        return " ".join(self._part(part) for part in parts if part)

    def _part(self, part: str) -> str:
        if part == ":#":
            return "/:[0-9]{1,3}/"
        return f"<[{self.ids[part]}]>" if part in self.ids else _quoted(part)

    def until(self, end: str) -> str:
        """Any text up to this end, which belongs to it."""
        if self.has_control(end):
            return f"{_TEXT} {self.literal(end)}"
        return self.add(f"{_TEXT} {_quoted(end)}", "[lazy]")

    # -- arguments that are no JSON -------------------------------------------------------------

    def tags(self, schema: Mapping[str, Any]) -> str:
        """<parameter=NAME>\nVALUE\n</parameter>\n, … first of the names that are required."""
        needed, optional = _properties(schema)
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        for name, about in [*needed.items(), *optional.items()]:
            is_text = isinstance(about, Mapping) and about.get("type") == "string"
            close = "\n</parameter>\n"
            value = self.until(close) if is_text and "enum" not in about else ""
            value = value or f"{self._tagged(about, shared)} {self.literal(close)}"
            pair = f"{self.literal(f'<parameter={name}>' + chr(10))} {value}"
            parts.append(pair if name in needed else f"({pair})?")
        return " ".join(parts)

    def _tagged(self, about: Any, shared: Mapping[str, Any]) -> str:
        if isinstance(about, Mapping) and about.get("type") == "string":
            return f"({' | '.join(self.literal(str(value)) for value in about['enum'])})"
        return _json({**about, **shared} if isinstance(about, dict) else {})

    def pairs(
        self, root: Any, schema: Any, opening: str, end: str, joint: str, depth: int = 0
    ) -> str:
        """opening NAME joint VALUE, … end; first the names that are required."""
        needed, optional = _properties(schema)
        comma = self.literal(", " if joint == "=" else ",")

        def pair(name: str, about: Any) -> str:
            key = name if joint == "=" or self.notation.quote != '"' else f'"{name}"'  # type: ignore[union-attr]
            return f"{self.literal(key + joint)} {self.value(root, about, depth + 1)}"

        first = [pair(name, about) for name, about in needed.items()]
        rest = [pair(name, about) for name, about in optional.items()]
        body = f" {comma} ".join(first)
        if first:
            body += "".join(f" ({comma} {each})?" for each in rest)
        elif rest:  # of names none of which is required, any may be the first
            tails = ["".join(f" ({comma} {e})?" for e in rest[i + 1 :]) for i in range(len(rest))]
            body = f"({' | '.join(e + t for e, t in zip(rest, tails, strict=True))})?"
        return f"{self.literal(opening)} {body} {self.literal(end)}"

    def value(self, root: Any, about: Any, depth: int) -> str:
        """A value of a schema in the notation."""
        about = _resolved(root, about)
        if depth > _DEEPEST or not isinstance(about, Mapping):
            return self._text()
        for choices in (about.get("anyOf"), about.get("oneOf")):
            if isinstance(choices, list) and choices:
                return f"({' | '.join(self.value(root, c, depth + 1) for c in choices)})"
        options = [about["const"]] if "const" in about else about.get("enum")
        if isinstance(options, list) and options:
            return f"({' | '.join(self.literal(self._written(value)) for value in options)})"
        kinds = about.get("type", "string")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return f"({' | '.join(self._kind(root, about, kind, depth) for kind in kinds)})"

    def _kind(self, root: Any, about: Mapping[str, Any], kind: str, depth: int) -> str:
        assert self.notation is not None
        true, false, null = map(_quoted, self.notation.words)
        match kind:
            case "number":
                return _NUMBER
            case "integer":
                return _WHOLE
            case "boolean":
                return f"({true} | {false})"
            case "null":
                return null
            case "array":
                item = self.value(root, about.get("items", {}), depth + 1)
                return f'"[" ({item} ("," {item})*)? "]"'
            case "object":
                return self.pairs(root, about, "{", "}", ":", depth)
        return self._text()

    def _text(self) -> str:
        assert self.notation is not None
        quote = self.literal(self.notation.quote)
        return f"{quote} /{self.notation.word}/ {quote}"

    def _written(self, value: Any) -> str:
        """A value that is no list or object, as the notation has it."""
        assert self.notation is not None
        words = dict(zip((True, False, None), self.notation.words, strict=True))
        if value is None or isinstance(value, bool):
            return words[value]
        quote = self.notation.quote
        return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def _properties(schema: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of those names that are required, and of the others."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    properties = properties if isinstance(properties, Mapping) else {}
    required: Collection[Any] = schema.get("required") or () if properties else ()
    needed = {name: about for name, about in properties.items() if name in required}
    return needed, {name: about for name, about in properties.items() if name not in needed}


def _resolved(root: Any, about: Any) -> Any:
    """What a reference within the schema, such as #/$defs/day, stands for."""
    path = about.get("$ref") if isinstance(about, Mapping) else None
    if not isinstance(path, str) or not path.startswith("#/"):
        return about
    for name in path[2:].split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root
