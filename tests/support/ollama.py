"""What Ollama reads in a Modelfile and makes of its TEMPLATE: as much of both as we write."""

import re

_ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)  # Go's: the first two braces begin one


def commands(text):
    """(instruction, value) of a Modelfile; a value in quotation marks may have several lines."""
    found, lines = [], iter(text.splitlines(keepends=True))
    for line in lines:
        if line.startswith("#") or not line.strip():
            continue
        name, _, value = line.partition(" ")
        while (unquoted := _unquoted(value.strip())) is None:
            value += next(lines)
        found.append((name, unquoted))
    return found


def _unquoted(value):
    """None while the closing marks are missing."""
    for marks in ('"""', '"'):
        if value.startswith(marks):
            closed = len(value) >= 2 * len(marks) and value.endswith(marks)
            return value[len(marks) : -len(marks)] if closed else None
    return value


def rendered(template, messages):
    """The text of a chat, by Go's rules for if, range, := and =."""
    pieces = [p.strip(" ") if i % 2 else p for i, p in enumerate(_ACTION.split(template))]
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    block, rest = _block(list(enumerate(pieces)))
    assert not rest
    scope = {".Messages": messages, "$.System": system}
    return _run(block, scope)


def _block(pieces):
    """Statements up to the end of their block, and the pieces after them."""
    statements = []
    while pieces:
        (i, text), pieces = pieces[0], pieces[1:]
        if i % 2 == 0:
            statements.append(("text", text))
        elif text == "end" or text.startswith("else"):
            return statements, [(i, text), *pieces]
        elif text.startswith(("if ", "range ")):
            statement, pieces = _branches(text, pieces)
            statements.append(statement)
        else:
            statements.append(("do", text))
    return statements, []


def _branches(text, pieces):
    branches = []
    while True:
        body, pieces = _block(pieces)
        branches.append((text, body))
        (_, text), pieces = pieces[0], pieces[1:]
        if text == "end":
            return ("branches", branches), pieces
        text = text.removeprefix("else").strip()


def _run(block, scope):
    return "".join(_statement(kind, value, scope) for kind, value in block)


def _statement(kind, value, scope):
    if kind == "text":
        return value
    if kind == "branches":
        return _chosen(value, scope)
    assignment = re.fullmatch(r"(\$\w+) (:?=) (true|false)", value)
    if assignment is None:
        return value[1:-1] if value.startswith('"') else scope[value]
    name, sign, right = assignment.groups()
    assert (name in scope) == (sign == "=")
    scope[name] = right == "true"
    return ""


def _chosen(branches, scope):
    for condition, body in branches:
        word, _, argument = condition.partition(" ")
        if word == "range":
            text = ""
            for message in scope[argument]:
                scope[".Role"], scope[".Content"] = message["role"], message["content"]
                text += _run(body, scope)
            return text
        equal = re.fullmatch(r'if eq \.Role "(\w+)"', condition)
        if not condition or (scope[".Role"] == equal[1] if equal else scope[argument]):
            return _run(body, scope)
    return ""
