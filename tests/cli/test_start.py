"""Before and around a command: what is imported, where options come from, how a process ends."""

import json
import os
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
from processes import printed

import pyggml as library
from pyggml.cli import __main__ as cli
from pyggml.cli.commands.finetune.job import LORA_FLAGS
from pyggml.cli.terminal.help import TITLES
from pyggml.errors import PyggmlError
from pyggml.lora import DataConfig, LoraConfig, TrainConfig, attach
from pyggml.settings import GROUPS

ROOT = Path(__file__).parents[2]


# -- imports and entry points -------------------------------------------------------------------


def test_nothing_heavy_is_imported_before_a_command_is_called():
    code = (
        "import sys; from pyggml.cli.__main__ import main;"
        "[main(each) for each in (['--help'], ['--version'], ['nonsense'], [])];"
        "sys.exit(bool({'numpy', 'numba', 'rich', 'pyggml.lora'} & set(sys.modules)))"
    )
    printed(code)


def test_a_run_into_a_pipe_does_not_import_rich(tiny, text, tmp_path):
    code = "import sys, pyggml.cli.commands.finetune; sys.exit('rich' in sys.modules)"
    printed(code)


@pytest.mark.quick
@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_in_the_table_has_help(pyggml, name):
    ended = pyggml(name, "--help")
    assert ended.code == 0 and "--help" in ended.out
    assert cli.COMMANDS[name] in " ".join(pyggml("--help").out.split())


def test_the_package_says_what_it_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = {c.rpartition(" ")[2] for c in project["classifiers"] if " :: 3." in c}
    assert versions == {"3.11", "3.12", "3.13", "3.14"}
    assert project["requires-python"] == ">=3.11,<3.15"
    assert {"LoRA", "GGUF", "llama.cpp"} <= set(project["keywords"])


# Commands one after the other, and the largest of their codes.
IN_TURN = """
import json, sys
from pyggml.cli.__main__ import main
sys.exit(max(map(main, json.loads(sys.argv[1]))))
"""


@pytest.mark.skipif(os.name != "posix", reason="terminals of POSIX")
def test_a_dumb_terminal_gets_no_escapes(tiny, text, tmp_path):
    attach(library.load(tiny), LoraConfig(rank=1)).save(tmp_path / "a.gguf")
    lines = [
        f"finetune -m {tiny} -f {text} -o {tmp_path}/b.gguf --ctx 16 --max-steps 1 --preview 1",
        f"eval -m {tiny} -f {text} --ctx 16",
        f"merge -m {tiny} --lora {tmp_path}/a.gguf -o {tmp_path}/c.gguf",
    ]
    leader, follower = os.openpty()
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", IN_TURN, json.dumps([line.split() for line in lines])],
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(follower)
    said = b""
    with suppress(OSError):  # the end, on Linux
        while piece := os.read(leader, 1 << 16):
            said += piece
    os.close(leader)
    assert run.wait(300) == 0 and b"\x1b" not in said, said
    assert all(word in said for word in (b"step 1/1", b"perplexity", b"c.gguf")), said


def test_the_entry_points_are_these_functions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {
        "pyggml": "pyggml.cli.__main__:main",
        "pyggml-finetune": "pyggml.cli.__main__:finetune",
    }
    assert callable(cli.main) and callable(cli.finetune)


# -- options ------------------------------------------------------------------------------------


@pytest.mark.quick
def test_every_setting_has_one_option_with_its_help_and_default():
    options = {o.name: o for o in cli.command("finetune").params}
    for config, flags in ((LoraConfig, LORA_FLAGS), (DataConfig, {}), (TrainConfig, {})):
        for f in fields(config):
            option = options[flags.get(f.name, f.name)]
            assert option.default is None or "UNSET" in repr(option.default)
            said = f"default: {f.default}" in option.help
            assert said or f.default is None or (option.is_flag and f.default is False)
            if (config, f.name) != (LoraConfig, "seed"):  # one --seed for both
                assert option.help.startswith(f.metadata["help"])


@pytest.fixture
def help_of(pyggml, monkeypatch):
    """The lines of help on a terminal of 80 columns."""

    def call(option):
        monkeypatch.setenv("COLUMNS", "80")
        return pyggml("finetune", option).out.splitlines()

    return call


def listed(lines):
    """The long options of help, by the title of their group."""
    found, group = {}, ""
    for line in lines:
        group = line.rstrip(":") if line.endswith(":") and line[0] != " " else group
        if line.startswith("  -"):
            name = next(w for w in line.split() if w.startswith("--"))
            found.setdefault(group, []).append(name.replace("[no-]", ""))
    return found


def test_help_lists_the_common_options_and_help_all_every_one(help_of):
    common, every = listed(help_of("--help")), listed(help_of("--help-all"))
    options = cli.command("finetune").params
    groups = {option.group for option in options}
    wanted = [title for group, title in TITLES.items() if group in groups]
    assert list(every) == wanted and list(common) == [t for t in wanted if t in common]
    for group, names in common.items():
        assert names == [name for name in every[group] if name in names]
    assert sorted(name for names in every.values() for name in names) == sorted(
        next(x for x in o.opts if x.startswith("--")) for o in options
    )
    assert set(GROUPS) <= TITLES.keys() and "--lr" in common["Training"]
    assert "--beta1" in every["Training"] and "--beta1" not in common["Training"]


def test_all_help_is_readable_on_80_columns(help_of):
    lines = help_of("--help-all")
    assert max(map(len, lines)) <= 80
    starts = {len(line) - len(line.lstrip()) for line in lines if line.startswith("   ")}
    assert len(starts) == 1, "all explanations start in one column"


def test_the_seed_is_that_of_windows_and_adapter(finetune, tmp_path):
    found = set()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        out = tmp_path / name
        assert finetune("--seed", seed, "--max-steps", 1, output=out).code == 0
        found.add(out.read_bytes())
    assert len(found) == 2


# -- ends ---------------------------------------------------------------------------------------


def test_the_exit_code_of_a_process_that_refuses(tmp_path):
    command = [sys.executable, "-P", "-m", "pyggml.cli", "inspect", "-m", tmp_path / "none.gguf"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and ended.stdout == "" and ended.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_standard_output_is_one_sentence():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-P", "-m", "pyggml.cli", "--help"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert ended.stderr == "pyggml: standard output: No space left on device\n"


def test_a_pipe_gets_every_character(tiny):
    """Whatever the system's code page has: a terminal alone gets ? for what it lacks."""
    there = os.environ | {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    command = [sys.executable, "-P", "-m", "pyggml.cli", "generate", "-m", str(tiny), "-p", "日本"]
    ended = subprocess.run([*command, "-n", "1"], capture_output=True, env=there, timeout=300)
    assert ended.stdout.startswith("日本".encode())
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_arguments_mean_the_same_on_windows(pyggml, tiny, monkeypatch):
    """click would put $HOME's value, and the files of a pattern, in the place of an argument."""

    class Windows:
        name = "nt"

        def __getattr__(self, name):
            return getattr(os, name)

    monkeypatch.setattr("click.core.os", Windows())
    monkeypatch.setattr(
        "sys.argv", ["pyggml", "generate", "-m", str(tiny), "-p", "$HOME", "-n", "1"]
    )
    assert cli.main() == 0
    assert pyggml("--version").out.startswith("$HOME")


def test_a_reader_that_goes_away_is_no_traceback():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "pyggml.cli", "--help"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.stderr, ended.returncode) == ("", 130)


def test_a_fault_of_the_program_keeps_its_traceback(pyggml, tiny, monkeypatch):
    def broken(path):
        raise ZeroDivisionError

    monkeypatch.setattr("pyggml.gguf.open", broken)
    with pytest.raises(ZeroDivisionError):
        pyggml("inspect", "-m", tiny)


@pytest.mark.quick
def test_an_error_is_one_line_whatever_it_holds(pyggml, tiny, monkeypatch):
    def failing(path):
        raise PyggmlError("one\nand\ttwo")

    monkeypatch.setattr("pyggml.gguf.open", failing)
    ended = pyggml("inspect", "-m", tiny)
    assert (ended.code, ended.err) == (2, "pyggml: one and two\n")


def test_a_warning_is_a_note(pyggml, tiny, monkeypatch):
    import warnings

    def warning(path):
        warnings.simplefilter("always")
        warnings.warn("this will be slow", RuntimeWarning, stacklevel=1)
        raise PyggmlError("over")

    monkeypatch.setattr("pyggml.gguf.open", warning)
    assert pyggml("inspect", "-m", tiny).err == "note: this will be slow\npyggml: over\n"
