"""All that the command can is reachable in Python: its options are settings of the library, or
stand in the table of docs/training.md."""

import importlib
import re
from dataclasses import fields
from functools import reduce
from pathlib import Path

import pytest

from pyggml.cli.commands.finetune.command import command
from pyggml.cli.commands.finetune.job import SETTINGS_FLAGS
from pyggml.lora.objectives import OBJECTIVES
from pyggml.lora.objectives.choice import ObjectiveConfig

pytestmark = pytest.mark.quick

TEXT = (Path(__file__).parents[2] / "docs/training.md").read_text("utf-8")
TABLE = TEXT.partition("## In Python\n")[2].partition("\n## ")[0]
ROWS = {
    option: re.findall(r"`(pyggml[\w.]+)", cell)
    for options, cell in re.findall(r"^\| (`-[^|]*) \| ([^|]*) \|$", TABLE, re.M)
    for option in re.findall(r"`--([\w-]+)`", options)
}
OPTIONS = {
    next(o for o in p.opts if o.startswith("--"))[2:]: p.name
    for p in command.params
    if p.expose_value and p.name != "config"
}
FIELDS = {
    flags.get(f.name, f.name): (kind, f.name)
    for kind, flags in SETTINGS_FLAGS.items()
    for f in fields(kind)
}
NOT_ON_THE_COMMAND_LINE = {"seed"}  # of LoraConfig: the command has the run's seed for both


def thing(name):
    """The object of a dotted name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            return reduce(getattr, parts[n:], importlib.import_module(".".join(parts[:n])))
        except ModuleNotFoundError:
            continue
    raise ModuleNotFoundError(name)


def test_every_option_is_a_setting_or_stands_in_the_table():
    assert {o for o, name in OPTIONS.items() if name not in FIELDS} == ROWS.keys()


@pytest.mark.parametrize("option", ROWS)
def test_what_the_table_names_is_there(option):
    assert ROWS[option]
    for name in ROWS[option]:
        assert thing(name) is not None


def test_every_setting_of_the_library_has_an_option():
    lack = {name for name in FIELDS if name not in OPTIONS.values()}
    assert lack <= NOT_ON_THE_COMMAND_LINE


def test_settings_of_objectives_are_arguments_of_theirs():
    of_objectives = {f.name for kind in OBJECTIVES.values() for f in fields(kind)}
    assert {f.name for f in fields(ObjectiveConfig)} == {"objective", *of_objectives}
