"""The README's commands where nothing but pyggml is installed, or pyggml with one extra: each runs,
or one sentence says which extra it wants."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
from extras import EXTRAS, needs
from only_with import ROOT

SUPPORT = ROOT / "tests/support"
SHORT = "--ctx 16 --max-steps 1 --prompt a"
LOGGED = "pyggml-finetune -m model.gguf -f text.txt -o a.gguf --log-to {}"
TAKEN = "--port PORT"  # one that is taken, which ends a server that has its packages
# A command of the README, what a test adds to it, and the extra that it wants.
COMMANDS = [
    ("pyggml-finetune --demo", "--dry-run", None),
    ("pyggml-finetune -m model-Q4_K_M.gguf -f text.txt -o adapter.gguf", SHORT, None),
    ("pyggml eval -m model.gguf -f held-out.jsonl --compare adapter.gguf", "", None),
    ("pyggml chat -m model.gguf --lora adapter.gguf", "", None),
    ("pyggml serve -m model.gguf --lora mine=adapter.gguf --web", TAKEN, "serve"),
    ("pyggml view model.gguf --run FOLDER", TAKEN, "view"),
    ("pyggml merge -m model.gguf --lora adapter.gguf -o merged.gguf --type Q4_K_M", "", None),
    # What the README says beside them.
    ("pyggml-finetune -m model.gguf -f rows.parquet -o a.gguf", SHORT, "parquet"),
    ("pyggml-finetune -m model.gguf -f text.txt -o a.gguf --device webgpu", SHORT, "webgpu"),
    (LOGGED.format("tensorboard"), SHORT, "tensorboard"),
    (LOGGED.format("wandb"), SHORT, "wandb"),
    (LOGGED.format("mlflow"), SHORT, "mlflow"),
]
# A module of each extra that one of these wants.
MODULES = {extra: module for module, extra in EXTRAS.items()} | {
    "serve": "starlette",
    "view": "igraph",
    "wandb": "wandb",
    "mlflow": "mlflow",  # optuna brings SQLAlchemy too
}
ALONE = sorted({extra for _, _, extra in COMMANDS if extra})


def readme_commands():
    """The lines of the README that are commands of ours, without what they follow."""
    for line in (ROOT / "README.md").read_text("utf-8").splitlines():
        code = re.match(r"    (?:.*&& )?(pyggml.*?)(?:    # .*)?$", line)
        if code:
            yield code[1].strip()


def test_every_command_of_the_readme_is_tried():
    assert {*readme_commands()} <= {command for command, _, _ in COMMANDS}


@pytest.fixture
def folder(tmp_path, model_with, text):
    """What the README's commands name."""
    template = (ROOT / "pyggml/chat/builtin/chatml.jinja").read_text("utf-8")
    model = model_with(tokenizer__chat_template=template)
    for name in ("model.gguf", "model-Q4_K_M.gguf"):
        (tmp_path / name).symlink_to(model)
    (tmp_path / "text.txt").symlink_to(text)
    row = {"prompt": "the path ", "completion": "to the other"}
    (tmp_path / "held-out.jsonl").write_text((json.dumps(row) + "\n") * 4)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "FOLDER").mkdir()
    return tmp_path


def tried(folder, commands, *extras):
    """The commands with (exit code, what it said) of each, with these extras alone."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        lines = [f"{command} {more}".replace("PORT", port) for command, more, _ in commands]
        done = subprocess.run(
            [sys.executable, str(SUPPORT / "only_with.py"), ",".join(extras)],
            input=json.dumps([shlex.split(line) for line in lines]),
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    yield from zip(commands, json.loads(done.stdout), strict=True)


def test_without_any_extra(folder):
    for (command, _, extra), (code, said) in tried(folder, COMMANDS):
        if extra is None:
            assert code == 0, (command, said)
        else:
            *_, last = said.splitlines()
            assert code == 2 and re.search(rf"pip install '.*\[{extra}\]'$", last), (command, said)


@pytest.mark.parametrize("extra", [pytest.param(e, marks=needs(MODULES[e])) for e in ALONE])
def test_with_one_extra(folder, extra):
    """Its own commands, after one that wants none; all of those run without any, above."""
    commands = [COMMANDS[0], *(each for each in COMMANDS if each[2] == extra)]
    for (command, _, of), (code, said) in tried(folder, commands, extra):
        assert "pip install" not in said, (command, said)
        assert of or code == 0, (command, said)
