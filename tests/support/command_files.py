"""Every command with what it reads and writes, as click knows it, and files to give to it."""

import shutil

import click
import numpy as np

from pyggml import gguf
from pyggml.cli.__main__ import COMMANDS, command
from pyggml.cli.terminal.places import FileWord, OutputPath, Reads
from pyggml.graph.dtypes import F32

# Of parameters that name no file and have no default.
OTHERS = {"file_type": "Q8_0", "max_steps": 1, "ctx": 16, "prompt": "the "}
# What a file of a run asks for beside it.
WITH = {"original": {"lora_init": "loftq"}, "teacher": {"objective": "distill"}}
# What `-o adapter.gguf` of a run stands for.
BESIDE = (".gguf", ".yaml", ".html", ".metrics.jsonl", ".metrics.old.jsonl")
ALL = {name: command(name) for name in COMMANDS}


def outputs_of(name):
    return [p for p in ALL[name].params if isinstance(p.type, OutputPath)]


def inputs_of(name):
    return [p for p in ALL[name].params if isinstance(p.type, Reads)]


def write_files(folder, model, text):
    """Files to read and to lose, by kind, in one folder, which is returned."""
    adapter = folder / "lora.gguf"
    about = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "llama"}
    ones = np.ones((2, 4), np.float32)
    gguf.write(adapter, about, [("a.lora_a", F32, (2, 4), ones)])
    for name, content in {
        "rows.jsonl": '{"text": "the path to the other thing"}\n',
        "template.jinja": "{{ messages }}",
        "run.yaml": "lora_rank: 2\n",
    }.items():
        (folder / name).write_text(content)
    shutil.copy(model, folder / "model.gguf")
    shutil.copy(text, folder / "text.txt")
    return folder


def file_for(parameter, files):
    """A file that a parameter may read."""
    name = parameter.name
    if isinstance(parameter.type, FileWord):
        found = {"data": "text.txt", "val_file": "rows.jsonl", "chat_template": "template.jinja"}
    else:
        found = {"text": "text.txt", "files": "text.txt", "messages": "rows.jsonl"}
        found |= {"lora": "lora.gguf", "below": "lora.gguf", "init": "lora.gguf"}
        found |= {"config": "run.yaml", "imatrix": "text.txt", "resume": "lora.gguf"}
    return files / found.get(name, "model.gguf")


def words_of(name, values):
    """The words of a command line: these values, and what the command cannot do without."""
    words = []
    for p in ALL[name].params:
        value = values.get(p.name)
        if value is None and p.required and p.name in OTHERS:
            value = OTHERS[p.name]
        if value is None:
            assert not p.required, f"{name} wants {p.name}: name a value in OTHERS"
            continue
        words += [value] if isinstance(p, click.Argument) else [p.opts[0], value]
    return words


def line_of(name, files, given):
    """A command line with these files, and others where the command wants some."""
    values = {p.name: file_for(p, files) for p in inputs_of(name) if p.required}
    values |= {p.name: files / "out.gguf" for p in outputs_of(name) if p.required}
    if name in ("finetune", "heal"):
        values |= {"model": files / "model.gguf", "data": files / "text.txt"}
        values |= {"output": files / "out.gguf"}
    if name == "finetune":
        values |= {key: value for source in given for key, value in WITH.get(source, {}).items()}
    if name == "eval":
        values |= {"model": files / "model.gguf"}
    if name == "generate" and not given.get("messages"):
        values |= {"prompt": "the "}
    if name == "inspect":
        values |= {"given": files / "model.gguf"}
    if name == "inspect" and given.get("model"):
        del values["given"]
    return [name, *words_of(name, {**values, **given})]
