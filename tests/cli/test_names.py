"""Whatever a file is called, a command ends in words, and prints nothing that commands a terminal.

The commands and what they read and write are those that click knows; see test_places.py.
"""

import os
import shutil
import signal
import sys

import pytest
from command_files import ALL, file_for, inputs_of, line_of, outputs_of, write_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")

# No UTF-8; a title and a colour; a second line; the other direction; a pattern; an option.
WORST = "-a" + os.fsdecode(b"\xe4") + "\x1b]0;owned\x07\x1b[31mred\n\u202egnp[b*?"
READ = [(name, p.name) for name in ALL for p in inputs_of(name)]


@pytest.fixture
def files(tiny, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where some outputs lie by default
    return write_files(tmp_path, tiny, text)


@pytest.fixture
def patience():
    """Whatever waits longer is interrupted, by no OSError, which commands would say in words."""

    def give_up(number, frame):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 240)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def no_server(monkeypatch):
    """Servers end before they listen."""
    monkeypatch.setattr("pyggml.cli.commands.serve.startup.serve", lambda *_: None)
    monkeypatch.setattr("pyggml.cli.commands.view.startup.serve", lambda *_: None)


def ended_in_words(ended):
    assert ended.code in (0, 2, 130), ended
    for text in (ended.out, ended.err):
        assert not set(text) & {"\x1b", "\x07", "\r", "\u202e"}, text
        text.encode()  # no half of a pair, which a file of UTF-8 would not take
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("name", "source"), READ, ids=map(" ".join, READ))
def test_a_file_that_is_read_may_have_any_name(
    pyggml,
    files,
    patience,
    no_server,
    name,
    source,
):
    """Also where it is what was not expected: its name is in the sentence."""
    (parameter,) = (p for p in inputs_of(name) if p.name == source)
    path = file_for(parameter, files)
    other = path.with_name(WORST + path.suffix)
    shutil.copy(path, other)
    ended_in_words(pyggml(*line_of(name, files, {source: other, "max_steps": 1, "ctx": 16})))


@pytest.mark.parametrize("name", [name for name in ALL if outputs_of(name)])
def test_a_file_that_is_written_may_have_any_name(
    pyggml,
    files,
    patience,
    name,
):
    (output,) = outputs_of(name)
    path = files / f"{WORST}.gguf"
    line = line_of(name, files, {output.name: path, "max_steps": 1, "ctx": 16, "prompt": "the "})
    ended = pyggml(*line)
    ended_in_words(ended)
    if name in ("finetune", "quantize", "imatrix", "inspect", "export-ollama"):
        assert ended.code == 0 and path.exists(), ended
    assert not [*files.glob("*.partial"), *files.glob(".*.partial"), *files.glob(".*.lock")]


# Read with other options only: what is given here is not looked at, so that the command may do.
NOT_READ = {
    ("perplexity", "chat_template"),
    ("imatrix", "chat_template"),
    ("eval", "chat_template"),
    ("generate", "chat_template"),
    ("inspect", "lora"),
    ("inspect", "text"),
}


def is_refused(ended, name, source):
    assert ended.code == 2 or (ended.code == 0 and (name, source) in NOT_READ), ended
    assert "Traceback" not in ended.err, ended


@pytest.mark.parametrize(("name", "source"), READ, ids=map(" ".join, READ))
def test_a_pipe_that_nobody_writes_to_makes_nothing_wait(
    pyggml,
    files,
    patience,
    no_server,
    monkeypatch,
    name,
    source,
):
    monkeypatch.setattr("pyggml.lora.data.reading.expand.MOST_PATIENCE", 0.2)
    os.mkfifo(files / "pipe")
    line = line_of(name, files, {source: files / "pipe", "max_steps": 1, "ctx": 16})
    is_refused(pyggml(*line), name, source)


@pytest.mark.parametrize(("name", "source"), READ, ids=map(" ".join, READ))
def test_a_terabyte_that_nobody_wrote_is_refused_at_once(
    pyggml, files, patience, no_server, name, source
):
    """A file of 1 TB that takes no room, but for a line at its beginning."""
    (parameter,) = (p for p in inputs_of(name) if p.name == source)
    path = files / f"sparse{file_for(parameter, files).suffix}"
    path.write_text('{"text": "the path to the other thing"}\n')
    os.truncate(path, 1 << 40)
    is_refused(
        pyggml(*line_of(name, files, {source: path, "max_steps": 1, "ctx": 16})), name, source
    )
