"""No command loses a file: what it writes is none of what it reads, and replaces only its own kind.

The commands, their outputs and their inputs are those that click knows, so a new one is tried by
itself; a new parameter without a default wants a value in OTHERS of tests/support/command_files.py.
"""

import os
import sys

import click
import numpy as np
import pytest
from command_files import ALL, BESIDE, file_for, inputs_of, line_of, outputs_of, write_files

from pyggml import gguf
from pyggml.cli.commands.finetune.job import METRICS
from pyggml.cli.terminal.places import OutputFolder, OutputPath, Reads

OUTPUTS = OutputPath | OutputFolder
PAIRS = [
    (name, output.name, source.name)
    for name in ALL
    for output in outputs_of(name)
    for source in inputs_of(name)
]


@pytest.mark.quick
def test_every_path_says_whether_it_is_read_or_written():
    loose = [
        f"{name} {p.opts[0]}"
        for name, each in ALL.items()
        for p in each.params
        if isinstance(p.type, click.Path)
        and not isinstance(p.type, OutputPath | OutputFolder | Reads)
    ]
    assert loose == [], "wanted the types InputPath and OutputPath of cli/terminal/places.py"
    named = [
        f"{name} {p.opts[0]}"
        for name, each in ALL.items()
        for p in each.params
        if str(p.metavar).startswith("FILE") and not isinstance(p.type, OutputPath | Reads)
    ]
    assert named == [], "what takes a FILE names one"


@pytest.mark.quick
def test_every_command_that_writes_takes_force_and_no_other_does():
    writing = {n for n, c in ALL.items() if any(isinstance(p.type, OUTPUTS) for p in c.params)}
    assert writing >= {
        "finetune",
        "sweep",
        "merge",
        "quantize",
        "imatrix",
        "inspect",
        "export-ollama",
    }
    for name, each in ALL.items():
        assert any("--force" in p.opts for p in each.params) == (name in writing), name


# -- files of all kinds ---------------------------------------------------------------------------


@pytest.fixture
def files(tiny, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where some outputs lie by default
    return write_files(tmp_path, tiny, text)


def content(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(ended, path, *parts):
    assert ended.code == 2 and ended.err.startswith("pyggml: "), ended
    assert ended.err.count("\n") == 1 and str(path) in ended.err, ended.err
    for part in parts:
        assert part in ended.err, ended.err


def named_otherwise(path, how):
    """The same file by another name."""
    if how == "its own":
        return path
    other = path.with_name(f"other-{path.name}")
    if how == "a link":
        other.symlink_to(path)
    else:
        os.link(path, other)
    return other


@pytest.mark.parametrize("how", ["its own", "a link", "a second name"])
@pytest.mark.parametrize(("name", "output", "source"), PAIRS, ids=map(" ".join, PAIRS))
def test_an_output_is_no_input(pyggml, files, name, output, source, how):
    """Whatever the file is called, and whatever --force says."""
    if how != "its own" and sys.platform == "win32":
        pytest.skip("links want rights on Windows")
    (parameter,) = (p for p in inputs_of(name) if p.name == source)
    path = file_for(parameter, files)
    other = named_otherwise(path, how)
    before = content(files)
    for force in ([], ["--force"]):
        ended = pyggml(*line_of(name, files, {output: other, source: path}), *force)
        refused(ended, other, "wanted another name to write to")
        assert content(files) == before


MODELS = ("model", "given", "source", "vocab")  # as commands call what they read


def model_of(name):
    return next((p.name for p in inputs_of(name) if p.name in MODELS), None)


@pytest.mark.parametrize("name", [name for name in ALL if outputs_of(name) and model_of(name)])
def test_an_output_is_no_part_of_a_model(pyggml, files, name):
    """A model in two files, of which the first is named, or the last."""
    parts = [files / f"part-0000{i}-of-00002.gguf" for i in (1, 2)]
    with gguf.open(files / "model.gguf") as file:
        names = [*file.tensors]
        for i, path in enumerate(parts):
            keys = dict(file.metadata) if i == 0 else {}
            keys |= {"split.no": np.uint16(i), "split.count": np.uint16(2)}
            chosen = names[i::2]
            gguf.write(
                path,
                keys,
                [(n, file.tensors[n].dtype, file.tensors[n].shape, file.data(n)) for n in chosen],
            )
    before = content(files)
    (output,) = outputs_of(name)
    source = "source" if name == "quantize" else model_of(name)
    for read, written in (parts, parts[::-1]):
        for force in ([], ["--force"]):
            line = line_of(name, files, {source: read, output.name: written})
            refused(pyggml(*line, *force), written, "wanted another name to write to")
            assert content(files) == before


STRANGERS = ("a model", "an adapter", "a page", "text", "nothing")


def stranger(files, kind):
    return {
        "a model": lambda: (files / "model.gguf").read_bytes(),
        "an adapter": lambda: (files / "lora.gguf").read_bytes(),
        "a page": lambda: b"<!doctype html><p>mine",
        "text": lambda: b"my own words",
        "nothing": lambda: b"",
    }[kind]()


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("name", [name for name in ALL if outputs_of(name)])
def test_another_kind_of_file_is_not_replaced(pyggml, files, name, kind):
    (output,) = outputs_of(name)
    path = files / "theirs.gguf"
    path.write_bytes(stranger(files, kind))
    if output.type.kind.is_one(path):
        assert output.type.kind.name == kind, "as the command says"
        return
    before = content(files)
    ended = pyggml(*line_of(name, files, {output.name: path}))
    refused(ended, path, "is there already, and is not ", "--force replaces it")
    assert content(files) == before


@pytest.mark.parametrize("suffix", BESIDE)
def test_what_a_run_writes_beside_its_adapter_replaces_its_own_kind(pyggml, files, suffix):
    path = files / f"out{suffix}"
    path.write_text("my own words\n")
    before = content(files)
    line = line_of("finetune", files, {"max_steps": 1, "ctx": 16, "prompt": "the "})
    refused(pyggml(*line), path, "--force replaces it")
    assert content(files) == before
    as_data = line_of("finetune", files, {"data": path, "max_steps": 1, "ctx": 16})
    for force in ([], ["--force"]):
        refused(pyggml(*as_data, *force), path, "is the text, wanted another name")
    assert content(files) == before


def test_force_replaces_what_is_there_and_says_so(pyggml, files):
    for suffix in BESIDE:
        (files / f"out{suffix}").write_text("my own words\n")
    line = line_of("finetune", files, {"max_steps": 1, "ctx": 16, "prompt": "the "})
    ended = pyggml(*line, "--force")
    assert ended.code == 0, ended
    assert "out.yaml" in ended.row("output") and "are replaced at the end" in ended.row("output")
    assert METRICS.is_one(files / "out.metrics.jsonl")
    assert not any(b"my own words" in raw for p, raw in content(files).items() if "out" in p.name)
    again = pyggml(*line)
    assert again.code == 0 and "are replaced at the end" in again.row("output")
    assert METRICS.is_one(files / "out.metrics.old.jsonl"), "the older run's"


@pytest.mark.parametrize("name", [name for name in ALL if outputs_of(name)])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_an_output_that_is_a_pipe_is_refused_and_nothing_waits(pyggml, files, name):
    (output,) = outputs_of(name)
    os.mkfifo(files / "pipe.gguf")
    for force in ([], ["--force"]):
        ended = pyggml(*line_of(name, files, {output.name: files / "pipe.gguf"}), *force)
        refused(ended, "pipe.gguf: is a device")


@pytest.mark.parametrize("name", ["sweep.json", "sweep.html", "lr-0.001.gguf", "lr-0.001.yaml"])
def test_a_sweep_replaces_no_file_that_is_not_its_own(pyggml, files, name):
    """A new command of other outputs asks for each of them."""
    folder = files / "runs"
    folder.mkdir()
    (folder / name).write_text('{"mine": "words"}')
    before = content(files)
    line = ("-m", files / "model.gguf", "-f", files / "text.txt", "--lr", "1e-3,2e-3")
    refused(pyggml("sweep", *line, "-o", folder), folder / name, "is there already, and is not")
    as_data = ("-m", files / "model.gguf", "-f", folder / name, "--lr", "1e-3,2e-3")
    refused(pyggml("sweep", *as_data, "-o", folder), folder / name, "is the text, wanted another")
    assert content(files) == before
