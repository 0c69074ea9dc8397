"""Ollama's Modelfile: its quoting, its paths, and a chat's turns as a template of Go's.

A value goes on to the end of its line; in quotation marks, or three of them, it may have several
lines. There are no escapes, and characters that do not print are lost. Ollama puts BOS before a
prompt itself, where the model's tokenizer does.
"""

import os
import re
from pathlib import Path

from pyggml.chat import Turns
from pyggml.errors import ConfigError


def quote(text: str) -> str:
    """A value in quotation marks. ConfigError for text that no Modelfile can hold."""
    if '"""' in text or not all(c in "\n\t" or c.isprintable() for c in text):
        raise ConfigError(
            f'{text[:40]!r} cannot stand in a Modelfile: it has """ or characters that do not print'
        )
    marks = '"""' if '"' in text or "\n" in text else '"'
    return f"{marks}{text}{marks}"


def path_for(file: Path, modelfile: Path) -> str:
    """A file's path for a Modelfile: relative to it if the file lies below, else absolute."""
    # Unlike Path.resolve, abspath follows no links: a model may be one, whose name means more.
    file, folder = (Path(os.path.abspath(p)) for p in (file, modelfile.parent))  # noqa: PTH100
    text = f"./{file.relative_to(folder).as_posix()}" if file.is_relative_to(folder) else str(file)
    return text if text.isprintable() and text == text.strip() else quote(text)


def go_template(turns: Turns) -> str:
    """Turns in the language of Go's text/template, over Ollama's .System and .Messages."""
    opening, system, (before_user, after_user) = turns.opening, turns.system, turns.user
    later = _literal(before_user)
    if _ends_alike(turns):  # what comes before the first user's turn stands before the loop
        apart = system and (system[0], system[1].removesuffix(before_user))
        head, before = _opening(opening.removesuffix(before_user), apart), later
    else:
        first = _opening(opening, system) + "{{ $first = false }}"
        head = "{{ $first := true }}"
        before = f"{{{{ if $first }}}}{first}{{{{ else }}}}{later}{{{{ end }}}}"
    user = f"{before}{{{{ .Content }}}}{_literal(after_user)}"
    assistant = "{{ .Content }}".join(map(_literal, turns.assistant))
    return (
        f'{head}{{{{ range .Messages }}}}{{{{ if eq .Role "user" }}}}{user}'
        f'{{{{ else if eq .Role "assistant" }}}}{assistant}{{{{ end }}}}{{{{ end }}}}'
        + _literal(turns.answer)
    )


def _ends_alike(turns: Turns) -> bool:
    """Whether what opens a chat ends as any user's turn begins, with and without a system."""
    ends = [turns.opening] if turns.system is None else [turns.opening, turns.system[1]]
    return all(end.endswith(turns.user[0]) for end in ends)


def _opening(opening: str, system: tuple[str, str] | None) -> str:
    """What stands before the first user's turn."""
    if system is None:
        return _literal(opening)
    otherwise = f"{{{{ else }}}}{_literal(opening)}" if opening else ""
    before, after = map(_literal, system)
    return f"{{{{ if $.System }}}}{before}{{{{ $.System }}}}{after}{otherwise}{{{{ end }}}}"


def _literal(text: str) -> str:
    """Text in which no brace begins an action, nor joins the braces of the next one."""
    return re.sub(r"\{{2,}|\{\Z", lambda braces: f'{{{{ "{braces[0]}" }}}}', text)
