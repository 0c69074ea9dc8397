"""Terminals that lack what Linux's have: no readline, no escape sequences, other keys."""

import importlib
import io
import sys

import pytest

from pyggml.cli.commands.chat import lines
from pyggml.cli.commands.eval.progress import PassProgress
from pyggml.cli.terminal.show import row, wrap

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(("has_readline", "marks"), [(True, True), (False, False)])
def test_a_prompt_without_readline_is_plain(monkeypatch, has_readline, marks):
    monkeypatch.setitem(sys.modules, "readline", sys if has_readline else None)
    monkeypatch.delenv("NO_COLOR", raising=False)
    prompts, typed = [], iter(["a", ""])

    def take(prompt):
        prompts.append(prompt)
        line = next(typed)
        if not line:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", take)
    assert list(lines.read_messages(interactive=True)) == ["a"]
    assert len(prompts) == 2 and all(("\x01" in p) == marks for p in prompts)
    assert marks or prompts == ["> ", "> "]


@pytest.mark.parametrize(("platform", "keys"), [("win32", "Ctrl-Z, Enter"), ("linux", "Ctrl-D")])
def test_the_keys_that_end_a_chat_are_the_system_s(monkeypatch, platform, keys):
    with monkeypatch.context() as changed:
        changed.setattr(sys, "platform", platform)
        assert keys == importlib.reload(lines).END_KEYS
    importlib.reload(lines)


def test_a_line_of_progress_is_overwritten_without_escape_sequences(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = PassProgress("a long label")
    monkeypatch.setattr(progress._time, "seconds_left", lambda done, n: 90 if done == 1 else 0)
    for done in (1, 2, 3):
        progress(done, 3)
    first, second, last, end = capsys.readouterr().err.split("\r")[1:]
    assert first == "a long label: 1 of 3 passes, some 1 min 30 s left"
    assert second.rstrip() == "a long label: 2 of 3 passes" and len(second) == len(first)
    assert last == " " * len(second.rstrip()) and end == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_lines_for_a_terminal_break_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = "memory     " + "some-words that/are.long and " * 9
    for indent in (2, 11):
        lines = wrap(text, Terminal(), indent).splitlines()
        assert len(lines) > 2 and max(map(len, lines)) <= 80
        assert " ".join(" ".join(lines).split()) == " ".join(text.split())
        assert all(line.startswith(" " * indent + "s") or line[indent] != " " for line in lines[1:])
    assert wrap(text, io.StringIO()) == text
    whole = f"note: {'x' * 100} y"
    assert wrap(whole, Terminal()).split() == whole.split(), "a long word is not cut"


def test_commands_to_copy_keep_their_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", out := Terminal())
    row("use it", "pyggml generate " + "-m model.gguf " * 9)
    row("memory", "12 MB " * 9)
    assert [len(line) > 40 for line in out.getvalue().splitlines()] == [True, False, False]
