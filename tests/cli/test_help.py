"""Help of every command: a screen with examples that are right; --help-all; the names of others."""

import re
import shlex
from pathlib import Path

import click
import pytest

from pyggml.cli import __main__ as cli
from pyggml.cli.commands.finetune import config_file
from pyggml.cli.terminal.exit import ELSEWHERE, option
from pyggml.cli.terminal.help import GroupedCommand, GroupedOption

ROOT = Path(__file__).parents[2]
# An option takes one line of 80 columns, but for these few.
_LONGEST = 40
COMMON_OF_FINETUNE = (
    *("lora-rank", "lora-alpha", "lora-modules", "ctx", "val-split", "chat-template", "objective"),
    *("epochs", "max-steps", "batch", "grad-accum", "lr", "grad-checkpointing", "max-memory"),
    *("device", "checkpoint-dir"),
)


@pytest.mark.quick
@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_fits_a_screen_and_ends_with_three_examples(pyggml, monkeypatch, name, width):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = pyggml(name, "--help").out.splitlines()
    assert len(lines) <= _LONGEST and max(map(len, lines)) <= max(width, 82)
    assert lines[-4] == "Examples:" and all(line.startswith("  ") for line in lines[-3:])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_all_has_every_option(pyggml, name):
    every, short = pyggml(name, "--help-all").out, pyggml(name, "--help").out
    command = cli.command(name)
    assert isinstance(command, GroupedCommand)
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            assert isinstance(each, GroupedOption), each.name
            assert each.opts[-1].lstrip("-") in every
            assert not any(f"--{alias} " in every for alias in each.aliases), "one name in help"
    assert len(every) >= len(short)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_examples_are_right(name):
    """Every one is a command line of ours that can be read."""
    for example in cli.command(name).examples:
        for part in re.split(r" && | \| ", example):
            words = [w for w in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=\S+", w)]
            if words[0] == "pyggml":
                cli.command(words[1]).make_context(words[1], words[2:])


# -- the names of others --------------------------------------------------------------------------


def aliases_of(name):
    return {a: o for o in cli.command(name).params for a in getattr(o, "aliases", ())}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_name_means_two_options(name):
    params = [o for o in cli.command(name).params if isinstance(o, click.Option)]
    names = [n.lstrip("-") for o in params for n in (*o.opts, *getattr(o, "aliases", ()))]
    assert len(names) == len(set(names))


@pytest.mark.quick
def test_every_alias_gives_its_setting_on_the_command_line_and_in_a_file(tmp_path):
    command, values = cli.command("finetune"), {int: "1", float: "0.5"}
    kinds = {"integer": int, "float": float, "layers": int, "shares": float}
    for alias, of in aliases_of("finetune").items():
        words = [] if of.is_flag else [values.get(kinds.get(of.type.name), "a")]
        for spelled in (alias, alias.replace("-", "_")):
            ours = command.make_context("x", [of.opts[-1], *words]).params[of.name]
            theirs = command.make_context("x", [f"--{spelled}", *words]).params[of.name]
            assert ours == theirs is not None, alias
        if of.secondary_opts:
            assert command.make_context("x", [f"--no-{alias}"]).params[of.name] is False
        path = tmp_path / "a.yaml"
        path.write_text(f"{alias.replace('-', '_')}: {words[0] if words else 'true'}\n")
        read = config_file.read(path, [o for o in command.params if o.expose_value])
        assert read.faults == () and read.values == {of.name: read.values[of.name]}


def test_aliases_stand_in_one_table_of_the_docs():
    text = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    for alias, of in aliases_of("finetune").items():
        row = next(line for line in text.splitlines() if f"`--{alias}`" in line)
        assert f"| `{of.opts[-1]}`" in row, alias


def test_what_others_call_otherwise_is_suggested_only_where_it_is_no_alias():
    known = {n.lstrip("-") for o in cli.command("finetune").params for n in o.opts}
    for theirs, ours in ELSEWHERE.items():
        assert theirs.replace("_", "-") not in {*known, *aliases_of("finetune")}
        assert option(ours).lstrip("-") in known or ours in ("file", "output", "lora_init")


@pytest.mark.quick
def test_the_options_that_most_runs_need_are_in_the_short_help(pyggml):
    short = pyggml("finetune", "--help").out
    for name in COMMON_OF_FINETUNE:
        assert re.search(rf"--(\[no-\])?{name} ", short), name
